"""Checks the data of ``slime train`` before anything is started: every row is well formed, the first ones of each
source render and fit the model, and how many rollouts ``--num-epoch`` makes."""

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence

from slime_cli.buffer.sources.open import PromptSource, evaluations_of, prompts_of
from slime_cli.buffer.types import PromptRow
from slime_cli.errors import UsageError
from slime_cli.options.derive import longest
from slime_cli.options.evaluations import evaluation_sets
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved
from slime_cli.rollout import template, usable

Say = Callable[[str], None]


Sources = tuple[PromptSource | None, list[PromptSource | None]]
"""Prompts, and evaluation sets; None for one that is left out."""


def check(stages: list[tuple[str, Resolved, Sources]], say: Say) -> dict[str, int]:
    """Rollouts of each stage that runs for a number of epochs, by its name. Raises DataError for data that cannot be
    used. No source of ``stages`` is left out."""
    out: dict[str, int] = {}
    with _model(stages[0][1].slime.hf_checkpoint) as model:
        for name, stage, (prompts, evaluations) in stages:
            assert prompts is not None
            opened = [source for source in evaluations if source is not None]
            rollouts = _look(f"{name}: ", stage, model, prompts, opened, say)
            if rollouts is not None:
                out[name] = rollouts
    return out


def sources(s: SlimeOptions, left_out: Sequence[str] = ()) -> Sources:
    """Opens the sources of a stage, but for those ``left_out``. Raises UsageError or DataError for one that is
    unfit."""
    prompts = None if s.prompt_data in left_out else prompts_of(s)
    return prompts, evaluations_of(s, left_out)


@contextlib.contextmanager
def _model(checkpoint: str) -> Iterator[str]:
    """The checkpoint's folder; a ``tiny:`` model is made for the time of the check."""
    from slime_cli.models import tiny

    if not checkpoint.startswith(tiny.PREFIX):
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="slime-") as folder:
        yield str(tiny.make(checkpoint, f"{folder}/model"))


def _look(
    name: str, stage: Resolved, model: str, prompts: PromptSource, evaluations: list[PromptSource], say: Say
) -> int | None:
    """Renders rows as the stage will; rollouts where ``--num-epoch`` says how many."""
    from slime_cli.models import architecture
    from slime_cli.rollout.chat import Renderer, RenderOptions
    from slime_cli.rollout.supervised import SupervisedRenderer

    s = stage.slime
    policy = stage.slime.loss_type != "sft_loss"
    if s.apply_chat_template and not policy and not s.rollout_stop and not s.rollout_stop_token_ids:
        template.require_end(pathlib.Path(model))
    given = stage.sglang.get("context_length") if policy else None
    context = architecture.context_length(architecture.read_config(model), given)
    if policy and context is not None:
        check_lengths(s, context)
    rendering = RenderOptions.of(s, context)
    if policy:
        renderer = Renderer(model, rendering, say)
        render: Callable[[PromptRow], object] = renderer.prompt
    else:
        renderer = SupervisedRenderer(model, rendering, say)
        render = renderer.example
    skip = s.on_bad_row == "skip"
    epochs = None if s.num_rollout is not None else s.num_epoch
    left_out = skip or s.rollout_max_prompt_len is not None
    if epochs and left_out and len(prompts) > usable.ROWS:
        say(f"{name}--num-epoch counts the rows that can be used among {len(prompts):,}")
    found = usable.Usable()
    if len(prompts):
        found = usable.look(prompts, render, skip=skip, every=bool(epochs and left_out))
        _report(name, prompts, found, say)
    for one, source in zip(evaluation_sets(s), evaluations, strict=True):
        of_set = renderer.having(RenderOptions.of(one.options, context)).eval_prompt
        _report(name, source, usable.look(source, of_set, skip=skip, every=False), say)
    if not epochs:
        return None
    return _rollouts(name, stage, len(prompts) if not left_out else found.usable, epochs, prompts, say)


def check_lengths(s: SlimeOptions, context: int) -> None:
    """The longest prompt and answer must fit the model's context."""
    prompt = s.rollout_max_prompt_len or 1
    answer = s.rollout_max_response_len
    tokens = longest(s, prompt=1)
    if answer and tokens > context:
        lengths = f"--rollout-max-prompt-len {prompt} + --rollout-max-response-len {answer}"
        if tokens == s.rollout_max_context_len:
            lengths = f"--rollout-max-context-len {tokens}"
        raise UsageError(f"{lengths} is more than the model's {context} positions", "lower one of them")


def _report(name: str, source: PromptSource, found: usable.Usable, say: Say) -> None:
    for kind, count in found.problems.items():
        counted = f"{count} of {found.looked_at} rows looked at are passed over ({kind})"
        say(f"{name}{source.name}: {counted}, the first: {found.first[kind]}")


def _rollouts(name: str, stage: Resolved, rows: int, epochs: int, prompts: PromptSource, say: Say) -> int:
    batch = stage.slime.rollout_batch_size
    rollouts, rest = usable.rollouts(prompts.name, rows, epochs, batch)
    unusable = f" of {len(prompts)}" if rows < len(prompts) else ""
    over = f"; {rest} are left over" if rest else ""
    again = (
        "; prompts that a filter leaves out are made up for by dealing on, into another pass"
        if stage.slime.dynamic_sampling_filter_path
        else ""
    )
    passes = f"--num-epoch {epochs} over {rows}{unusable} rows"
    say(f"{name}{passes} makes {rollouts} rollouts of {batch} prompts{over}{again}")
    return rollouts
