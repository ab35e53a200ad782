"""The table of layouts in ``docs/parallelism.md`` from the rows that ``make layouts`` measures.

``python -m bench.layouts_page`` writes it again from ``runs/layouts.json``, without measuring.
"""

import pathlib
from collections.abc import Sequence

from bench import layouts

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "parallelism.md"
BEGIN = "<!-- make layouts: begin -->\n"
END = "<!-- make layouts: end -->\n"
HEAD = f"| layout | ranks | {' | '.join(layouts.MODELS)} |\n|{'---|' * (2 + len(layouts.MODELS))}\n"


def render(rows: Sequence[layouts.Row]) -> str:
    """A line a layout, a column a model: the estimator, the largest relative difference, the seconds."""
    lines = []
    for case in {case.name: case for case in layouts.cases()}.values():
        cells = {row["model"]: _cell(row) for row in rows if row["layout"] == case.name}
        if cells:
            lines.append(f"| {case.name} | {case.ranks} | {' | '.join(cells.get(m, '-') for m in layouts.MODELS)} |\n")
    return HEAD + "".join(lines)


def _cell(row: layouts.Row) -> str:
    return f"{row['estimator']}: {row['max_rel_diff']:.0e}, {row['seconds']:.0f} s".replace("e-0", "e-")


def split(page: str) -> tuple[str, str, str]:
    """The page before the table, the table, and the page behind it."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    return before + BEGIN, table, END + after


def main() -> None:
    before, _, after = split(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + render(layouts.read()) + after, encoding="utf-8")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
