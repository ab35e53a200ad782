"""slime's public launch scripts given to ``slime train --dry-run``: ``make scripts`` writes ``runs/scripts.json``.

``slime_scripts.json`` has the options of 45 scripts of slime's ``scripts/`` and ``examples/`` as one would type them.
Data and YAML files are replaced by small ones that lie on this machine; models and checkpoints, of up to a terabyte,
and the examples' own modules are not there, which a dry run says and does not refuse. What stands behind a refused
option is looked at too: the script is tried again without it, until nothing more is refused.
"""

import collections
import contextlib
import dataclasses
import io
import json
import pathlib
import re
import shlex
import tempfile
from collections.abc import Iterator
from typing import Any

from slime_cli import manifests
from slime_cli.commands import train
from slime_cli.errors import SlimeError, UsageError

TARGET = "runs/scripts.json"
SCRIPTS: dict[str, list[str]] = {
    name: shlex.split(words)
    for name, words in json.loads((pathlib.Path(__file__).parent / "slime_scripts.json").read_text()).items()
}
"""Script -> its words after ``train.py``."""
YAMLS = {
    "--custom-config-path": "max_turns: 3\ntis_mode_of_mine: token\n",
    "--eval-config": "eval:\n  defaults: {n_samples_per_eval_prompt: 2}\n  datasets:\n  - {name: set, path: DATA}\n",
}
"""Option -> what stands in for the file that it names."""
ROWS = 4


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of one script."""

    script: str
    options: int
    passes: bool
    refused: list[dict[str, str]]
    """Each with ``option`` and ``why``."""


def verdict(script: str, folder: pathlib.Path) -> Verdict:
    """``folder``: where stand-ins are written."""
    argv = with_stand_ins(SCRIPTS[script], folder)
    refused: list[dict[str, str]] = []
    left = argv
    while error := refusal([*left, "--run-dir", str(folder / "run")]):
        found = list(causes(error, folder))
        refused += found
        taken = {cause["option"] for cause in found}
        if not (fewer := without(left, taken)) or fewer == left or not isinstance(error, UsageError):
            break
        left = fewer
    return Verdict(script, sum(word.startswith("--") for word in SCRIPTS[script]), not refused, refused)


def refusal(argv: list[str]) -> SlimeError | None:
    """The error of ``slime train ... --dry-run``; None where it passes."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train.run([*argv, "--dry-run"])
    except SlimeError as error:
        return error
    return None


def causes(error: SlimeError, folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """``folder`` is DIR in them."""
    for part in error.parts:
        named = re.search(r"--[a-z0-9-]+", part.message)
        why = f"{part.message}: {part.fix}" if part.fix else part.message
        yield {"option": named[0] if named else "", "why": why.replace(str(folder), "DIR")}


def without(argv: list[str], flags: set[str]) -> list[str]:
    """``argv`` less the flags and their values."""
    out: list[str] = []
    leave = False
    for word in argv:
        if word.startswith("--"):
            leave = word.partition("=")[0] in flags
        if not leave:
            out.append(word)
    return out


def with_stand_ins(argv: list[str], folder: pathlib.Path) -> list[str]:
    """``argv`` with small files of this machine for data and YAML files, and folders in ``folder`` for what is
    written."""
    data = _data(argv, folder)
    out: list[str] = []
    option = ""
    place = 0
    for word in argv:
        option, place = (word, 0) if word.startswith("--") else (option, place + 1)
        if _names_data(argv, option, place):
            out.append(str(data))
        elif option in YAMLS and place == 1:
            path = folder / f"{option[2:]}.yaml"
            path.write_text(YAMLS[option].replace("DATA", str(data)))
            out.append(str(path))
        else:
            out.append(word.replace("DIR/", f"{folder}/") if place else word)
    return out


def _names_data(argv: list[str], option: str, place: int) -> bool:
    """True when the option's word at ``place`` (0: itself) is a data file: its only one, or of ``NAME PATH NAME PATH``
    each second one."""
    if option != "--eval-prompt-data" or place == 0:
        return option == "--prompt-data" and place == 1
    words = argv[argv.index("--eval-prompt-data") + 1 :]
    count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return count == 1 or place % 2 == 0


def _data(argv: list[str], folder: pathlib.Path) -> pathlib.Path:
    """Rows with the fields that the script's options name."""
    value = dict(zip(argv, [*argv[1:], ""], strict=True))
    messages = [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "2"}]
    supervised = value.get("--loss-type") == "sft_loss"
    row: dict[str, Any] = {value.get("--input-key", "input"): messages[: 1 + supervised]}
    if "--label-key" in argv:
        row[value["--label-key"]] = "2"
    path = folder / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * ROWS)
    return path


def by_cause(verdicts: list[Verdict]) -> list[tuple[str, list[str]]]:
    """Refused options with the scripts that have them; the most frequent first."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for one in verdicts:
        for cause in one.refused:
            found[cause["why"]].add(one.script)
    return sorted(((cause, sorted(scripts)) for cause, scripts in found.items()), key=lambda it: (-len(it[1]), it[0]))


def all_verdicts(folder: pathlib.Path) -> list[Verdict]:
    return [verdict(script, folder) for script in SCRIPTS]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        verdicts = all_verdicts(pathlib.Path(folder))
    manifests.write_json(TARGET, [dataclasses.asdict(one) for one in verdicts])
    passing = sum(one.passes for one in verdicts)
    for cause, scripts in by_cause(verdicts):
        print(f"{len(scripts):3}  {cause}")
    print(f"{passing} of {len(verdicts)} scripts pass --dry-run; written to {TARGET}")


if __name__ == "__main__":
    main()
