"""The Data Buffer: deals prompt rows out as groups of samples and keeps every one of them in the journal.

One instance a stage, owned by the conductor. Order: a fixed permutation of the source for each epoch (or the source's
own order), so a resumed run deals on where the cursor stands. Groups that an earlier attempt left open come first.
"""

import collections
from collections.abc import Callable

import numpy as np

from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import Group, PromptRow, RowError, Sample
from slime_cli.errors import DataError

KIND = "skipped:"
"""Before a kind of unusable row, in the cursor."""


class DataBuffer:
    """``render(row)`` returns what generation needs, None for a prompt that is too long, which is counted, or raises
    RowError: it ends the run, or with ``on_bad_row="skip"`` is counted too, and the first of its kind is said."""

    def __init__(
        self,
        journal: Journal,
        source,
        *,
        samples_per_prompt: int,
        shuffle: bool,
        seed: int,
        render: Callable,
        on_bad_row: str = "fail",
        say: Callable[[str], None] = print,
    ):
        self.journal = journal
        self.source = source
        self.render = render
        self.say = say
        self.skip_bad_rows = on_bad_row == "skip"
        self.samples_per_prompt = samples_per_prompt
        self.shuffle = shuffle
        self.seed = seed
        recovery = journal.recover()
        self.recovery = recovery
        cursor = recovery.cursor or {"epoch": 0, "position": 0, "skipped": 0}
        self.epoch = cursor["epoch"]
        self.position = cursor["position"]
        self.skipped = cursor["skipped"]
        kinds = {name.removeprefix(KIND): count for name, count in cursor.items() if name.startswith(KIND)}
        self.skipped_by_kind = collections.Counter(kinds)
        self._next_group = recovery.next_group_index
        self._next_sample = recovery.next_sample_index
        self._order: tuple[int, np.ndarray] | None = None
        self._open = [self._reopen(g) for g in recovery.groups]

    @property
    def cursor(self) -> dict[str, int]:
        kinds = {f"{KIND}{kind}": count for kind, count in self.skipped_by_kind.items()}
        return {"epoch": self.epoch, "position": self.position, "skipped": self.skipped, **kinds}

    def _reopen(self, group) -> Group:
        rendered = self.render(group.row)
        pending = [self._sample(i, group.group_index, group.row, rendered) for i in group.pending]
        return Group(group.group_index, group.row, rendered, list(group.finished), pending)

    def _sample(self, index: int, group: int, row: PromptRow, rendered) -> Sample:
        return Sample(
            index=index, group_index=group, prompt=rendered.text, label=row.label, metadata=dict(row.metadata)
        )

    def lease(self, count: int, rollout_id: int) -> list[Group]:
        """``count`` groups to work on, in the journal before they are returned."""
        groups = self._open[:count]
        self._open = self._open[count:]
        again = [s.index for g in groups for s in g.pending]
        if again:
            self.journal.resume(again, rollout_id)
        fresh = [self._deal() for _ in range(count - len(groups))]
        if fresh:
            rows = [(g.index, g.row, self.epoch, [s.index for s in g.pending]) for g in fresh]
            self.journal.lease(rows, self.cursor, rollout_id)
        groups += fresh
        for group in groups:
            for sample in group.pending:
                sample.rollout_id = rollout_id
        return groups

    def give_back(self, groups: list[Group]) -> None:
        """Finished groups that this rollout did not need; the next lease starts with them."""
        self._open = [*groups, *self._open]

    def drop_batch(self, rollout_id: int) -> int:
        """Drops what an earlier attempt batched and never committed; how many executions. The rollout is made anew."""
        indices = self.recovery.replay.pop(rollout_id, ())
        self.journal.drop(indices, "drop_rollouts")
        return len(indices)

    def _deal(self) -> Group:
        row, rendered = self._next_row()
        group = self._next_group
        self._next_group = self._next_group + 1
        first = self._next_sample
        self._next_sample = self._next_sample + self.samples_per_prompt
        pending = [self._sample(i, group, row, rendered) for i in range(first, self._next_sample)]
        return Group(group, row, rendered, [], pending)

    def _next_row(self):
        for _ in range(len(self.source) + 1):
            if self.position >= len(self.source):
                self.epoch = self.epoch + 1
                self.position = 0
            row = self.source[self._index()]
            self.position += 1
            rendered = self._rendered(row)
            if rendered is not None:
                return row, rendered
            self.skipped += 1
        reasons = ", ".join(f"{n} {kind}" for kind, n in self.skipped_by_kind.items())
        raise DataError(
            f"{self.source.name}: none of its {len(self.source)} rows can be used: {reasons}",
            "raise --rollout-max-prompt-len or choose other data",
        )

    def _rendered(self, row: PromptRow):
        """None for a row that is passed over."""
        try:
            rendered = self.render(row)
        except RowError as error:
            if not self.skip_bad_rows:
                raise
            if error.kind not in self.skipped_by_kind:
                self.say(f"passed over, the first of its kind ({error.kind}): {error.message}")
            self.skipped_by_kind[error.kind] += 1
            return None
        if rendered is None:
            self.skipped_by_kind["too_long"] += 1
        return rendered

    def _index(self) -> int:
        if not self.shuffle:
            return self.position
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, np.random.default_rng([self.seed, self.epoch]).permutation(len(self.source)))
        return int(self._order[1][self.position])
