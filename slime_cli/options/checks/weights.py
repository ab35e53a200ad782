"""Ways to the engines that are not built."""

from collections.abc import Iterator

from slime_cli.options.checks.common import Problem
from slime_cli.options.resolve import Resolved


def transport(r: Resolved) -> Iterator[Problem]:
    if r.slime.update_weight_transport == "nccl":
        yield (
            "--update-weight-transport nccl: trainer ranks and engines in one NCCL group are not built",
            "leave it out: weights go through files (docs/weights.md)",
        )


TRAIN = (transport,)
