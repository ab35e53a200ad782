"""``docs/options.md`` from the declarations of slime's own options; imports nothing heavy.

``python -m bench.options_page`` writes it; a test holds the page to what this makes.
"""

import pathlib
from collections.abc import Iterator

from slime_cli.options import own, resume
from slime_cli.options.declare import OwnOption
from slime_cli.options.groups import GROUPS
from slime_cli.options.not_yet import NOT_WIRED

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """\
# Options

Every option of slime's own. `make options` writes this page from the declarations in `slime_cli/options/groups/`.
Options of the engines have their own names: Megatron's as they are (`--lr`), SGLang's as `--sglang-NAME`, the router's
as `--router-NAME`; `--help` of each engine explains them.

- **Default**: the value when nobody gives the option; `-` is no value.
- **Bounds**: numbers outside them are refused.
- **Needs**: the option has an effect only with these. A flag that lacks them is named in a warning.
- **Resume**: `free` where the same `--run-dir` can be started again with another value. Another value of any other
  option would rewrite the past: such a start is refused by the option's name. `run.json` records what each attempt
  changed. A finished run with a larger `--num-rollout` is trained further; with the same or a smaller one it shows its
  result.

A flag has no value; `=false` after it takes back what a profile gives.
"""
ENGINES = """\
## Options of the engines that are free in a resume

| section | options |
|---|---|
"""


def page() -> str:
    return "\n".join([HEAD, *(_section(group) for group in GROUPS), ENGINES + "\n".join(_engines())]) + "\n"


def _section(group: type) -> str:
    options = [o for o in own.OPTIONS if o.group == group.NAME and o.flag not in NOT_WIRED]
    if not options:
        return ""
    needed = "".join(f" All need `{own.written(need)}`." for need in group.NEEDS).replace("|", " or ")
    head = "| option | default | bounds | needs | resume | |\n|---|---|---|---|---|---|\n"
    return f"## {group.NAME.capitalize()}\n\n{group.__doc__}{needed}\n\n{head}{''.join(map(_row, options))}"


def _row(option: OwnOption) -> str:
    cells = [
        f"`{option.spelling}`",
        f"`{option.default}`" if option.takes_value and option.default not in (None, {}) else "-",
        str(option.bounds or ""),
        ", ".join(f"`{need}`" for need in own.needed(option)),
        "free" if option.resume == "free" else "",
        option.help,
    ]
    return f"| {' | '.join(_cell(text) for text in cells)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _engines() -> Iterator[str]:
    for section, patterns in resume.FREE.items():
        besides = f", besides `{'`, `'.join(resume.OF_THE_MODEL)}`" if section == "router" else ""
        yield f"| {section} | `{'`, `'.join(patterns.split())}`{besides} |"


if __name__ == "__main__":
    PAGE.write_text(page())
