"""When engines get the trainer's weights, how, and which version each of them holds.

:class:`Timetable` says when. It follows from the options and the journal's commits alone, so that a resume comes to the
answer that the attempt before it had. :class:`Publisher` does it through a transport, and is the only one that knows
what an engine holds. Its methods block; the loop (:mod:`slime_cli.loop.phase`) calls them through a thread, one at a
time.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from slime_cli.manifests import layout
from slime_cli.manifests.proof import Proof
from slime_cli.options.groups import SlimeOptions
from slime_cli.weights import verification
from slime_cli.weights.transport import Learner, Transport, Version


class Committed(Protocol):
    """A commit of the journal, or one that is being saved."""

    @property
    def step(self) -> int: ...

    @property
    def rollout_id(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Timetable:
    """Which rollouts of a phase are followed by a publish, and which by an evaluation."""

    total: int
    """Rollouts of the phase."""
    interval: int = 1
    """``--update-weights-interval``."""
    evaluation_interval: int | None = None
    """``--eval-interval``."""

    @classmethod
    def of(cls, s: SlimeOptions, total: int) -> "Timetable":
        return cls(total, s.update_weights_interval, s.eval_interval)

    def evaluated(self, rollout_id: int) -> bool:
        """There is an evaluation after this rollout."""
        return bool(self.evaluation_interval) and (rollout_id + 1) % (self.evaluation_interval or 1) == 0

    def due(self, rollout_id: int) -> bool:
        """Engines get the weights after this rollout: every interval, before an evaluation, and at the end."""
        done = rollout_id + 1
        return done % self.interval == 0 or self.evaluated(rollout_id) or done == self.total

    def step_held(self, commits: Sequence[Committed]) -> int:
        """The step whose weights generate what comes after the last of ``commits`` (by step): its own, or an earlier
        one's. 0: those that the phase began with."""
        return next((commit.step for commit in reversed(commits) if self.due(commit.rollout_id)), 0)


class Publisher:
    """Brings versions into the engines of one phase.

    ``engines`` gives the URLs of those that are alive, ``commits`` those of the journal, ``under_way`` what the next
    one will add. ``keep_old_actor``: the learner keeps the weights that it publishes, as those that the engines sample
    from.
    """

    def __init__(
        self,
        transport: Transport,
        learner: Learner,
        engines: Callable[[], list[str]],
        timetable: Timetable,
        commits: Callable[[], Sequence[Committed]],
        under_way: Callable[[], Sequence[Committed]] = lambda: (),
        *,
        keep_old_actor: bool = False,
        span: Callable[..., AbstractContextManager[Any]],
        say: Callable[[str], None],
    ):
        self.transport = transport
        self.learner = learner
        self.engines = engines
        self.timetable = timetable
        self.commits = commits
        self.under_way = under_way
        self.keep_old_actor = keep_old_actor
        self.span = span
        self.say = say
        self.proofs: list[Proof] = []
        """The proof of each engine for the version that they hold."""
        self._holds: dict[str, str] = {}
        """Engine -> the version that it was sent last."""
        self.held: str | None = None
        """The version that all engines hold; None before the first."""
        self.asked_for: str | None = None
        """The LoRA adapter of that version, which requests have to name; None where there is none."""

    @property
    def held_step(self) -> int:
        """The optimizer step of :attr:`held`."""
        return layout.step_of(self.held) or 0

    def due(self, rollout_id: int) -> bool:
        return self.timetable.due(rollout_id)

    def write(self, step: int) -> Version:
        """The weights after optimizer step ``step``, which the learner has now, as a version. Engines may generate."""
        with self.span("publish"):
            version = self.transport.write(self.learner, step)
            if self.keep_old_actor:
                self.learner.keep("old_actor")
        return version

    def send(self, version: Version, *, flush: bool = True) -> list[Proof]:
        """The version into every engine, proven. ``flush`` is False for engines that are paused with requests in
        them."""
        urls = self.engines()
        verification.unchanged({url: self._holds[url] for url in urls if url in self._holds})
        with self.span("sync"):
            self._holds = {url: held for url, held in self._holds.items() if url not in urls}  # until all have it
            self.held = None
            self.transport.send(version, urls, flush=flush)
            self._holds = dict.fromkeys(urls, version.name)
        with self.span("verify"):
            self.proofs = self.transport.verify(version, urls)
        self.held = version.name
        self.asked_for = self.transport.asked_for(version)
        self._prune()
        return self.proofs

    def _prune(self) -> None:
        """Stay: what the engines hold, and what a resume would send again, from the last commit or from the next
        one."""
        commits = list(self.commits())
        steps = {self.timetable.step_held(found) for found in (commits, [*commits, *self.under_way()])}
        self.transport.prune({*map(layout.version_name, steps), *self._holds.values()})

    def behind(self) -> Version | None:
        """The version that engines held after the last commit, where that was not the commit's own and it is still
        there. Says so when it is gone."""
        commits = self.commits()
        step = self.timetable.step_held(commits)
        if not commits or step == commits[-1].step:
            return None
        version = self.transport.kept(step)
        if version is None:
            why = "are gone" if self.transport.can_go_back else f"cannot be sent again by {self.transport.name}"
            self.say(f"the weights of step {step} {why}, so the engines continue with those of step {commits[-1].step}")
        return version

    def close(self) -> None:
        """At an orderly end: engines and ranks give back what they keep for the next version."""
        self.transport.close()

    def restore_old_actor(self, version: Version) -> None:
        """Before the learner loads the last commit: it keeps those weights as the ones that engines sample from."""
        if self.keep_old_actor:
            self.transport.restore(version, self.learner)
            self.learner.keep("old_actor")
