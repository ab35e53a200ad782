"""Functions that see the samples of a batch before it is written, or look at a rollout afterwards.

The loop calls these adapters; each takes the loaded function and what there is, and does to the samples what the
function may do. Invariants: a function gets copies, so that what it may not change stays as it is and is named; what it
may change is written with the batch, so that a batch that is trained again after a kill is the same; whatever is wrong
is a UsageError with the place of the function.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from slime_cli.buffer.types import Sample
from slime_cli.hooks import kinds
from slime_cli.hooks.columns import RAW_REWARD, convert
from slime_cli.hooks.kinds import Hook
from slime_cli.hooks.lending import lent
from slime_cli.hooks.protocols import Args, Groups
from slime_cli.hooks.table import KINDS

FILTERED = ("remove_sample", "loss_mask", "reward", "metadata")
"""Fields that a filter of samples may change."""


@dataclasses.dataclass(frozen=True)
class BatchHooks:
    """The functions that a batch passes before it is written, in this order; None where there is none."""

    all_samples_process: Hook | None = None
    rollout_sample_filter: Hook | None = None
    reward_post_process: Hook | None = None
    convert_samples: Hook | None = None

    @classmethod
    def of(cls, args: Args) -> "BatchHooks":
        """Those that the options name."""
        paths = {field.name: getattr(args, KINDS[field.name].option, None) for field in dataclasses.fields(cls)}
        return cls(**{kind: Hook.load(path, kind) for kind, path in paths.items() if path})

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in dataclasses.fields(self))

    def apply(self, args: Args, groups: Groups, others: Groups) -> list[Sample]:
        """The samples of a batch's ``groups`` as the functions leave them. ``others``: groups that were finished since
        the batch before, and are in none. Trajectories that are missing are to be dropped as ``convert_samples``."""
        if self.all_samples_process:
            look_at_all(self.all_samples_process, args, [*groups, *others])
        if self.rollout_sample_filter:
            filter_samples(self.rollout_sample_filter, args, groups)
        samples = [sample for group in groups for sample in group]
        if self.reward_post_process:
            post_process(self.reward_post_process, args, samples)
        return convert(self.convert_samples, args, samples) if self.convert_samples else samples


async def prepared(
    hooks: Iterable[Hook], args: Args, sample: Sample, *, rollout_id: int | None, evaluation: bool
) -> Sample:
    """The sample as ``--rollout-sample-hook-path`` functions leave it, one after the other. What they raise goes
    through: it costs this sample's trajectory, as with a generate function."""
    for hook in hooks:
        result = await kinds.awaited(hook.function(args, sample, rollout_id=rollout_id, evaluation=evaluation))
        returned = sample if result is None else result
        if not isinstance(returned, Sample):
            raise hook.refuse(
                f"returned {type(returned).__name__}", "return a Sample, or None for the one that it was given"
            )
        (made,) = kinds.siblings(hook.where, sample, returned)
        sample = dataclasses.replace(made, part=sample.part)
    return sample


async def verdict(hook: Hook, args: Args, samples: list[Sample]) -> str | None:
    """Why a ``--dynamic-sampling-filter-path`` function leaves a group out, ``filter_REASON``; None when it stays."""
    with lent(hook, [samples]) as (copies,):
        said = await hook.ask(args, [*copies])
    keep = kinds.plain_or_none(getattr(said, "keep", said))
    if not isinstance(keep, bool | int | float):
        shown = "None" if said is None else f"{type(said).__name__} {said!r:.100}"
        fix = "return whether the group is kept, True or False, or an object with keep and reason"
        raise hook.refuse(f"returned {shown}", fix)
    return None if keep else f"filter_{' '.join(str(getattr(said, 'reason', None) or 'rejected').split())}"


def filter_samples(hook: Hook, args: Args, groups: Groups) -> None:
    """``--rollout-sample-filter-path``: changes samples of a batch's groups (:data:`FILTERED`)."""
    with lent(hook, groups, FILTERED) as copies:
        hook(args, copies)


def look_at_all(hook: Hook, args: Args, groups: Groups) -> None:
    """``--rollout-all-samples-process-path``: sees every finished group, the dropped ones too."""

    def get_samples(num_samples: int) -> Groups:
        raise hook.refuse(f"asked for {num_samples} more groups", "it comes after a rollout; nothing is dealt to it")

    with lent(hook, groups) as copies:
        hook(args, copies, get_samples)


def post_process(hook: Hook, args: Args, samples: list[Sample]) -> None:
    """``--custom-reward-post-process-path``: samples get the processed rewards, and keep the raw ones in metadata."""
    with lent(hook, [samples]) as (copies,):
        answer = hook(args, copies)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise hook.refuse(f"returned {type(answer).__name__}", "return (raw rewards, processed rewards)")
    raw, processed = (_numbers(hook, values, len(samples)) for values in answer)
    for sample, before, reward in zip(samples, raw, processed, strict=True):
        sample.metadata = sample.metadata | {RAW_REWARD: before}
        sample.reward = reward


def raw_reward(sample: Sample, key: str | None) -> float:
    """The reward that a sample was given, whatever became of it afterwards."""
    return float(sample.metadata[RAW_REWARD]) if RAW_REWARD in sample.metadata else sample.reward_value(key)


def log_rollout(
    hook: Hook, rollout_id: int, args: Args, samples: list[Sample], metrics: dict[str, float], seconds: float
) -> bool:
    """``--custom-rollout-log-function-path``: whether slime's own line is to be left out."""
    with lent(hook, [samples]) as (copies,):
        return bool(hook(rollout_id, args, copies, dict(metrics), seconds))


def log_evaluation(
    hook: Hook, rollout_id: int, args: Args, found: dict[str, list[Sample]], metrics: dict[str, float]
) -> bool:
    """``--custom-eval-rollout-log-function-path``: ``found`` are the rewarded samples by set. As
    :func:`log_rollout`."""
    with lent(hook, list(found.values())) as copies:
        named = dict(zip(found, copies, strict=True))
        data = {name: _evaluated(samples, args.eval_reward_key) for name, samples in named.items()}
        return bool(hook(rollout_id, args, data, dict(metrics)))


def _evaluated(samples: list[Sample], key: str | None) -> dict[str, Any]:
    return {
        "rewards": [sample.reward_value(key) for sample in samples],
        "truncated": [sample.status.value == "truncated" for sample in samples],
        "samples": samples,
    }


def _numbers(hook: Hook, values: Any, count: int) -> list[float]:
    found = kinds.plain_or_none(values)
    listed = list(found) if isinstance(found, list | tuple) else None
    if listed is None or len(listed) != count:
        held = f"{len(listed)} rewards" if listed is not None else type(values).__name__
        raise hook.refuse(f"returned {held} for {count} samples", "return one number a sample, in order, in each list")
    wrong = next((v for v in listed if not isinstance(v, bool | int | float) or not math.isfinite(v)), None)
    if wrong is not None:
        raise hook.refuse(f"returned {wrong!r:.100} as a reward", "return finite numbers")
    return [float(value) for value in listed]
