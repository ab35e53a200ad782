"""Trackers besides metrics.jsonl, under the names of slime's launch scripts."""

from typing import Literal

from slime_cli.options.declare import given, group, option

_WANDB = given("use_wandb")
_TENSORBOARD = given("use_tensorboard")


@group("tracking")
class Tracking:
    """Where a run's numbers go besides metrics.jsonl. The libraries are no requirement of slime's: they are imported
    when asked for."""

    use_wandb: bool = option(
        False, "Send the numbers of every rollout and evaluation to Weights & Biases.", resume="free"
    )
    wandb_project: str | None = option(None, "Project of the run there.", needs=_WANDB, resume="free")
    wandb_group: str | None = option(
        None, "Group of the run there, and the beginning of its name.", needs=_WANDB, resume="free"
    )
    wandb_team: str | None = option(None, "Team, or user, whose project it is.", needs=_WANDB, resume="free")
    wandb_host: str | None = option(None, "Address of a server other than wandb.ai.", needs=_WANDB, resume="free")
    wandb_key: str | None = option(
        None,
        "Key of the account; a login of the machine, or WANDB_API_KEY, when not given. It is written nowhere.",
        needs=_WANDB,
        resume="free",
        secret=True,
    )
    wandb_mode: Literal["online", "offline", "disabled"] | None = option(
        None, "Send numbers now, keep them in files for `wandb sync`, or do nothing.", needs=_WANDB, resume="free"
    )
    wandb_dir: str | None = option(None, "Folder of its files; the run directory.", needs=_WANDB, resume="free")
    wandb_run_id: str | None = option(
        None,
        "Id of the run there; one of the run directory, so that a resume continues it.",
        needs=_WANDB,
        resume="free",
    )
    wandb_random_suffix: bool = option(
        True,
        "Name the run as its group, without letters of its id after it.",
        flag="--disable-wandb-random-suffix",
        needs=_WANDB,
        resume="free",
    )
    wandb_always_use_train_step: bool = option(
        False, "Show every number over optimizer steps, not over rollouts.", needs=_WANDB, resume="free"
    )
    use_tensorboard: bool = option(
        False, "Write the numbers of every rollout and evaluation for TensorBoard.", resume="free"
    )
    tb_project_name: str | None = option(
        None, "Folder of its files; tensorboard in the run directory.", needs=_TENSORBOARD, resume="free"
    )
    tb_experiment_name: str | None = option(
        None, "Folder in that folder, where several runs share it.", needs=_TENSORBOARD, resume="free"
    )
