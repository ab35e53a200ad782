"""The names of spans: who records them, and what their readers make of them.

A name that is not here is refused by the type checker and by a test. The exports and the summary show any name, so the
trace of an older run stays readable.
"""

from typing import Literal

SpanName = Literal[
    # the run's own process, one after another
    "wait_for_engines",
    "begin_phase",
    "step",
    "wait_for_batch",
    "write_batch",
    "train",
    "save",
    "commit",
    "publish",
    "pause",
    "release",
    "resume",
    "sync",
    "verify",
    # the run's own process, many at once
    "generate",
    "reward",
    "eval",
    # trainer ranks
    "load_checkpoint",
    "load_published",
    "send",
    "sums",
    "data",
    "values",
    "log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "old_log_probs",
    "advantages",
    "forward_backward",
    "optimizer",
    "save_checkpoint",
    "wait_for_checkpoint",
    "export",
    "offload",
    "onload",
]

RUN = "conductor"
"""The process that runs the loop, as traces call it."""
FIRST_RANK = "trainer-0"
"""The trainer rank that stands for all: they work in step."""

STEP: SpanName = "step"
"""One turn of a schedule: from asking for a rollout's batch until its weights are published."""
TRAIN: SpanName = "train"
"""The trainer has a batch. The ranks record a span of that name too, around what they do."""
WAIT: SpanName = "wait_for_batch"
"""The trainer has nothing to train: it is idle."""
GENERATE: SpanName = "generate"
ROLLOUT_WORKS: tuple[SpanName, ...] = (GENERATE, "reward")
"""While one of them is open the rollout side has something in flight."""
INTERRUPT: SpanName = "pause"
"""Around a change of the engines' weights: what is in flight ends or stands still first, and new requests wait."""
STAND_STILL: tuple[SpanName, ...] = ("sync", "verify")
"""Meanwhile the engines answer nobody, so the rollout side is idle."""
