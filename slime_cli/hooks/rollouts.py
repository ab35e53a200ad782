"""Functions in place of a whole rollout or a whole evaluation, and the choice among unfinished groups.

The loop gives what deals groups, and takes what came of them. Invariants: a function's groups are those that it was
dealt, each once, under the identities that they were dealt with; what it left out is said, so that the loop can drop it
by name. A function that is not async runs in a thread, and what it asks for is done in the event loop's.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.types import Group, Sample, Status, trajectories
from slime_cli.hooks import kinds
from slime_cli.hooks.kinds import Hook
from slime_cli.hooks.lending import copied
from slime_cli.hooks.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime_cli.hooks.protocols import Args, Groups


class Dealer:
    """``data_source`` of a rollout function. ``lease(n)`` deals groups, ``release(groups)`` takes them back."""

    def __init__(self, hook: Hook, lease: Callable[[int], list[Group]], release: Callable[[list[Group]], None]) -> None:
        self._hook = hook
        self._lease = lease
        self._release = release
        self._loop = asyncio.get_running_loop()
        self.open: dict[int, Group] = {}
        """Group, and not given back."""

    def get_samples(self, num_samples: int) -> Groups:
        """Groups to answer, the samples' ``tokens`` being the prompt's. Those of an earlier attempt may be finished."""
        return self._in_loop(self._deal, num_samples)

    def add_samples(self, samples: Groups) -> None:
        """Gives groups back: they are dealt again, from the start."""
        self._in_loop(self._take_back, [group[0].group_index for group in samples if group])

    def _deal(self, count: int) -> Groups:
        groups = self._lease(count)
        self.open |= {group.index: group for group in groups}
        return [[*map(copied, group.finished), *(_begun(group, s) for s in group.pending)] for group in groups]

    def _take_back(self, indices: list[int]) -> None:
        if strange := set(indices) - set(self.open):
            raise self._hook.refuse(f"gave back group {min(strange)}, which it was not dealt", "give back what it got")
        self._release([self.open.pop(index) for index in indices])

    def _in_loop(self, function: Callable[[Any], Any], argument: Any) -> Any:
        try:
            inside = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            inside = False
        if inside:
            return function(argument)

        async def call() -> Any:
            return function(argument)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()


def _begun(group: Group, sample: Sample) -> Sample:
    return copied(dataclasses.replace(sample, tokens=list(sample.tokens or group.rendered.tokens)))


@dataclasses.dataclass(frozen=True)
class Rolled:
    """The result of a rollout function, by the groups that it was dealt."""

    groups: list[tuple[Group, list[Sample]]]
    """In its order: what was dealt, and the rewarded samples that are to be trained."""
    left_out: list[Group]
    """Group, neither returned nor given back: to be dropped, as are trajectories that are missing in ``groups``."""
    metrics: dict[str, float]


async def rollout(hook: Hook, args: Args, rollout_id: int, dealer: Dealer) -> Rolled:
    """Calls a ``--rollout-function-path`` function and sorts out what it returned."""
    returned = await hook.in_thread(args, rollout_id, dealer, evaluation=False)
    output = RolloutFnTrainOutput(returned) if isinstance(returned, list) else returned
    groups = getattr(output, "samples", None)
    if not isinstance(groups, list | tuple) or not groups:
        raise hook.refuse(f"returned {type(returned).__name__}", "return RolloutFnTrainOutput(samples=[[Sample, ...]])")
    found = [_answered(hook, group, dealer.open, args) for group in groups]
    taken = [group.index for group, _ in found]
    if twice := {index for index in taken if taken.count(index) > 1}:
        raise hook.refuse(f"returned group {min(twice)} twice", "each dealt group once")
    if len(found) != args.rollout_batch_size:
        fix = f"return --rollout-batch-size groups: {args.rollout_batch_size}"
        raise hook.refuse(f"returned {len(found)} groups", fix)
    left_out = [group for index, group in dealer.open.items() if index not in taken]
    return Rolled(found, left_out, _metrics(hook, output.metrics))


def _answered(hook: Hook, group: Any, dealt: dict[int, Group], args: Args) -> tuple[Group, list[Sample]]:
    samples = list(_leaves(hook, group))
    if not samples:
        raise hook.refuse("returned an empty group", "leave out a group of which nothing is to be trained")
    index = samples[0].group_index
    if index not in dealt or any(sample.group_index != index for sample in samples):
        fix = "return the samples that data_source.get_samples dealt, group by group, or copies of them"
        raise hook.refuse(f"returned a group of samples of group {index} that it was not dealt so", fix)
    leased = {sample.index: sample for sample in (*dealt[index].finished, *dealt[index].pending)}
    made = []
    for trajectory, siblings in trajectories(samples).items():
        if trajectory not in leased:
            raise hook.refuse(f"returned sample {trajectory}, which group {index} has not", "keep index as it was")
        made += _fit(hook, leased[trajectory], siblings, args)
    return dealt[index], made


def _fit(hook: Hook, leased: Sample, siblings: list[Sample], args: Args) -> list[Sample]:
    try:
        made = kinds.siblings(hook.where, leased, siblings)
        for sample in made:
            sample.status = Status.COMPLETED if sample.status is Status.PENDING else sample.status
            sample.reward = kinds.plain_or_none(sample.reward)
            sample.check()
            if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
                raise ValueError(f"sample {sample.index} is {sample.status.value}")
            if not math.isfinite(sample.reward_value(args.reward_key)):
                raise ValueError(f"sample {sample.index}: its reward is {sample.reward!r:.100}")
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise hook.refuse(f"returned something unfit: {error}", "leave out what is not to be trained") from None
    return made


def _leaves(hook: Hook, value: Any) -> list[Sample]:
    """A group's samples, however deep a fan-out nests them."""
    if isinstance(value, Sample):
        return [value]
    if not isinstance(value, list | tuple):
        raise hook.refuse(f"returned a group that holds {type(value).__name__}", "groups are lists of Samples")
    return [sample for part in value for sample in _leaves(hook, part)]


