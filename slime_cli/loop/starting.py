"""Gives the trainer a phase's networks and their weights. Blocking; :mod:`slime_cli.loop.phase` calls it in a thread.

In this order: the HF checkpoint, then the weights of the phase before (or ``--load``, ``--ref-load``), then what else
is kept, then the phase's own last commit.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from slime_cli.buffer.journal import Journal
from slime_cli.buffer.records import Commit
from slime_cli.cluster.learner import Learner
from slime_cli.loop import resuming
from slime_cli.manifests import checkpoints, layout
from slime_cli.models import architecture, schemes
from slime_cli.options import drafts, roles
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved
from slime_cli.training.settings import Settings


def needed(s: SlimeOptions, folder: pathlib.Path) -> bool:
    """A trainer is needed: something is trained, or engines need weights that only it can give them, those of a
    checkpoint, or, where others own the engines, those of the HF checkpoint. ``folder``: the phase's."""
    if s.debug_rollout_only:
        return False
    others = bool(resuming.start_root(s) or (s.generates and s.rollout_endpoint))
    return s.num_rollout != 0 or others or _trained(folder)


def _trained(folder: pathlib.Path) -> bool:
    path = folder / layout.JOURNAL
    if not path.exists():
        return False
    with Journal.open_readonly(path) as journal:
        return bool(journal.commits())


@dataclasses.dataclass(frozen=True)
class Start:
    """The beginning of one phase in one attempt."""

    name: str
    options: Resolved
    model: str
    """The HF checkpoint's folder."""
    learner: Learner
    say: Callable[[str], None]

    def networks(self) -> str:
        """Policy and critic, with the weights of the HF checkpoint; which kernels the trainer was found to have."""
        settings = Settings.from_options(self.options.slime, self.options.custom)
        critic = self._critic_argv() if settings.critic else None
        begun = self.learner.begin(self._megatron_argv(self.options), settings, self.model, critic)
        if begun.warning:
            self.say(f"warning: {begun.warning}")
        if begun.kernels:
            self.say(f"{self.name}: the trainer computes {begun.kernels}")
        return begun.kernels

    def weights(self, commits: Sequence[Commit], start_from: str | None) -> None:
        """Those that the phase begins with. ``start_from``: the checkpoint of the phase before."""
        start = None
        if resuming.needs_start(self.options.slime, commits):
            start = start_from or resuming.start(self.options.slime, self.say)
        scheme = schemes.of_config(architecture.read_config(self.model))
        if start or not commits:
            restored = f", restored from {scheme.words}" if scheme and not start else ""
            self.say(f"{self.name}: the weights of {start or self.model}{restored}")
            if restored and self.options.slime.generates:
                self.say(
                    "small updates are rounded away in engines at first: --ref-load of the original weights avoids it"
                )
        if scheme and self.options.slime.generates:
            self.say(f"{self.name}: versions are published as {scheme.words}, the format of {self.model}")
            if self.options.sglang.get("speculative_algorithm") in drafts.OWN:
                self.say("warning: layers that quantised engines draft with get no new weights")
        if start:
            self.learner.load(start, weights_only=True)

    def others(self, updated_reference: str | None) -> None:
        """Other networks that the trainer keeps: the policy's weights of now, or a checkpoint's."""
        s = self.options.slime
        settings = Settings.from_options(s)
        kept: dict[str, str | None] = {}
        if settings.reference:
            kept["reference"] = updated_reference or (s.ref_load if s.load else None)
        if settings.use_opd and settings.opd_type == "megatron":
            kept["teacher"] = s.opd_teacher_load
        for name, root in kept.items():
            path = root and str(checkpoints.complete(root, self.say))
            if path:
                self.say(f"{self.name}: the {name}'s weights are those of {path}")
            self.learner.keep(name, path)

    def last_commit(self, commits: Sequence[Commit], again: int) -> None:
        """``again``: batches that are trained again."""
        if commits:
            step, checkpoint = commits[-1].step, commits[-1].checkpoint
            self.learner.load(checkpoint, weights_only=False)
            self.say(f"{self.name}: resumed at step {step} from {checkpoint}, {again} batch(es) to train again")

    def _critic_argv(self) -> list[str]:
        """The policy's options with those that ``--megatron-config-path`` gives the critic."""
        path = self.options.slime.megatron_config_path
        given = roles.read(path, "critic") if path else {}
        return self._megatron_argv(dataclasses.replace(self.options, megatron=self.options.megatron | given))

    def _megatron_argv(self, options: Resolved) -> list[str]:
        derived = architecture.to_derive(architecture.read_config(self.model), options.megatron, self.model)
        return architecture.argv(derived) + options.megatron_argv()
