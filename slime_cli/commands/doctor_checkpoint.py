"""The part of ``slime doctor`` that looks at an HF checkpoint: configuration, tokenizer, chat template, weights.

Reads the files themselves, without transformers: seconds even for a large model, because of its weights only the
headers are read. The chat template is rendered as transformers does it, on a conversation of our own.
"""

import datetime
import json
import os
import pathlib
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

from slime_cli.commands.doctor import Finding

CONVERSATION = [
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 more?"},
    {"role": "assistant", "content": "7"},
]
_AGAIN = "download the checkpoint again"


def check_checkpoint(folder: pathlib.Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding("checkpoint", "fail", f"{folder}: no such folder", "give the folder of an HF checkpoint")
        return
    yield check_config(folder)
    yield check_tokenizer(folder)
    yield check_chat_template(folder)
    yield check_weights(folder)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """Raises ValueError with a message for people."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def check_config(folder: pathlib.Path) -> Finding:
    try:
        config = _read_json(folder / "config.json")
    except ValueError as error:
        return Finding("model config", "fail", str(error), _AGAIN)
    architectures = config.get("architectures")
    if not architectures:
        return Finding("model config", "fail", "config.json names no architectures", 'add "architectures": ["..."]')
    return Finding("model config", "ok", f"{', '.join(architectures)}, {config.get('model_type', 'no model_type')}")


def check_tokenizer(folder: pathlib.Path) -> Finding:
    try:
        model = _read_json(folder / "tokenizer.json").get("model", {})
    except ValueError as error:
        fix = f"{_AGAIN}, or make it: AutoTokenizer.from_pretrained(PATH, use_fast=True).save_pretrained(PATH)"
        return Finding("tokenizer", "fail", str(error), fix)
    return Finding("tokenizer", "ok", f"{model.get('type', 'unknown kind')}, {len(model.get('vocab', ())):,} entries")


def chat_template(folder: pathlib.Path) -> tuple[str | None, dict[str, str]]:
    """The default template, if any, and the special tokens that it may use. Raises ValueError for unreadable files."""
    path = folder / "tokenizer_config.json"
    config = _read_json(path) if path.exists() else {}
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


def check_weights(folder: pathlib.Path) -> Finding:
    """Every tensor of the index is in a shard that is there and whole."""
    name = "weights"
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            wanted: dict[str, set[str]] = {}
            for tensor, shard in _read_json(index).get("weight_map", {}).items():
                wanted.setdefault(shard, set()).add(tensor)
            if not wanted:
                raise ValueError(f"{index} names no tensors")
        else:
            wanted = {path.name: set() for path in folder.glob("*.safetensors")}
        if not wanted:
            return Finding(name, "fail", f"no *.safetensors in {folder}", "save the model with safe_serialization=True")
        problems = [problem for shard in sorted(wanted) if (problem := shard_problem(folder / shard, wanted[shard]))]
    except ValueError as error:
        return Finding(name, "fail", str(error), _AGAIN)
    if problems:
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        return Finding(name, "fail", problems[0] + more, f"{_AGAIN}, or only the files named")
    total = sum((folder / shard).stat().st_size for shard in wanted)
    return Finding(name, "ok", f"{len(wanted)} safetensors files, {total / (1 << 30):.2f} GiB, all whole")


def shard_problem(path: pathlib.Path, tensors: set[str]) -> str:
    """What is wrong with a safetensors file, from its header and size; empty when nothing is."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(8)
            if head == b"version ":
                return f"{path.name} is a Git LFS pointer, not the file (git lfs pull)"
            length = struct.unpack("<Q", head)[0]
            if length > size:
                return f"{path.name} is cut off or no safetensors file"
            header = json.loads(file.read(length))
    except FileNotFoundError:
        return f"{path.name} is missing"
    except (OSError, ValueError, struct.error) as error:
        return f"{path.name}: {error}"
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        return f"{path.name} has {size:,} bytes instead of {end:,}"
    if missing := sorted(tensors - set(header)):
        return f"{path.name} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
    return ""
