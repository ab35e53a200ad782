"""The paths of a run: numbered names go both ways, and no phase can take a name that the run needs."""

import pytest

from slime_cli.manifests import layout


@pytest.mark.parametrize("step", [0, 7, 999_999, 1_000_000, 12_345_678])
def test_a_versions_name_tells_its_step(step):
    assert layout.step_of(layout.version_name(step)) == step
    assert layout.version("RUN", step).name == layout.version_name(step)


@pytest.mark.parametrize("name", [None, "", "default", "by-hand", "v1", "v00001", "v000001x", "xv000001", "v-00001"])
def test_other_names_have_no_step(name):
    assert layout.step_of(name) is None


def test_versions_are_listed_by_step_also_past_six_digits(tmp_path):
    for step in (1_000_000, 2, 999_999):
        layout.version(tmp_path, step).mkdir(parents=True)
    (tmp_path / layout.WEIGHTS / "vaguely").mkdir()
    assert [layout.step_of(path.name) for path in layout.versions(tmp_path)] == [2, 999_999, 1_000_000]


def test_a_folder_without_any_lists_none(tmp_path):
    assert layout.versions(tmp_path) == layout.rollouts(tmp_path) == layout.evaluations(tmp_path) == []


def test_numbered_folders_are_where_users_look_for_them():
    paths = [layout.rollout("R", 12), layout.evaluation("R", 3), layout.checkpoint("R/checkpoints", 40)]
    assert [str(path) for path in [*paths, layout.version("R", 12)]] == [
        "R/rollouts/000012",
        "R/eval/000003.json",
        "R/checkpoints/iter_0000040",
        "R/weights/v000012",
    ]


def test_only_numbered_names_are_listed_and_by_number(tmp_path):
    for rollout_id in (1_000_000, 0, 999_999):
        layout.rollout(tmp_path, rollout_id).mkdir(parents=True)
    (tmp_path / layout.ROLLOUTS / "000001.part").mkdir()
    assert [int(path.name) for path in layout.rollouts(tmp_path)] == [0, 999_999, 1_000_000]
