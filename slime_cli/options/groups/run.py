"""Options for what a run writes, and for resuming."""

from typing import Literal

from slime_cli.options.declare import AT_LEAST_1, EITHER, group, option


@group("run")
class Run:
    """Options for what a run writes, and for resuming."""

    run_dir: str | None = option(
        None, "Folder of the run: run.json, journal, rollouts, metrics, trace.", commands=EITHER, resume="free"
    )
    trace: Literal["on", "off"] = option("on", "Record spans.", resume="free")
    keep_rollouts: int | None = option(
        None, "Rollout folders to keep, the newest; all when not given.", bounds=AT_LEAST_1, resume="free"
    )
    drop_rollouts: list[int] | None = option(
        None,
        "Rollout ids of batches that an interrupted run made, and that are dropped in place of being trained.",
        resume="free",
    )
