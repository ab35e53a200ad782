"""``code``: the program in an answer passes its tests, in a sandbox (:mod:`slime_cli.rewards.sandbox`).

Tests are in ``metadata["tests"]``, else in the label; docs/rewards.md names their forms. What is expected of a program
or of a function never enters the sandbox, the values are compared here; assertions have to run beside the answer.
"""

import contextlib
import dataclasses
import json
import logging
import math
import re
import time
from collections.abc import Iterator
from typing import Any, Literal

from slime_cli.rewards import sandbox
from slime_cli.rewards.graders import limits
from slime_cli.rewards.graders.answers import GraderError, after_thinking, without_end_of_turn

logger = logging.getLogger(__name__)

SECONDS = 4.0
"""A program's own time for one test, where ``metadata["time_limit"]`` names no other."""
SHARE = 0.5
"""The part of ``--rm-timeout`` that all tests of an answer may take of their own time."""
PATIENCE = 0.9
"""The part of ``--rm-timeout`` after which a machine is too busy to judge."""
CLOSE = 1e-6
FENCE = re.compile(r"(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]{0,20})")
PYTHON = ("python", "python3", "py", "")
PREAMBLE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""Imports that sites with a function's name and arguments make in advance."""
CHECK = re.compile(r"^def check\(", re.M)
DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?")
_said: set[str] = set()


