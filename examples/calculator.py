"""A calculator that the model may call several times within one answer.

It writes an expression between two marks, ``<<12*(3+4)>>``. The engine stops at the second one; the result is appended
as text that is not trained, and the model continues behind it. An answer ends where the model ends a turn without a
call, at its length, or at one more call than CALLS.

Tokens go in and come out: the engine is sent the ids that it sampled, never a text that was encoded again.
"""

import ast
import operator
import re

from slime_cli import hooks

CALLS = 4
OPEN, CLOSE = ["<<"], [">>"]
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
SYSTEM = "You may use a calculator: write <<expression>> and its value is written behind. End with the number alone."


async def generate(args, sample, sampling_params):
    """``--custom-generate-function-path``. Keys of ``--custom-config-path``: calculator_open, calculator_close."""
    engine = hooks.engine(args)
    close = getattr(args, "calculator_close", CLOSE)
    if not sample.response_length and isinstance(sample.prompt, str):  # else it is continued after an interruption
        question = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sample.prompt}]
        sample.tokens = hooks.render(args, question)
    stops = {"stop": [*close, *(sampling_params.get("stop") or [])]}
    turn = sample.metadata.setdefault("turn", {"calls": 0, "begin": 0})  # what a continued call must know
    while True:
        await engine.generate(sample, sampling_params | stops)
        expression = called(sample.response[turn["begin"] :], getattr(args, "calculator_open", OPEN), close)
        if sample.status is not hooks.Status.COMPLETED or expression is None or turn["calls"] == CALLS:
            break
        hooks.append_text(args, sample, f" = {value(expression)}\n")
        turn |= {"calls": turn["calls"] + 1, "begin": len(sample.response)}
    return sample


def called(text, opens=OPEN, closes=CLOSE):
    """The expression of the call in a turn's text, which the engine ended at its closing mark; None where it has
    none."""
    ends = [text.index(mark) for mark in closes if mark in text]
    if not ends:
        return None
    text = text[: min(ends)]
    begins = [text.rindex(mark) + len(mark) for mark in opens if mark in text]
    return text[max(begins) :] if begins else None


def value(expression):
    """A number as text, or the word ``error``: nothing but numbers, + - * / and brackets is computed."""
    try:
        found = _computed(ast.parse(expression.strip(), mode="eval").body) if len(expression) < 100 else None
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return "error"
    return "error" if found is None else f"{found:.12g}"


def _computed(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_computed(node.operand)) if type(node.op) in OPERATORS else _refuse(node)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    return _refuse(node)


def _refuse(node):
    raise ValueError(ast.dump(node))


def reward(args, sample):
    """``--custom-rm-path``: 1 where the last number that the model wrote is the label's."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", sample.response)
    try:
        return float(bool(numbers) and float(numbers[-1]) == float(sample.label))
    except ValueError:
        return 0.0
