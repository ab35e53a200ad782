"""Checks that ``slime train`` makes before it starts anything: model, checkpoints, endpoint, data, users' functions.

``--dry-run`` calls the same :func:`check`, so it refuses what the run would refuse. What is merely not on this machine
(a folder, a file, a module) it warns of: a launch script is often looked at far from the machine that it is for.
Torch-free, but for what a user's own module imports.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from slime_cli import disk
from slime_cli.errors import SlimeError, UsageError, together
from slime_cli.hardware import device as hardware
from slime_cli.hooks import kinds
from slime_cli.hooks.table import KINDS
from slime_cli.manifests import layout
from slime_cli.models import architecture, schemes, tiny
from slime_cli.options import adapters, own, roles
from slime_cli.options.checks.functions import of_user
from slime_cli.options.evaluations import EvaluationSet, evaluation_sets
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved

Say = Callable[[str], None]
Named = list[tuple[str, str]]
"""Options with what they name."""
REWARDS = ("reward", "group_reward")
"""Kinds of the reward's option; which of them it is depends on ``--group-rm``."""
HOOKS = {kind.option: name for name, kind in KINDS.items() if name not in REWARDS}
"""Option -> kind of function."""
SUPERVISED = ("data_source", "loss", "model_provider", "megatron_init", "before_train_step")
"""Kinds of functions that supervised training calls too."""
PATHS = (
    "hf_checkpoint",
    "load",
    "ref_load",
    "opd_teacher_load",
    "opd_teacher_url",
    "rollout_endpoint",
    "megatron_config_path",
    "eval_config",
    "custom_config_path",
)
"""Options that name a file or a folder; sources of prompts besides."""
SOURCES = ("prompt_data", "eval_prompt_data")


def check(resolved: Resolved, run_dir: pathlib.Path, say: Say, planning: bool = False) -> list[Any]:
    """The opened sources of each phase. Raises one error with everything that is refused, of the first one's kind.

    ``planning``: what only this machine lacks or cannot do is told to ``say``, for the run may be meant for another.
    """
    _run_dir(resolved, run_dir)
    refused: dict[str, SlimeError] = {}
    opened: list[Any] = []
    lacking = [_lacking(phase) if planning else [] for phase in phases(resolved)]
    for dest, value in dict.fromkeys(pair for pairs in lacking for pair in pairs):
        if dest != "load" or not resolved.slime.ref_load:  # beside that one, it may be a folder that is yet to be made
            say(f"not on this machine: {own.flag(dest)} {value}")
    for look in _looks(resolved, run_dir, say, planning, opened, lacking):
        try:
            look()
        except SlimeError as error:
            refused.setdefault(error.message, error)
    if refused:
        raise together(list(refused.values()), "things that the run needs cannot be used")
    return opened


def config(model: str) -> dict[str, Any]:
    """The fields of a model's ``config.json`` that say what it is; of a ``tiny:`` one before it is made, too."""
    return tiny.config(model) if model.startswith(tiny.PREFIX) else architecture.read_config(model)


def derived(resolved: Resolved) -> dict[str, Any] | None:
    """Megatron's options that follow from the model; None where that is not known, or the model is not there."""
    try:
        return architecture.megatron_args(config(resolved.slime.hf_checkpoint))
    except SlimeError:
        return None


def phases(resolved: Resolved) -> list[Resolved]:
    """The options of each phase; of the whole run where there is one alone."""
    return [resolved.for_phase(i) for i in range(len(resolved.phases))] or [resolved]


def _looks(
    resolved: Resolved, run_dir: pathlib.Path, say: Say, planning: bool, opened: list[Any], lacking: list[Named]
) -> Iterator[Callable[[], None]]:
    """``lacking``: for each phase what is not looked at, since it is not here."""
    found: dict[str, Any] = {}
    each = [_without(phase, named) for phase, named in zip(phases(resolved), lacking, strict=True)]
    if ("hf_checkpoint", resolved.slime.hf_checkpoint) not in lacking[0]:
        yield lambda: found.update(_model(resolved.slime.hf_checkpoint, each, say))
    for phase, named in zip(each, lacking, strict=True):
        if found:
            yield lambda: _fits(phase, found)
            yield lambda: _machine(phase, found, say if planning else None)
        if not _finished(resolved, run_dir):  # it shows its result, whoever served it is gone
            yield lambda: _endpoint(phase)
        yield lambda: _trackers(phase, say if planning else None)
        yield lambda: opened.append(_data(phase, planning, named))
        yield lambda: _functions(phase)
    yield lambda: _folders(resolved, run_dir, say if planning else None)
    if any(getattr(phase.slime, name) for phase in each for name in ("load", "ref_load", "opd_teacher_load", "save")):
        yield lambda: _starts(resolved, each, run_dir)


