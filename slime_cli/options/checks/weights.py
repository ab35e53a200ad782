"""Ways to the engines that exclude other options."""

from collections.abc import Iterator

from slime_cli.options.checks.common import Problem
from slime_cli.options.drafts import OWN
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


def drafts(r: Resolved) -> Iterator[Problem]:
    """Weights go to the layers that draft as well, if they are the model's own."""
    algorithm, other = (r.sglang.get(f"speculative_{name}") for name in ("algorithm", "draft_model_path"))
    if algorithm and other and other != r.slime.hf_checkpoint:
        yield (
            f"--sglang-speculative-draft-model-path {other}: SGLang loads each new version of the policy into the draft"
            " model too, whose weights would be lost",
            "draft with the policy's own MTP layers (leave it out), or by --sglang-speculative-algorithm NGRAM",
        )
    if algorithm in OWN and r.slime.update_weight_transport == "nccl":
        yield (
            f"--sglang-speculative-algorithm {algorithm} with --update-weight-transport nccl: SGLang loads what a group"
            " sends into the model alone, and the layers that draft would keep old weights",
            "keep one: disk and ipc reach both",
        )


TRAIN = (transport, drafts)
