"""``--custom-convert-samples-to-train-data-path``: columns by slime's names in place of a batch's samples.

Called by the loop before a batch is written. Invariants: what is trained is what the columns say, and the batch's file
holds that; every column is read, or refused by name; a row belongs to one of the samples that were given, by
``sample_indices`` or by its place, so that each trajectory is accounted for.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.types import Sample, Status, trajectories
from slime_cli.hooks import kinds
from slime_cli.hooks.kinds import Hook
from slime_cli.hooks.lending import copied
from slime_cli.hooks.protocols import Args

RAW_REWARD = "raw_reward"
"""Key in a sample's metadata, as in slime: its reward before a user's function processed it."""
NEEDED = ("tokens", "response_lengths", "rewards", "loss_masks")
READ = {
    "rollout_log_probs": "rollout_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "loss_masks": "loss_mask",
}
"""Column -> field of a sample, one number a response token."""
SAID = {"raw_reward": RAW_REWARD, "source_names": "source_name", "round_number": "round_number"}
"""Column -> where a sample's metadata keep it: metrics are made of them, training is not."""
CHECKED = ("sample_indices", "truncated", "total_lengths", "rollout_ids", "rollout_mask_sums")
"""Columns that follow from others here: what they say is compared."""


def convert(hook: Hook, args: Args, samples: list[Sample]) -> list[Sample]:
    """The samples of the batch as the function's columns have them, in their order. The trajectories that no row names
    are left out: the caller drops them, with the reason ``convert_samples``."""
    data = _plain(hook, hook(args, [copied(sample) for sample in samples]))
    known = {*NEEDED, *READ, *SAID, *CHECKED}
    if unknown := sorted(set(data) - known):
        raise hook.refuse(f"returned {unknown[0]!r}", f"nothing trains on it; what is read: {', '.join(sorted(known))}")
    if missing := [name for name in NEEDED if name not in data]:
        raise hook.refuse(f"returned no {missing[0]!r}", f"{', '.join(NEEDED)} are needed")
    rows = len(data["tokens"])
    if wrong := next((name for name, values in data.items() if len(values) != rows), None):
        raise hook.refuse(f"returned {len(data[wrong])} rows of {wrong!r} for {rows} of 'tokens'", "one row a sample")
    made = [_sample(hook, base, data, row) for row, base in enumerate(_bases(hook, data, samples, rows))]
    _compare(hook, data, made)
    return made


def _plain(hook: Hook, returned: Any) -> dict[str, list[Any]]:
    data = kinds.plain_or_none(returned)
    if not isinstance(data, dict):
        raise hook.refuse(f"returned {type(returned).__name__}", "return a dict of columns, lists of plain values")
    if strange := next((name for name, values in data.items() if not isinstance(values, list | tuple)), None):
        raise hook.refuse(f"returned no list of {strange!r}", "one row a sample")
    return data


def _bases(hook: Hook, data: dict[str, list[Any]], samples: list[Sample], rows: int) -> list[Sample]:
    """The sample that each row is made of, numbered anew among its siblings."""
    indices = data.get("sample_indices")
    if indices is None:
        if rows != len(samples):
            raise hook.refuse(f"returned {rows} rows of {len(samples)} samples", "name them with 'sample_indices'")
        indices = [sample.index for sample in samples]
    siblings = trajectories(samples)
    seen: collections.Counter[int] = collections.Counter()
    found = []
    for index in indices:
        if index not in siblings:
            raise hook.refuse(f"returned a row of sample {index!r}, which it was not given", "keep 'sample_indices'")
        part = seen[index]
        seen[index] += 1
        found.append(dataclasses.replace(siblings[index][min(part, len(siblings[index]) - 1)], part=part))
    return found


def _sample(hook: Hook, base: Sample, data: dict[str, list[Any]], row: int) -> Sample:
    tokens = list(data["tokens"][row])
    length = data["response_lengths"][row]
    fields: dict[str, Any] = {"tokens": tokens, "response_length": length, "reward": data["rewards"][row]}
    fields |= {field: list(data[name][row]) for name, field in READ.items() if name in data}
    if (tokens, length) != (base.tokens, base.response_length):  # what was said of other tokens
        lost = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")
        fields |= dict.fromkeys((*lost, "routed_experts_shape")) | {"spans": []}
    if "truncated" in data:
        fields["status"] = Status.TRUNCATED if data["truncated"][row] else Status.COMPLETED
    said = {key: data[name][row] for name, key in SAID.items() if name in data}
    made = dataclasses.replace(base, **fields, remove_sample=False, metadata=base.metadata | said)
    try:
        made.check()
        made.reward_value()
    except (ValueError, TypeError, KeyError) as error:
        raise hook.refuse(f"returned something unfit in row {row}: {error}", "fix the function") from None
    return made


def _compare(hook: Hook, data: dict[str, list[Any]], made: list[Sample]) -> None:
    """Checks that the other columns agree with the samples."""
    trained = collections.Counter()
    for sample in made:
        trained[sample.index] += sum(sample.effective_mask())
    expected: dict[str, Callable[[Sample], Any]] = {
        "total_lengths": lambda sample: len(sample.tokens),
        "rollout_mask_sums": lambda sample: trained[sample.index],
    }
    for name, value in expected.items():
        for row, sample in enumerate(made):
            if name in data and data[name][row] != value(sample):
                said = f"returned {name} {data[name][row]} in row {row}, where {value(sample)} follows from the others"
                raise hook.refuse(said, "leave the column out")
    pairs = {*zip(data.get("rollout_ids", ()), (sample.index for sample in made))}
    if len(pairs) > min(len({one for one, _ in pairs}), len({other for _, other in pairs})):
        fix = "a sample counts with its siblings, those of one 'sample_indices': leave the column out"
        raise hook.refuse("returned rollout_ids that group samples otherwise than trajectories do", fix)
