"""One half of a run alone: rollouts without a trainer, or training without engines on rollouts that were saved."""

from slime_cli.options.declare import POLICY, Bounds, given, group, option


@group("debug")
class Debug:
    """One half of a run alone: rollouts without a trainer, or training without engines on rollouts that were saved."""

    debug_rollout_only: bool = option(
        False, "Start no trainer: rollouts of the HF checkpoint are generated, rewarded and written.", needs=POLICY
    )
    debug_train_only: bool = option(
        False,
        "Start no engines: train on --load-debug-rollout-data; with --loss-type sft_loss none is started anyway.",
    )
    save_debug_rollout_data: str | None = option(
        None,
        "Parquet file for a copy of each rollout; {rollout_id} in it becomes the rollout's number.",
        resume="free",
    )
    load_debug_rollout_data: str | None = option(
        None,
        "Such a file, or a run's rollouts/{rollout_id:06d}, to train on in place of generating.",
        needs=POLICY,
        resume="free",
    )
    load_debug_rollout_data_subsample: float | None = option(
        None,
        "The share of such a rollout's groups to train on: half of it from its begin, half from its end.",
        bounds=Bounds(gt=0, le=1),
        needs=given("load_debug_rollout_data"),
    )
    save_debug_train_data: str | None = option(
        None,
        "Parquet file for what a rollout was trained on (advantages, log-probabilities); {rollout_id} in it "
        "becomes the rollout's number.",
        needs=POLICY,
        resume="free",
    )
