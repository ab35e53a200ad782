"""Writes the table of ``docs/adaptations.md`` from :mod:`slime_cli.hardware.adaptations`; a test holds the page to it.

``python ci/adaptations_page.py``. Where each adaptation is made is read from the code.
"""

import ast
import pathlib

from slime_cli.hardware import adaptations

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / adaptations.PAGE
BEGIN, END = (
    "<!-- the table below is written by ci/adaptations_page.py -->",
    "<!-- the table above is written by ci/adaptations_page.py -->",
)


def uses() -> dict[str, list[str]]:
    """Name of an adaptation -> ``file: function`` of every place that makes it."""
    out: dict[str, list[str]] = {name: [] for name in adaptations.ALL}
    for path in sorted((ROOT / "slime_cli").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for part in tree.body:
            for node in ast.walk(part):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "adaptations":
                    place = f"`{path.relative_to(ROOT / 'slime_cli')}`: {getattr(part, 'name', 'the module')}"
                    if node.attr in out and place not in out[node.attr]:
                        out[node.attr].append(place)
    return out


def table() -> str:
    lines = ["| library | version | what | why | on | where | test |", "|---|---|---|---|---|---|---|"]
    places = uses()
    for name, one in adaptations.ALL.items():
        where = "<br>".join(places[name])
        cells = [one.library, one.version, one.what, one.why, one.devices, where, f"`{one.test}`"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(old: str) -> str:
    """``old`` with the table between the two marks as it should be."""
    before, rest = old.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{len(adaptations.ALL)} adaptations in {PAGE}")


if __name__ == "__main__":
    main()
