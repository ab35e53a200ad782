"""Opens what a phase works with, as an earlier attempt left it. Called by :mod:`slime_cli.loop.phase`."""

import dataclasses
import functools
import pathlib
import types
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.sources.open import prompts_of
from slime_cli.buffer.types import PromptRow, Sample, trajectories
from slime_cli.errors import DataError
from slime_cli.hooks import rollouts
from slime_cli.hooks.batches import BatchHooks
from slime_cli.hooks.kinds import Hook
from slime_cli.loop.saving import Saver
from slime_cli.loop.shared import Shared
from slime_cli.manifests import layout
from slime_cli.models import architecture
from slime_cli.options.checks.functions import of_user
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.chat import Renderer, RenderOptions
from slime_cli.rollout.failures import Failures
from slime_cli.rollout.supervised import SupervisedRenderer
from slime_cli.training.batching import packing
from slime_cli.training.settings import Settings


@dataclasses.dataclass
class Opened:
    """The parts that a phase works with."""

    renderer: Renderer
    boundary: Boundary
    buffer: DataBuffer
    failures: Failures
    saver: Saver


def open_phase(name: str, options: Resolved, folder: pathlib.Path, shared: Shared, args: Any) -> Opened:
    """Raises DataError when the data changed since an earlier attempt."""
    s = options.slime
    policy = s.loss_type != "sft_loss"
    say = shared.screen.say
    config = architecture.read_config(shared.model)
    context = architecture.context_length(config, options.sglang.get("context_length") if policy else None)
    rendering = RenderOptions.of(s, context)
    renderer = (Renderer if policy else SupervisedRenderer)(shared.model, rendering, say)
    source = prompts_of(s)
    if source.skipped:
        bad = source.skipped[0]
        say(f"{len(source.skipped)} bad rows skipped, the first: {bad.file}:{bad.row}: {bad.field}: {bad.reason}")
    columns = tuple(c for c in Settings.from_options(s).columns if c != "teacher_log_probs")  # the teacher adds those
    boundary = Boundary.of(renderer.tokenizer, shared.model, architecture.vocabulary(shared.model), args, columns)
    args = types.SimpleNamespace(**vars(args) | {"hf_checkpoint": str(shared.model)})
    shaping = BatchHooks.of(args) if s.generates else BatchHooks()  # saved samples have been shaped
    unbounded = not policy or s.debug_rollout_only  # the weights never change
    unbounded |= of_user(s.rollout_function_path)  # such a function leases when it likes
    filter_path = s.buffer_filter_path if policy else None
    buffer_filter = Hook.load(filter_path, "buffer_filter") if filter_path else None
    journal = Journal(folder / layout.JOURNAL)
    try:
        _same_source(journal, source.fingerprint(), s)
        buffer = DataBuffer(
            journal,
            source,
            folder=folder,
            samples_per_prompt=s.n_samples_per_prompt,
            shuffle=s.rollout_shuffle,
            seed=s.rollout_seed,
            render=_render(s, renderer, boundary),
            on_bad_row=s.on_bad_row,
            say=say,
            gate=Gate(s.rollout_batch_size, None if unbounded else s.max_staleness),
            steps_per_rollout=s.num_steps_per_rollout or 1,
            reward_key=s.reward_key,
            rows=boundary.rows,
            unfit=oversize(options),
            shape=functools.partial(shaping.apply, args) if shaping else None,
            select=functools.partial(rollouts.choose, buffer_filter, args) if buffer_filter else None,
        )
    except BaseException:
        journal.close()
        raise
    drop_rollouts(name, s, buffer, say)
    failures = Failures(s.max_groups_without_progress, lambda text: say(f"{name}: {text}"))
    saver = Saver(s, folder, shared.run_dir, buffer, shared.learner, shared.tracer.span)
    return Opened(renderer, boundary, buffer, failures, saver)


def _render(s: SlimeOptions, renderer: Renderer, boundary: Boundary) -> Callable[[PromptRow], Any]:
    """Prompts or examples of rows. Saved rollouts have their tokens: their rows are only named."""
    if s.load_debug_rollout_data:
        return lambda row: None
    return boundary.checked(renderer.example if isinstance(renderer, SupervisedRenderer) else renderer.prompt)


def drop_rollouts(name: str, s: SlimeOptions, buffer: DataBuffer, say: Callable[[str], None]) -> None:
    """``--drop-rollouts``: what an earlier attempt made and could not train."""
    for rollout_id in s.drop_rollouts or ():
        found = buffer.drop_batch(rollout_id)
        what = f"dropped, {found} trajectories" if found else "no such batch waits to be trained"
        say(f"{name}: --drop-rollouts {rollout_id}: {what}")


def _same_source(journal: Journal, found: Any, s: SlimeOptions) -> None:
    known = journal.get("source")
    if known is not None and known != found:
        raise DataError(f"{s.prompt_data} changed since this run began", "restore the data or start another --run-dir")
    journal.put("source", found)


def oversize(options: Resolved) -> Callable[[list[Sample]], dict[str, list[int]]]:
    """With ``--oversize drop``: the trajectories of a batch of which a sample is above the cap, by reason."""
    s = options.slime
    ranks = options.megatron.get("context_parallel_size", 1)  # they share a pack

    def unfit(samples: list[Sample]) -> dict[str, list[int]]:
        if s.oversize != "drop" or not s.use_dynamic_batch_size:
            return {}
        cap = s.max_tokens_per_gpu * ranks
        return {"oversize": list(trajectories(x for x in samples if packing.padded(len(x.tokens), ranks) > cap))}

    return unfit
