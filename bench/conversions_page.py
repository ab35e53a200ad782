"""``docs/conversions.md`` from the rows that ``make conversions`` measures; imports nothing heavy.

``python -m bench.conversions_page`` writes it again from ``runs/conversions.json``, without measuring.
"""

import json
import pathlib
import re
from typing import Any

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "conversions.md"
MEASURED = pathlib.Path("runs") / "conversions.json"
Row = dict[str, Any]

HEAD = """\
# Conversions

Hugging Face -> Megatron `torch_dist` -> Hugging Face, for every model family and several parallel layouts. This page
is written by `make conversions`, which measures every figure on it, on a CPU and with tiny random checkpoints.

A row is a family, a column a layout: `tp` tensor, `pp` pipeline, `ep` expert parallel ranks. Each cell is made so:

1. transformers makes a checkpoint with random weights; its norms are not ones, so a norm in another's place shows.
2. `slime convert hf-to-dist` writes it as a Megatron checkpoint from all ranks of the layout, `slime convert
   dist-to-hf` reads that on one. **exact**: every tensor came back with the same name, dtype and bytes.
3. Megatron loads the checkpoint in the layout and runs six sequences of 1 to 17 tokens in one pack; transformers runs
   each alone. The first figure is the largest difference of any logit, the second that of the embedding's gradient,
   relative to its largest entry.

All of it is float32, where a few 1e-6 is rounding; `make test` holds three of the families to 2e-5 and 5e-5. Nothing
here says anything of bfloat16, of Transformer Engine's layers, or of a published checkpoint's size.
"""
NOTES = """\
`n/a`: expert parallelism of a model without experts. A gradient `-` is one that no rank has whole: a tied embedding's
is summed over the first and the last pipeline stage by the optimizer's step, which is not taken here.

MiMo, DeepSeek-V3, GLM-4.5, GLM-4.7-Flash, Qwen3-Next and Qwen3.5 are converted with their multi-token-prediction (MTP)
layer here (`--mtp-num-layers 1`). Without that option `dist-to-hf` takes its weights from the original model, or leaves
them out where those are quantised. The original that it gets here has zeros in place of all weights, so nothing is
copied.
"""


def render(rows: list[Row], layouts: list[str]) -> str:
    """The whole page. ``rows`` as :func:`bench.conversions.case` gives them; families in the order in which they
    come."""
    families = {row["family"]: [r for r in rows if r["family"] == row["family"]] for row in rows}
    good = {family: found for family, found in families.items() if any(row["exact"] for row in found)}
    lines = [_line("family", "architecture", "back", *layouts), _line(*["---"] * (3 + len(layouts)))]
    for family, found in good.items():
        cells = {row["layout"]: _cell(row) for row in found}
        exact = "exact" if all(row["exact"] for row in found) else "**differs**"
        lines.append(
            _line(family, f"`{found[0]['architecture']}`", exact, *(cells.get(layout, "n/a") for layout in layouts))
        )
    problems = [line for family, found in families.items() for line in _problems(family, found)]
    out = [HEAD, "\n".join(lines) + "\n", NOTES]
    return "\n".join(out + ["## What is refused, or is not right\n", "\n".join(problems) + "\n"] if problems else out)


def write(rows: list[Row], layouts: list[str], path: pathlib.Path = PAGE) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(render(rows, layouts), encoding="utf-8")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(row: Row) -> str:
    if row["logits_max_diff"] is None:
        return "**no**"
    gaps = " / ".join(map(_rounded, (row["logits_max_diff"], row["gradient_max_relative_diff"])))
    return gaps if row["exact"] else f"**{gaps}**"


def _rounded(gap: float | None) -> str:
    """``3e-6``; ``-`` where nothing was compared."""
    return "-" if gap is None else f"{gap:.0e}".replace("e-0", "e-") if gap else "0"


def _problems(family: str, rows: list[Row]) -> list[str]:
    """A line for each reason of a family, with the layouts that gave it unless they are all."""
    reasons: dict[str, list[Row]] = {}
    for row in rows:
        if row["why_not"]:
            reasons.setdefault(_reason(row["why_not"]), []).append(row)
    out = []
    for why, found in reasons.items():
        some = "" if len(found) == len(rows) else "; " + ", ".join(row["layout"] for row in found)
        out.append(f"- **{family}** (`{rows[0]['architecture']}`{some}): {why}.")
    return out


def _reason(why_not: str) -> str:
    """The first line, without the kind of the exception and the place in our code."""
    return re.sub(
        r" \(\w+\.py:\d+\)$", "", why_not.splitlines()[0].removeprefix("UsageError: ").removeprefix("DataError: ")
    )


def main() -> None:
    from bench.conversions import LAYOUTS

    write(json.loads(MEASURED.read_text()), list(LAYOUTS))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
