"""Options without a part in supervised training: nothing is generated, rewarded, compared or evaluated."""

from collections.abc import Iterator

from slime_cli.options import catalogue, own
from slime_cli.options.checks.common import no_effect
from slime_cli.options.resolve import Resolved

GROUPS = ("reward", "eval", "algorithm", "off-policy")
"""Groups of options that belong to a policy, but for those in ``BOTH``."""
BOTH = """
    loss_type stop_at_loss only_train_params_name_list freeze_params_name_list reset_optimizer_states use_stateless_adam
    on_nan_gradient custom_loss_function_path
""".split()
ROLLOUT = """
    rollout_temperature rollout_top_p rollout_top_k over_sampling_batch_size dynamic_sampling_filter_path
    custom_generate_function_path buffer_filter_path rollout_sample_hook_path rollout_sample_filter_path
    rollout_all_samples_process_path custom_reward_post_process_path custom_convert_samples_to_train_data_path
    rollout_data_postprocess_path custom_rollout_log_function_path custom_eval_rollout_log_function_path
    eval_function_path custom_megatron_before_log_prob_hook_path custom_update_weight_post_write_path
""".split()


def supervised(r: Resolved) -> Iterator[str]:
    if r.slime.loss_type != "sft_loss":
        return
    idle = [o for o in own.OPTIONS if o.group in GROUPS and o.dest not in BOTH or o.dest in ROLLOUT]
    flags = [o.flag for o in idle if r.origins[f"slime.{o.dest}"] == "flag"]
    for section in ("sglang", "router"):
        prefix = catalogue.PREFIXES[section]
        table = catalogue.load(section).by_dest
        given = [dest for dest in getattr(r, section) if r.origins[f"{section}.{dest}"] == "flag"]
        flags += [prefix + table[dest][0].flag[2:] for dest in given]
    if flags:
        yield no_effect(flags, "with --loss-type sft_loss")


TRAIN = (supervised,)
