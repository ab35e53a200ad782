"""Shows what supervised training would learn with a checkpoint's chat template, for a conversation of our own: token by
token."""

import pathlib
from typing import Any

from slime_cli import plain
from slime_cli.errors import SlimeError
from slime_cli.findings import Finding

NAME = "supervised training"
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
SYSTEM, CALLS, REASONING = "a system message", "tool calls", "reasoning"
FEATURES = (SYSTEM, CALLS, REASONING)
"""Parts of a conversation that some templates do not take."""


def conversation(features: set[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages, and tools."""
    thinks = {"reasoning_content": "Easy."} if REASONING in features else {}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2+2="}]
    if SYSTEM in features:
        messages.insert(0, {"role": "system", "content": "You add."})
    if CALLS in features:
        messages.append({"role": "assistant", "content": "", "tool_calls": [CALL]} | thinks)
        messages.append({"role": "tool", "tool_call_id": CALL["id"], "name": "add", "content": "4"})
    messages.append({"role": "assistant", "content": "It is 4."} | thinks)
    messages += [{"role": "user", "content": "And 3 more?"}, {"role": "assistant", "content": "7."} | thinks]
    return messages, [TOOL] if CALLS in features else None


def check_training(folder: pathlib.Path) -> Finding:
    """The most that the template takes of the conversation, as it is trained; ``shown`` has the tokens."""
    from slime_cli.rollout.chat import RenderOptions
    from slime_cli.rollout.shown import lines
    from slime_cli.rollout.supervised import SupervisedRenderer

    try:
        renderer = SupervisedRenderer(str(folder), RenderOptions(apply_chat_template=True))
        taken, refused = _taken(renderer)
        example = renderer.example(_row(taken))
    except SlimeError as error:
        return Finding(NAME, "warn", error.message, error.fix)
    if example is None:
        raise AssertionError("a conversation without a bound on its length was left out as too long")
    samples = len(example.parts)
    turns = sum(message["role"] == "assistant" for message in conversation(taken)[0])
    detail = f"{turns} turns of a conversation in {'one sample' if samples == 1 else f'{samples} samples'}, shown below"
    detail += "".join(f"; refuses {feature}: {why}" for feature, why in refused.items())
    return Finding(NAME, "ok", detail, shown=tuple(lines(renderer.tokenizer, example, plain.width())))


def _row(features: set[str]) -> Any:
    from slime_cli.buffer.types import PromptRow

    messages, tools = conversation(features)
    return PromptRow(messages, None, {"tools": tools} if tools else {}, "conversation", 1)


def _taken(renderer: Any) -> tuple[set[str], dict[str, str]]:
    """Features that the template takes together, and why it refuses others."""
    taken: set[str] = set()
    refused = {}
    for feature in FEATURES:
        try:
            renderer.example(_row(taken | {feature}))
            taken.add(feature)
        except SlimeError as error:
            refused[feature] = error.message.partition(": ")[2]
    return taken, refused
