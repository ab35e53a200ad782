"""``ifbench``: the answer follows the instructions about its form that ``metadata["instruction_id_list"]`` names.

``metadata["kwargs"]`` has the arguments of each, as the data of IFEval and IFBench do (unused ones are null there). The
checks are in :mod:`.instruction_checks`. A name that there is not, and an argument that is missing or unknown, is no
fault of the answer: the sample cannot be graded.
"""

import inspect
from typing import Any

from slime_cli.rewards.graders.answers import GraderError, after_thinking, without_end_of_turn
from slime_cli.rewards.graders.instruction_checks import CHECKS
from slime_cli.text import nearest


def grade_ifbench(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """1 when the answer follows every instruction."""
    return float(all(followed(response, metadata)))


def grade_ifbench_share(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """The share of the instructions that the answer follows."""
    found = followed(response, metadata)
    return sum(found) / len(found)


def followed(response: str, metadata: dict[str, Any]) -> list[bool]:
    names = metadata.get("instruction_id_list")
    if not isinstance(names, list) or not names:
        raise GraderError("ifbench: metadata['instruction_id_list'] names no instruction")
    given = metadata.get("kwargs") or [{} for _ in names]
    if not isinstance(given, list) or len(given) != len(names):
        raise GraderError(f"ifbench: metadata['kwargs'] must be a list of {len(names)}, one for each instruction")
    text = without_end_of_turn(after_thinking(response)).strip()
    calls = [(name, *call(name, arguments or {})) for name, arguments in zip(names, given, strict=True)]
    return [bool(text) and checked(name, check, text, arguments) for name, check, arguments in calls]


def call(name: Any, arguments: Any) -> tuple[Any, dict[str, Any]]:
    """The check of that name and its arguments."""
    check = CHECKS.get(name)
    if check is None:
        raise GraderError(f"ifbench: there is no check for the instruction {name!r}{nearest(str(name), CHECKS)}")
    if not isinstance(arguments, dict):
        raise GraderError(f"ifbench: the arguments of {name} are {type(arguments).__name__}, not an object")
    arguments = {key: value for key, value in arguments.items() if value is not None}
    wanted = [*inspect.signature(check).parameters][1:]
    if missing := [key for key in wanted if key not in arguments]:
        raise GraderError(f"ifbench: {name} needs {', '.join(missing)} in metadata['kwargs']")
    if unknown := [key for key in arguments if key not in wanted]:
        raise GraderError(f"ifbench: {name} takes no {', '.join(map(str, unknown))}")
    return check, arguments


def checked(name: str, check: Any, text: str, arguments: dict[str, Any]) -> bool:
    try:
        return check(text, **arguments)
    except (TypeError, ValueError, AttributeError) as error:
        raise GraderError(f"ifbench: {name} cannot take {arguments}: {error}") from None