def _finished(resolved: Resolved, run_dir: pathlib.Path) -> bool:
    if not (run_dir / layout.SUMMARY).exists():
        return False
    from slime_cli.loop import extending

    return extending.finished(resolved, run_dir)


def _lacking(phase: Resolved) -> Named:
    """Files and folders that the options name and this machine does not have."""
    s = phase.slime
    named = [(dest, getattr(s, dest)) for dest in (*PATHS, "prompt_data") if getattr(s, dest)]
    named += [(dest, path) for dest in ("custom_rm_path", *HOOKS) for path in _paths(s, dest)]
    named += [("eval_prompt_data", one.path) for one in _sets(s)]
    return [(dest, value) for dest, value in named if not _is_here(dest, value)]


def _sets(s: SlimeOptions) -> list[EvaluationSet]:
    """None where the file that names them is of another machine."""
    return evaluation_sets(s) if not s.eval_config or _is_here("eval_config", s.eval_config) else []


def _is_here(dest: str, value: str) -> bool:
    if dest in (*HOOKS, "custom_rm_path"):
        return kinds.is_here(value)
    if dest in SOURCES:
        from slime_cli.buffer.sources.base import split_slice

        value = split_slice(value)[0]
    return ":" in value or pathlib.Path(value).expanduser().exists()  # an address, a scheme: not a path


def _without(phase: Resolved, lacking: Named) -> Resolved:
    """The phase as if these options were not given; its model and its data keep their names."""
    taken = {dest: None for dest, _ in lacking if dest not in ("hf_checkpoint", *SOURCES)}
    return dataclasses.replace(phase, slime=dataclasses.replace(phase.slime, **taken))


def _run_dir(resolved: Resolved, run_dir: pathlib.Path) -> None:
    """It is new, or holds a run with these options that nobody else is running."""
    if run_dir.exists():
        from slime_cli.loop import attempts as folders

        folders.refuse_second(run_dir)
        folders.earlier(resolved, run_dir)


def _model(model: str, each: list[Resolved], say: Say) -> dict[str, Any]:
    """Its config. Refuses a checkpoint that is not whole; ``tiny:`` models are made whole."""
    if not model.startswith(tiny.PREFIX):
        from slime_cli.commands import doctor_checkpoint as checkpoint

        options = [one for phase in each for one in (phase.slime, *(found.options for found in _sets(phase.slime)))]
        chat = any(one.apply_chat_template for one in options)
        needed = (checkpoint.CONFIG, checkpoint.TOKENIZER, checkpoint.IDS, checkpoint.WEIGHTS)
        checkpoint.require(model, say, needed, (checkpoint.TEMPLATE,) if chat else ())
    return config(model)


def _fits(phase: Resolved, found: dict[str, Any]) -> None:
    """The options are of this model."""
    from slime_cli.commands import train_data

    s = phase.slime
    model = phase.slime.hf_checkpoint
    derived = architecture.to_derive(found, phase.megatron, model)
    if s.lora_rank is not None:
        adapters.require_plain(derived | phase.megatron, model)
    if s.megatron_config_path and s.advantage_estimator == "ppo":
        of_critic = roles.read(s.megatron_config_path, "critic")
        architecture.to_derive(found, phase.megatron | of_critic, f"{model}, for the critic,")
    if s.loss_type == "sft_loss":
        return
    _quantised(s, found)
    context = architecture.context_length(found, phase.sglang.get("context_length"))
    if context is not None:
        train_data.check_lengths(s, context)
    rows = architecture.rows(found)
    if s.use_top_p_replay and s.rollout_top_k > rows:
        fix = "lower it: the engine is asked for so many tokens"
        raise UsageError(f"--rollout-top-k {s.rollout_top_k} with a vocabulary of {rows}", fix)
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(s, name):
            architecture.routed_experts(found, f"--{name.replace('_', '-')}: {model}")


def _quantised(s: SlimeOptions, found: dict[str, Any]) -> None:
    """Engines can be given the model's weights, where they are quantised, and prove them."""
    scheme = schemes.of_config(found)
    if scheme is None:
        return
    if s.update_weight_transport != "disk":
        raise UsageError(
            f"--update-weight-transport {s.update_weight_transport}: the weights of {s.hf_checkpoint} are quantised"
            f" ({scheme.words}), which engines repack",
            "leave it out: files suit them",
        )
    schemes.check_served(s.hf_checkpoint, scheme)


