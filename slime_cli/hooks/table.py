"""Every kind of function that a user may put in: its option, the call that slime makes, when, and what it may change.

Read by the check at load, the check of a run before it starts, the contract tests and ``docs/hooks.md`` (a test
compares). The option of a kind that nothing calls is refused by name (``slime_cli/options/checks/functions.py``).
"""

import dataclasses
import functools
import inspect
from types import MappingProxyType

from slime_cli.hooks import protocols
from slime_cli.options.checks.functions import NOT_CALLED


@dataclasses.dataclass(frozen=True)
class Kind:
    """How slime calls a function of one kind."""

    option: str
    """Its dest."""
    protocol: type
    when: str
    changes: str
    """The things that it may change, or the effect of its answer."""
    form: str = "sync"
    """``async``: must be a coroutine function; ``sync``: must not be; ``either``. A plain wrapper around a coroutine
    function can be any of them, so that what it returns is looked at when it is called."""

    @property
    def flag(self) -> str:
        return "--" + self.option.replace("_", "-")

    @functools.cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.protocol.__call__).parameters.values())[1:]

    @property
    def positional(self) -> tuple[str, ...]:
        return tuple(p.name for p in self._parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    @property
    def keywords(self) -> tuple[str, ...]:
        """Passed to every function."""
        return tuple(p.name for p in self._parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)

    @property
    def optional(self) -> tuple[str, ...]:
        """Passed to a function that takes them."""
        return tuple(p.name for p in self._parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty)

    def __str__(self) -> str:
        keywords = [f"{name}=" for name in (*self.keywords, *self.optional)]
        star = ["*"] if keywords and not self.positional else []
        return f"{'async ' if self.form == 'async' else ''}f({', '.join([*self.positional, *star, *keywords])})"


KINDS = MappingProxyType(
    {
        "generate": Kind(
            "custom_generate_function_path",
            protocols.Generate,
            "once for each sample of a group, in place of the one request",
            "fills the sample, or returns several; without `evaluation=` it is not told which of the two it is for",
            form="async",
        ),
        "reward": Kind(
            "custom_rm_path",
            protocols.RewardOne,
            "for each sample that has no reward yet, in a worker process",
            "returns a number, or a dict with one under `--reward-key`; what it changes in the sample stays",
            form="either",
        ),
        "group_reward": Kind(
            "custom_rm_path",
            protocols.RewardGroup,
            "with `--group-rm`: for each group, in a worker process",
            "returns one reward a sample, in order; what it changes in the samples stays",
            form="either",
        ),
        "dynamic_filter": Kind(
            "dynamic_sampling_filter_path",
            protocols.DynamicFilter,
            "for each finished group",
            "keeps the group or drops it, with a reason; changes nothing",
            form="either",
        ),
        "sample_hook": Kind(
            "rollout_sample_hook_path",
            protocols.SampleHook,
            "for each generated sample, before its reward; may be given several times",
            "changes the sample, or returns another in its place",
            form="either",
        ),
        "rollout": Kind(
            "rollout_function_path",
            protocols.Rollout,
            "for each rollout, in place of generation, rewards and filters",
            "returns the groups to train on, out of those that `data_source.get_samples` dealt",
            form="either",
        ),
        "eval_rollout": Kind(
            "eval_function_path",
            protocols.Rollout,
            "for each evaluation, in place of slime's own",
            "returns rewards by set",
            form="either",
        ),
        "data_source": Kind(
            "data_source_path",
            protocols.DataSource,
            "once a phase: the class that deals the prompts",
            "its `get_samples(1)` is asked for one group after the other; only prompt, label and metadata are read",
        ),
        "buffer_filter": Kind(
            "buffer_filter_path",
            protocols.BufferFilter,
            "before groups are dealt, where unfinished ones wait to be continued",
            "returns those to continue now; those that it takes out of `buffer` and does not return are dropped",
        ),
        "rollout_sample_filter": Kind(
            "rollout_sample_filter_path",
            protocols.RolloutSampleFilter,
            "for the groups of a batch, before it is written",
            "`remove_sample`, `loss_mask`, `reward` and `metadata`",
        ),
        "all_samples_process": Kind(
            "rollout_all_samples_process_path",
            protocols.AllSamplesProcess,
            "with each batch: all groups that were finished since the last one, those that a filter dropped too",
            "nothing",
        ),
        "reward_post_process": Kind(
            "custom_reward_post_process_path",
            protocols.RewardPostProcess,
            "for the samples of a batch, before it is written",
            "returns (raw, processed) rewards; the processed ones are trained on, without group normalisation",
        ),
        "convert_samples": Kind(
            "custom_convert_samples_to_train_data_path",
            protocols.ConvertSamples,
            "for the samples of a batch, before it is written",
            "returns columns by slime's names: tokens, masks, rewards, log-probabilities; a sample left out is dropped",
        ),
        "rollout_log": Kind(
            "custom_rollout_log_function_path",
            protocols.RolloutLog,
            "after each optimizer step's metrics are known",
            "nothing; True keeps slime's own line off the screen (`metrics.jsonl` is written)",
        ),
        "eval_log": Kind(
            "custom_eval_rollout_log_function_path",
            protocols.EvalLog,
            "after each evaluation",
            "nothing; True keeps slime's own lines off the screen (the result's file is written)",
        ),
        "loss": Kind(
            "custom_loss_function_path",
            protocols.Loss,
            "for each micro-batch, with `--loss-type custom_loss`, in trainer ranks",
            "returns (loss, metrics)",
        ),
        "advantage": Kind(
            "custom_advantage_function_path",
            protocols.Advantage,
            "once a rollout, in trainer ranks of the last pipeline stage",
            "sets `advantages` (and `returns`) in `rollout_data`, one number a response token of the whole batch",
        ),
        "tis": Kind(
            "custom_tis_function_path",
            protocols.Importance,
            "once a rollout, in trainer ranks of the last pipeline stage, with `--use-tis`",
            "returns (pg_loss, masks, metrics): what the loss of each token is multiplied by",
        ),
        "pg_loss_reducer": Kind(
            "custom_pg_loss_reducer_function_path",
            protocols.LossReducer,
            "for each optimizer step, in trainer ranks of the last pipeline stage",
            "returns a function that sums the losses of response tokens with weights",
        ),
        "data_postprocess": Kind(
            "rollout_data_postprocess_path",
            protocols.DataPostprocess,
            "once a rollout, in trainer ranks of the last pipeline stage, with log-probabilities and before advantages",
            "`loss_masks` in `rollout_data`",
        ),
        "model_provider": Kind(
            "custom_model_provider_path",
            protocols.ModelProvider,
            "when a phase begins, for each pipeline stage of a trainer rank",
            "returns Megatron's GPTModel for the checkpoint's weights",
        ),
        "megatron_init": Kind(
            "custom_megatron_init_path",
            protocols.MegatronInit,
            "in every trainer rank when a phase begins: Megatron is there, the model is not",
            "whatever it likes of the process; `args` are Megatron's own",
        ),
        "before_log_prob": Kind(
            "custom_megatron_before_log_prob_hook_path",
            protocols.BeforeLogProb,
            "in every trainer rank, before log-probabilities are computed; `store_prefix` is ``, `ref_` or `teacher_`",
            "settings of the model; not its weights",
        ),
        "before_train_step": Kind(
            "custom_megatron_before_train_step_hook_path",
            protocols.BeforeTrainStep,
            "in every trainer rank, before each optimizer step of the policy",
            "the optimizer's and the scheduler's settings, the model",
        ),
        "weight_post_write": Kind(
            "custom_update_weight_post_write_path",
            protocols.WeightPostWrite,
            "after a version's files are written and before an engine reads them, once, beside the loop",
            "nothing; it may copy the folder for engines elsewhere",
        ),
    }
)


def page() -> str:
    """The table of ``docs/hooks.md``: the kinds that a run calls, and the options of those that it refuses so far."""
    called = {name: kind for name, kind in KINDS.items() if kind.option not in NOT_CALLED}
    rows = [f"| `{kind.flag}` | {name} | `{kind}` | {kind.when} | {kind.changes} |" for name, kind in called.items()]
    rows = ["| option | kind | slime calls | when | what it may change |", "|---|---|---|---|---|", *rows]
    others = ", ".join(f"`{kind.flag}`" for kind in KINDS.values() if kind.option in NOT_CALLED)
    return "\n".join([*rows, "", f"Refused so far, for nothing calls them: {others}."] if others else rows)


if __name__ == "__main__":
    print(page())
