"""``docs/conversions.md`` is what the renderer makes of measured rows, and leaves no family out."""

from bench import conversions, conversions_page

LAYOUTS = ["single", "tp2", "ep2"]


def row(
    family: str, layout: str, logits: float | None = None, gradient: float | None = None, why_not: str | None = None
) -> dict:
    out = {
        "family": family,
        "architecture": f"{family}ForCausalLM",
        "layout": layout,
        "exact": why_not is None,
        "why_not": why_not,
    }
    return out | {"logits_max_diff": logits, "gradient_max_relative_diff": gradient}


ROWS = [
    row("Dense", "single", 1.9e-6, 8.8e-7),
    row("Dense", "tp2", 2.4e-6),
    row("Moe", "single", 0.0, 3e-6),
    row("Moe", "tp2", 1e-6, 2e-6, why_not="3 of 9 tensors differ, the first: a.b"),
    row("Moe", "ep2", why_not="EngineError: it stopped (trainer.py:12)\nTraceback"),
    row("Odd", "single", why_not="UsageError: attention variant odd: not here (model.py:27)"),
    row("Odd", "tp2", why_not="UsageError: attention variant odd: not here (model.py:27)"),
]


def test_a_row_a_family_and_a_line_a_reason():
    page = conversions_page.render(ROWS, LAYOUTS)
    assert [line for line in page.splitlines() if line.startswith("|")] == [
        "| family | architecture | back | single | tp2 | ep2 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| Dense | `DenseForCausalLM` | exact | 2e-6 / 9e-7 | 2e-6 / - | n/a |",
        "| Moe | `MoeForCausalLM` | **differs** | 0 / 3e-6 | **1e-6 / 2e-6** | **no** |",
    ]
    assert [line for line in page.splitlines() if line.startswith("- **")] == [
        "- **Moe** (`MoeForCausalLM`; tp2): 3 of 9 tensors differ, the first: a.b.",
        "- **Moe** (`MoeForCausalLM`; ep2): EngineError: it stopped.",
        "- **Odd** (`OddForCausalLM`): attention variant odd: not here.",
    ]


def test_nothing_refused_needs_no_list_of_refusals():
    page = conversions_page.render(ROWS[:2], LAYOUTS)
    assert page.endswith(conversions_page.NOTES) and "refused" not in page


def test_the_committed_page_has_the_renderers_words_and_every_family(tmp_path):
    committed = conversions_page.PAGE.read_text()
    conversions_page.write(ROWS, list(conversions.LAYOUTS), tmp_path / "docs" / "page.md")
    frame = [
        line
        for line in (tmp_path / "docs" / "page.md").read_text().splitlines()
        if not line.startswith(("- **", "| Dense", "| Moe"))
    ]
    left = [line for line in committed.splitlines() if line in frame]
    assert left == frame, "make conversions, or python -m bench.conversions_page, writes it again"
    named = {line.split(" | ")[0].removeprefix("| ") for line in committed.splitlines() if line.startswith("| ")}
    named |= {line.split("**")[1] for line in committed.splitlines() if line.startswith("- **")}
    assert set(conversions.FAMILIES) <= named


def test_the_committed_page_says_of_no_supported_family_that_it_differs():
    committed = conversions_page.PAGE.read_text()
    assert "**differs**" not in committed and "**no**" not in committed
