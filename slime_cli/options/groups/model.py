"""Where weights come from and where they are kept."""

from typing import Literal

from slime_cli.options.declare import AT_LEAST_0, AT_LEAST_1, EITHER, given, group, option


@group("model")
class Model:
    """Where weights come from and where they are kept."""

    hf_checkpoint: str = option(
        None, "Folder of the Hugging Face model: engine weights, tokenizer and chat template.", commands=EITHER
    )
    load: str | None = option(None, "Checkpoint folder to start or resume the trainer from.")
    ckpt_step: int | None = option(
        None,
        "Step of the checkpoint in --load to start from; the newest whole one when not given.",
        bounds=AT_LEAST_0,
        needs=given("load"),
    )
    on_damaged_checkpoint: Literal["fail", "rollback"] = option(
        "fail",
        "A resume whose newest checkpoint is damaged ends, or goes back to the newest whole one.",
        resume="free",
    )
    ref_load: str | None = option(None, "Checkpoint of the reference model; also the start when --load holds none yet.")
    save: str | None = option(
        None, "Folder for the trainer's checkpoints; in it, one for each phase where there are several."
    )
    save_interval: int | None = option(None, "Rollout steps between two checkpoints.", bounds=AT_LEAST_1, resume="free")
    keep_checkpoints: int = option(
        2,
        "Checkpoints to keep, the newest; the one that became the reference stays besides.",
        bounds=AT_LEAST_1,
        resume="free",
    )
    save_hf: str | None = option(
        None,
        "Folder for Hugging Face exports, {rollout_id} in it becomes the rollout's number; in it, one for "
        "each phase where there are several.",
        resume="free",
    )