def _machine(phase: Resolved, found: dict[str, Any], instead: Say | None) -> None:
    """This machine can do it. With ``instead``, that is told why not. A cluster's machines are not looked at."""
    if os.environ.get("RAY_ADDRESS"):
        return
    try:
        if phase.slime.generates and not phase.slime.rollout_endpoint:
            hardware.check_engine(found)
        if not phase.slime.debug_rollout_only:
            hardware.check_trainer(phase.megatron)
        if phase.taken_back("megatron", "bf16") and not phase.megatron.get("fp16"):
            hardware.check_full_precision()
    except UsageError as error:
        if instead is None:
            raise
        instead(f"not on this machine: {error.message}")


def _trackers(phase: Resolved, instead: Say | None) -> None:
    """Their libraries are installed. With ``instead``, that is told which is not."""
    from slime_cli.loop import trackers

    try:
        trackers.require(phase.slime)
    except UsageError as error:
        if instead is None:
            raise
        instead(f"not on this machine: {error.message}")


def _starts(resolved: Resolved, each: list[Resolved], run_dir: pathlib.Path) -> None:
    from slime_cli.loop import attempts as folders
    from slime_cli.loop import resuming

    named = folders.phases(resolved, run_dir)
    looked_at = [(name, phase, folder) for (name, _, folder), phase in zip(named, each, strict=True)]
    resuming.check_starts(looked_at, run_dir)


def _folders(resolved: Resolved, run_dir: pathlib.Path, instead: Say | None) -> None:
    """Nothing is in the way of what the run writes. Changes nothing. With ``instead``, that is told why not."""
    from slime_cli.loop import attempts as folders
    from slime_cli.loop import targets

    try:
        disk.nothing_in_the_way(run_dir, "--run-dir")
        for _, options, folder in folders.phases(resolved, run_dir):
            targets.check_folders(options.slime, folder, run_dir, disk.nothing_in_the_way)
    except UsageError as error:
        if instead is None:
            raise
        instead(f"not on this machine: {error.message}")


def _endpoint(phase: Resolved) -> None:
    """Engines and teacher of other processes are there."""
    s = phase.slime
    if not s.generates:
        return
    if s.rollout_endpoint:
        from slime_cli.serving.attached import Attached
        from slime_cli.weights import matching

        attached = Attached(s.rollout_endpoint)
        attached.check()
        if wanted := adapters.served(s):
            matching.require_adapters(attached.alive(), wanted)
    if s.use_opd and s.opd_type == "sglang" and s.opd_teacher_url:
        from slime_cli.rollout import teacher

        teacher.address(s.opd_teacher_url)


def made(phase: Resolved) -> list[str]:
    """Sources of prompts that are made, not read: the library that makes them takes seconds to import."""
    uris = [phase.slime.prompt_data or "", *(one.path for one in _sets(phase.slime))]
    return [uri for uri in uris if uri.startswith("reasoning-gym:")]


def _data(phase: Resolved, planning: bool, lacking: Named) -> Any:
    """Opens every prompt source once; of those that are :func:`made`, none when ``planning``, and none ``lacking``."""
    from slime_cli.commands import train_data

    left_out = [uri for dest, uri in lacking if dest in SOURCES]
    return train_data.sources(phase.slime, [*left_out, *(made(phase) if planning else ())])


def _reward_of(one: EvaluationSet) -> None:
    """The reward and the function that an evaluation set names."""
    from slime_cli.rewards import graders

    if rm_type := one.metadata.get("rm_type"):
        graders.check_rm_type(rm_type)
    if path := one.metadata.get("custom_rm_path"):
        kinds.load(path, REWARDS[bool(one.options.group_rm)])
    if path := one.options.custom_generate_function_path:
        kinds.load(path, "generate")


def _functions(phase: Resolved) -> None:
    """Built-in rewards by name, users' functions by import."""
    s = phase.slime
    supervised = s.loss_type == "sft_loss"
    if s.rm_type and not s.custom_rm_path and not supervised:
        from slime_cli.rewards import graders

        graders.check_rm_type(s.rm_type)
    for one in () if supervised else evaluation_sets(s):
        _reward_of(one)
    of_reward = {"custom_rm_path": REWARDS[bool(s.group_rm)]}
    for option, kind in (of_reward | HOOKS).items():
        if not supervised or kind in SUPERVISED:
            for path in _paths(s, option):
                kinds.load(path, kind)


def _paths(s: SlimeOptions, dest: str) -> list[str]:
    """The paths that an option names: none, one or several."""
    value = getattr(s, dest)
    if dest == "rollout_function_path" and not of_user(value):
        return []
    return value if isinstance(value, list) else [value] if value else []
