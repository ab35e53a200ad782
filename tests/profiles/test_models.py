"""The shipped model profiles say what is derived from their models' configs, and add up to the published parameter
counts."""

import importlib.util
import pathlib

import pytest

from bench import scripts
from slime_cli.models import architecture
from slime_cli.options import catalogue, profiles
from slime_cli.options.resolve import resolve

path = pathlib.Path(__file__).parents[2] / "ci" / "model_profiles.py"
spec = importlib.util.spec_from_file_location("model_profiles", path)
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)


def args(name: str) -> dict:
    return architecture.megatron_args(table.MODELS[name][1])


def test_the_files_are_those_that_the_script_writes():
    found = {file.stem: file.read_text() for file in (profiles.FOLDER / "models").glob("*.yaml")}
    assert found == {name: table.text(name) for name in table.MODELS}, "run ci/model_profiles.py"


def test_the_page_has_the_table_of_the_files():
    page = table.PAGE.read_text()
    assert table.page(page) == page, "run ci/model_profiles.py"
    assert all(f"| `{name}` |" in page for name in profiles.available()["models"])


@pytest.mark.parametrize("name", table.MODELS)
def test_a_profile_is_read_as_what_is_derived(name):
    defaults = {dest: options[0].default for dest, options in catalogue.load("megatron").by_dest.items()}
    read = {dest: value for (section, dest), value in profiles.load(name).layer.items() if section == "megatron"}
    assert defaults | read == defaults | args(name)


@pytest.mark.parametrize("name", table.MODELS)
def test_a_profile_agrees_with_its_checkpoint(name):
    architecture.check_given(args(name), resolve([], [name]).megatron, "the checkpoint")


PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-3b": 3_212_749_824,
    "deepseek-v3": 671_026_419_200,
}
"""As their safetensors count them."""
ROUNDED = {
    "glm4.5-106b-a12b": 106e9,
    "glm4.5-355b-a32b": 353e9,
    "glm4.7-30b-a3b": 30e9,
    "kimi-k2": 1.03e12,
    "kimi-k2-thinking": 1.03e12,
    "moonlight": 16e9,
    "qwen3-next-80b-a3b": 79.7e9,
    "qwen3.5-9b": 9e9,
    "qwen3.5-27b": 27e9,
    "qwen3.5-35b-a3b": 34.7e9,
    "glm4-9b": 9.4e9,
    "minimax-m2": 228.7e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    assert table.parameters(args(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_about_as_many_as_published(name):
    assert table.parameters(args(name)) == pytest.approx(ROUNDED[name], rel=0.02)


SCRIPTS = {
    "scripts/run-glm4-9B.sh": "glm4-9b",
    "scripts/run-minimax-m2.sh": "minimax-m2",
    "scripts/run-mimo-7B-rl-eagle.sh": "mimo-7b-rl",
    "scripts/run-qwen3-next-80B-A3B.sh": "qwen3-next-80b-a3b",
    "scripts/run-qwen3.5-27B.sh": "qwen3.5-27b",
    "scripts/run-qwen3.5-35B-A3B-sft.sh": "qwen3.5-35b-a3b",
    "examples/fully_async_run-qwen3.5-9B-fully_async.sh": "qwen3.5-9b",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_launch_script_of_slime_makes_the_model_that_its_config_says(script, tmp_path):
    """A dry run has no checkpoint to compare with; a run has."""
    argv = scripts.with_stand_ins(scripts.SCRIPTS[script], tmp_path)
    architecture.check_given(args(SCRIPTS[script]), resolve([*argv, "--run-dir", str(tmp_path)]).megatron, script)
