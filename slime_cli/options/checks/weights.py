"""Ways to the engines that exclude other options."""

from collections.abc import Iterator

from slime_cli.options.checks.common import Problem
from slime_cli.options.resolve import Resolved


def transport(r: Resolved) -> Iterator[Problem]:
    way = r.slime.update_weight_transport
    if way == "disk":
        return
    if r.slime.update_weight_mode == "delta":
        yield (
            f"--update-weight-mode delta: {way} sends whole weights, from memory",
            "keep one: deltas go through files (--update-weight-transport disk)",
        )
    if r.slime.custom_update_weight_post_write_path:
        yield (
            f"--custom-update-weight-post-write-path is called when a version is on a disk, and {way} writes none",
            "leave out one of the two",
        )


TRAIN = (transport,)