def _metrics(hook: Hook, metrics: Any) -> dict[str, float]:
    found = kinds.plain_or_none(metrics or {})
    if not isinstance(found, dict) or not all(isinstance(v, bool | int | float) for v in found.values()):
        raise hook.refuse("returned metrics that are no numbers by name", "return a dict of numbers, or None")
    return {str(name): float(value) for name, value in found.items()}


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A set of an evaluation."""

    rewards_PN: list[list[float]]
    """By prompt where samples tell which is which; else each is a prompt of its own."""
    truncated: list[bool]
    samples: list[Sample]


async def evaluation(hook: Hook, args: Args, rollout_id: int, dealer: Dealer) -> tuple[dict[str, Evaluated], dict]:
    """Calls an ``--eval-function-path`` function: its sets by name, and its metrics."""
    returned = await hook.in_thread(args, rollout_id, dealer, evaluation=True)
    output = RolloutFnEvalOutput(returned) if isinstance(returned, dict) else returned
    data = getattr(output, "data", None)
    if not isinstance(data, dict) or not data:
        fix = "return RolloutFnEvalOutput(data={name: {'rewards': [...], 'truncated': [...], 'samples': [...]}})"
        raise hook.refuse(f"returned {type(returned).__name__}", fix)
    return {str(name): _set(hook, name, found) for name, found in data.items()}, _metrics(hook, output.metrics)


def _set(hook: Hook, name: str, found: Any) -> Evaluated:
    rewards = kinds.plain_or_none(found.get("rewards")) if isinstance(found, dict) else None
    if not isinstance(rewards, list | tuple) or not rewards:
        raise hook.refuse(f"returned no rewards of {name!r}", "give {'rewards': [numbers]} for each set")
    if not all(isinstance(v, bool | int | float) and math.isfinite(v) for v in rewards):
        raise hook.refuse(f"returned rewards of {name!r} that are no finite numbers", "one number an answer")
    samples = [sample for sample in found.get("samples") or () if isinstance(sample, Sample)]
    truncated = [bool(value) for value in found.get("truncated") or ()]
    for what, values in (("samples", samples), ("truncated", truncated)):
        if values and len(values) != len(rewards):
            raise hook.refuse(f"returned {len(values)} {what} of {name!r} for {len(rewards)} rewards", "one for each")
    prompts = [sample.group_index for sample in samples] or range(len(rewards))
    by_prompt: dict[int, list[float]] = {}
    for prompt, reward in zip(prompts, rewards, strict=True):
        by_prompt.setdefault(prompt, []).append(float(reward))
    return Evaluated(list(by_prompt.values()), truncated, samples)


def choose(hook: Hook, args: Args, groups: list[Group], count: int) -> tuple[list[Group], list[Group]]:
    """``--buffer-filter-path``: which unfinished groups are continued now, ``count`` at most, and which are dropped."""
    waiting = {group.index: group for group in groups}
    buffer = [[copied(sample) for sample in (*group.finished, *group.pending)] for group in groups]
    chosen = hook(args, None, buffer, count)
    taken = _indices(hook, chosen, waiting)
    kept = _indices(hook, buffer, waiting)
    if len(taken) > count or len(set(taken)) < len(taken):
        raise hook.refuse(f"returned {len(taken)} groups where {count} were asked for", "each once, no more than that")
    dropped = [group for index, group in waiting.items() if index not in taken and index not in kept]
    return [waiting[index] for index in taken], dropped


def _indices(hook: Hook, groups: Any, known: dict[int, Group]) -> list[int]:
    if not isinstance(groups, list | tuple):
        raise hook.refuse(f"returned {type(groups).__name__}", "return groups of `buffer`: a list of lists of Samples")
    found = [sample.group_index for group in groups for sample in _leaves(hook, group)[:1]]
    if strange := set(found) - set(known):
        raise hook.refuse(f"returned group {min(strange)}, which is not in `buffer`", "choose among its groups")
    return found