def grade_code(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """1 when the program in the answer passes every test."""
    passed, total = judged(response, label, metadata, every=True)
    return float(passed == total)


def grade_code_share(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """The share of the tests that the program passes."""
    passed, total = judged(response, label, metadata, every=False)
    return passed / total


def judged(response: str, label: str | None, metadata: dict[str, Any], every: bool) -> tuple[int, int]:
    """How many tests pass, of how many; with ``every`` no further ones are run after one that fails."""
    tests = tests_of(metadata.get("tests") or label, metadata)
    program = program_of(response)
    passed = 0
    try:
        for right in results(tests, program, Clock.of(metadata)) if program else ():
            passed += right
            if every and not right:
                break
    except sandbox.SandboxError as error:
        raise GraderError(f"code: {error}") from None
    return passed, len(tests.cases)


def program_of(response: str) -> str:
    """The last complete fenced block of Python after the thinking; all of the text where nothing is fenced."""
    text = without_end_of_turn(after_thinking(response))
    program = ""
    opened: re.Match[str] | None = None
    inside: list[str] = []
    for line in text.splitlines(keepends=True):
        if opened is None:
            opened, inside = FENCE.match(line), []
        elif line.startswith(opened["fence"]) and not line.strip().strip(opened["fence"][0]):
            if opened["language"].lower() in PYTHON:
                program = "".join(inside)
            opened = None
        else:
            inside.append(line)
    return program or ("" if "```" in text or "~~~" in text else text.strip())


@dataclasses.dataclass(frozen=True)
class Tests:
    kind: Literal["program", "function", "assertions"]
    cases: list[tuple[Any, Any]]
    """Standard input and output, arguments and value, or a text of assertions and nothing."""
    function: str = ""


def tests_of(value: Any, metadata: dict[str, Any]) -> Tests:
    """The tests in one of the forms that docs/rewards.md names. GraderError where there is none."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, str) and value.strip():
        value = [value]
    function = metadata.get("fn_name") or (value.get("fn_name") if isinstance(value, dict) else "") or ""
    if isinstance(value, dict):
        value = paired(value)
    if not isinstance(value, list) or not value:
        raise GraderError("code: no tests: give them in metadata['tests'] or as the label, see docs/rewards.md")
    if all(isinstance(one, str) for one in value):
        entry = metadata.get("entry_point")
        texts = [f"{one}\ncheck({entry})\n" if entry and CHECK.search(one) else one for one in value]
        return Tests("assertions", [(text, None) for text in texts])
    if not all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in value):
        raise GraderError("code: each test is a text of assertions, or has 'input' and 'output'")
    if function:
        return Tests("function", [called_with(one["input"], one["output"]) for one in value], str(function))
    return Tests("program", [(as_text(one["input"]), as_text(one["output"])) for one in value])


def paired(value: dict[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise GraderError("code: the tests need 'inputs' and 'outputs', two lists of one length")
    return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def called_with(given: Any, expected: Any) -> tuple[list[Any], Any]:
    """Arguments and value; where the arguments are a text, each line is one as JSON, and so is the value."""
    if isinstance(given, str):
        return [value_of(line) for line in given.splitlines() if line.strip()], value_of(expected)
    return given if isinstance(given, list) else [given], expected


def value_of(text: Any) -> Any:
    if isinstance(text, str):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return text


def as_text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


@dataclasses.dataclass
class Clock:
    """The time that the tests of one answer may take."""

    left: float
    """Seconds of the program's own."""
    until: float
    each: float
    memory: int

    @classmethod
    def of(cls, metadata: dict[str, Any]) -> "Clock":
        try:
            each = float(metadata.get("time_limit") or SECONDS)
            memory = int(float(metadata.get("memory_limit") or sandbox.MEMORY / 2**20) * 2**20)
        except (TypeError, ValueError):
            raise GraderError("code: metadata's time_limit (seconds) and memory_limit (MiB) are numbers") from None
        patience = limits.patience()
        return cls(SHARE * patience, time.monotonic() + PATIENCE * patience, each, memory)

    def run(self, program: str, runs: int = 1, **how: Any) -> sandbox.Ran:
        """Once, in what is left, at most as long as so many runs may take."""
        seconds = min(self.left, self.each * runs)
        ran = sandbox.run(program, seconds=seconds, until=self.until, memory=self.memory, **how)
        self.left -= ran.seconds
        say_missing(ran.missing)
        return ran


def results(tests: Tests, program: str, clock: Clock) -> Iterator[bool]:
    """True for each test that passes, in order; fewer where the time is over."""
    if tests.kind == "program":
        for given, expected in tests.cases:
            if clock.left <= 0:
                return
            ran = clock.run(program, stdin=given)
            yield ran.ended == "exit" and ran.code == 0 and same_output(expected, ran.output)
        return
    cases = [given for given, _ in tests.cases]
    before = PREAMBLE if tests.function else ""
    ran = clock.run(program, len(cases), tests=cases, function=tests.function, before=before)
    found = {line["test"]: line for line in ran.lines}
    for place, (_, expected) in enumerate(tests.cases):
        line = found.get(place, {})
        yield "value" in line and (not tests.function or same_value(expected, line["value"]))


def same_output(expected: str, found: str) -> bool:
    """The same lines, but for blanks; numbers with a decimal point or an exponent may differ by a millionth."""
    ours, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (expected, found))
    return len(ours) == len(theirs) and all(
        len(one) == len(other) and all(map(same_word, one, other)) for one, other in zip(ours, theirs, strict=True)
    )


def same_word(expected: str, found: str) -> bool:
    if expected == found:
        return True
    if not (DECIMAL.fullmatch(expected) and DECIMAL.fullmatch(found) and re.search("[.eE]", expected + found)):
        return False
    return close(float(expected), float(found))


def same_value(expected: Any, found: Any) -> bool:
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(same_value, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(same_value(expected[key], found[key]) for key in expected)
    one, other = real(expected), real(found)
    if one is not None and other is not None and float in (type(one), type(other)):
        return close(one, other)
    return type(expected) is type(found) and expected == found


def real(value: Any) -> float | None:
    """A number as it is; no truth value, no text."""
    return value if type(value) in (int, float) else None


def close(expected: float, found: float) -> bool:
    return math.isclose(expected, found, rel_tol=CLOSE, abs_tol=CLOSE)


def say_missing(missing: list[str]) -> None:
    """Once a worker."""
    if missing and not _said:
        _said.add("missing")
        logger.warning(f"code: programs are less isolated on this machine: {'; '.join(missing)}")
