"""The table in ``docs/parallelism.md`` is what the renderer makes of measured rows: all of them, each within the
bound."""

import re

from bench import layouts, layouts_page


def committed() -> list[dict]:
    """The rows that the page shows."""
    found = []
    for line in layouts_page.split(layouts_page.PAGE.read_text())[1].splitlines()[2:]:
        layout, ranks, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for model, cell in zip(layouts.MODELS, cells, strict=True):
            if cell != "-":
                shown = re.fullmatch(r"(\w+): (\S+), (\d+) s", cell)
                assert shown, cell
                row = {"layout": layout, "ranks": int(ranks), "model": model, "estimator": shown[1]}
                found.append(row | {"max_rel_diff": float(shown[2]), "seconds": float(shown[3])})
    return found


def test_the_page_is_what_the_renderer_makes_of_its_rows():
    table = layouts_page.split(layouts_page.PAGE.read_text())[1]
    assert layouts_page.render(committed()) == table, "python -m bench.layouts_page writes it again"


def test_the_page_has_every_row_and_each_is_within_the_bound():
    shown = committed()
    wanted = list(layouts.cases())
    assert len(shown) == len(wanted) and all(case.is_in(shown) for case in wanted), "make layouts, then the page"
    assert all(row["max_rel_diff"] <= layouts.BOUND for row in shown)
    assert {(row["layout"], row["ranks"]) for row in shown} == {(case.name, case.ranks) for case in wanted}


def test_every_layout_of_four_has_one_of_eight_with_data_parallel_ranks_and_every_estimator_has_rows():
    assert {f"{name}_dp2" for name in layouts.OF_FOUR} < set(layouts.OF_EIGHT)
    assert all(layouts.DISTRIBUTED[0] in layouts.OF_EIGHT[f"{name}_dp2"] for name in layouts.OF_FOUR)
    assert {case.estimator for case in layouts.cases()} == set(layouts.ESTIMATORS)


def test_jobs_come_behind_those_that_they_need():
    case = layouts.Case("pp4", "dense", "grpo", saved="tp4")
    assert layouts.jobs([case, layouts.Case("cp4", "dense", "grpo")]) == [
        "single:dense_grpo@saving",
        "tp4:dense_grpo@saving",
        "pp4:dense_grpo@tp4",
        "single:dense_grpo",
        "cp4:dense_grpo",
    ]
    assert case.name == "tp4 -> pp4" and case.ranks == 4


def test_the_largest_relative_difference_is_of_metrics_and_weights():
    def rank(loss: float, norm: float, gap: float) -> dict:
        return {"metrics": [{"loss": 1.0, "grad_norm": 2.0}, {"loss": loss, "grad_norm": norm}], "weights_gap": gap}

    alone = [rank(-0.5, 4.0, 0.0)]
    others = {"metrics": None, "weights_gap": 0.0}
    assert layouts.max_rel_diff([rank(-0.5, 4.0, 0.0), others], alone) == 0
    assert layouts.max_rel_diff([rank(-0.5, 4.0, 0.25), others], alone) == 0.25
    assert layouts.max_rel_diff([rank(-0.75, 4.0, 0.25), others], alone) == 0.5
    assert layouts.max_rel_diff([others | {"weights_gap": 2.0}, rank(-0.75, 8.0, 0.25)], alone) == 2
