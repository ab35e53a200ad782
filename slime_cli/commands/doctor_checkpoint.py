"""Is an HF checkpoint fit for a run: what :mod:`slime_cli.weights.whole` finds, and whether its chat template can be
used.

``slime doctor`` lists all of it; ``train``, ``serve-rollout``, ``convert`` and ``sync`` call :func:`require` before
they start anything. The chat template is rendered as transformers does it, on a conversation of our own.
"""

import datetime
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from slime_cli.findings import Finding
from slime_cli.weights import whole

CONVERSATION = [
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "7"},
]
FOLDER, CONFIG, TOKENIZER, TEMPLATE, WEIGHTS = "checkpoint", "model config", "tokenizer", "chat template", "weights"
"""Names of the findings."""


def check_checkpoint(folder: pathlib.Path) -> Iterator[Finding]:
    yield from whole.findings(folder)
    if folder.is_dir():
        yield check_chat_template(folder)


def require(
    folder: str | os.PathLike, say: Callable[[str], None], needed: Collection[str], looked_at: Collection[str] = ()
) -> None:
    """Raises DataError for the first finding of those ``needed`` that fails; ``say`` is told of what else is not
    well with these and with those ``looked_at``. Nothing heavy is imported: it is called before anything is started.
    """
    for finding in check_checkpoint(pathlib.Path(folder)):
        if finding.name in (FOLDER, *needed, *looked_at):
            whole.act_on(finding, folder, finding.name in (FOLDER, *needed), say)


def chat_template(folder: pathlib.Path) -> tuple[str | None, dict[str, str]]:
    """The default template, if any, and the special tokens that it may use. Raises ValueError for unreadable files."""
    path = folder / "tokenizer_config.json"
    config = whole.read_json(path) if path.exists() else {}
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if value is not None:
            tokens[name] = value
    return template, tokens


def renderer(template: str, tokens: dict[str, str]) -> Callable[[list[dict[str, Any]], bool], str]:
    """``(messages, add_generation_prompt) -> text``. Raises jinja2.TemplateSyntaxError."""
    import jinja2.ext
    import jinja2.sandbox

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime(2026, 1, 1).strftime(form)
    # A tag of transformers' own that marks what the assistant said; it adds no text.
    template = re.sub(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", r"{#\1 \2#}", template)
    compiled = environment.from_string(template)
    return lambda messages, prompt: compiled.render(messages=messages, add_generation_prompt=prompt, **tokens)


def first_rewrite(render: Callable[[list[dict[str, Any]], bool], str], messages: list[dict[str, Any]]) -> str:
    """Where a later message changes text that was already rendered, in words; empty when the template only appends.

    For each k: rendering ``messages[:k]``, with the generation prompt where the assistant is next, is a prefix of
    rendering ``messages[:k + 1]``. Where it is not, tokens that the model saw differ from those of a later render.
    """
    first = 2 if messages[0]["role"] == "system" else 1
    for k in range(first, len(messages)):
        before = render(messages[:k], messages[k]["role"] == "assistant")
        after = render(messages[: k + 1], False)
        if not after.startswith(before):
            at = len(os.path.commonprefix([before, after]))
            was, now = before[at:][:40], after[at:][:40]
            return f"message {k + 1} ({messages[k]['role']}) changes what precedes it: {was!r} becomes {now!r}"
    return ""


def check_chat_template(folder: pathlib.Path) -> Finding:
    import jinja2

    name = "chat template"
    own = "put a chat_template.jinja into the checkpoint"
    try:
        template, tokens = chat_template(folder)
        if template is None:
            return Finding(name, "warn", "none: prompts must be plain text", f"for chat prompts {own}")
        render = renderer(template, tokens)
        messages = CONVERSATION
        try:
            render(messages[:2], True)
        except jinja2.TemplateError:
            messages = CONVERSATION[1:]  # some templates refuse a system message
            render(messages[:1], True)
        lost = [message["content"] for message in messages if message["content"] not in render(messages, False)]
        rewrite = first_rewrite(render, messages)
    except jinja2.TemplateSyntaxError as error:
        return Finding(name, "fail", f"line {error.lineno}: {error.message}", own)
    except Exception as error:  # a template may call anything: all it raises is the finding
        return Finding(name, "fail", f"{type(error).__name__}: {error}", own)
    if lost:
        return Finding(name, "fail", f"leaves out the content {lost[0]!r}", own)
    if rewrite:
        fix = "one turn is safe; for several, use a template that keeps earlier turns as they were (thinking included)"
        return Finding(name, "warn", f"not append-only: {rewrite}", fix)
    system = "" if messages is CONVERSATION else "; takes no system message"
    return Finding(name, "ok", f"renders, append-only{system}")
