"""How many of the judged pairs each grader gets right, and how long one takes.

``python -m tests.rewards.judged_pairs`` writes the table of docs/rewards.md; ``make bench`` has the rate.
The pairs are in ``judged/TYPE.jsonl``, one a line: ``rm_type``, ``response``, ``label``, ``metadata``, ``verdict`` (a
reward, where dapo's -1 is 0, or "error" for a row that cannot be graded), ``kind``, and ``reason``.
Each was judged before a grader was asked.
"""

import collections
import json
import pathlib
import statistics
import time
from typing import Any

from slime_cli.rewards.graders import GraderError, grade, prepare

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "rewards.md"
PAIRS = [
    json.loads(line)
    for path in sorted((pathlib.Path(__file__).parent / "judged").glob("*.jsonl"))
    for line in path.read_text(encoding="utf-8").splitlines()
]


def verdict(pair: dict[str, Any]) -> float | str:
    try:
        reward = grade(pair["rm_type"], pair["response"], pair["label"], pair["metadata"])
    except GraderError:
        return "error"
    return (reward["score"] + 1) / 2 if isinstance(reward, dict) else reward


def right(pair: dict[str, Any], got: float | str) -> bool:
    truth = pair["verdict"]
    return got == truth if isinstance(got, str) or isinstance(truth, str) else abs(got - truth) < 1e-9


def measured() -> dict[str, tuple[int, list[float]]]:
    """How many pairs of each type are right, and the seconds of each pair."""
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    hits: collections.Counter[str] = collections.Counter()
    prepare("math", "", "", {}, 0)
    for pair in PAIRS:
        begin = time.perf_counter()
        hits[pair["rm_type"]] += right(pair, verdict(pair))
        seconds[pair["rm_type"]].append(time.perf_counter() - begin)
    return {rm_type: (hits[rm_type], times) for rm_type, times in seconds.items()}


def table(found: dict[str, tuple[int, list[float]]]) -> str:
    rows = ["| rm_type | right | of | median ms | slowest ms |", "|---|---|---|---|---|"]
    for rm_type, (hits, times) in found.items():
        median = statistics.median(times) * 1000
        rows.append(f"| {rm_type} | {hits} | {len(times)} | {median:.3f} | {max(times) * 1000:.1f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """The table is what the page ends with."""
    text = PAGE.read_text(encoding="utf-8")
    written = table(measured())
    PAGE.write_text(text[: text.index("| rm_type | right |")] + written, encoding="utf-8")
    print(written, end="")


if __name__ == "__main__":
    main()
