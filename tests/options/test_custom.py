"""--custom-config-path: its keys are attributes of args; one that is an option is that option, for slime too."""

import pathlib

import pytest

from slime_cli.errors import UsageError
from slime_cli.options import resume
from slime_cli.options.resolve import Resolved, args_namespace, resolve
from slime_cli.training.settings import Settings

TEXT = """
max_turns: 3
rate: 1e-6
judge: {url: "http://h:1", tries: [1, 2]}
nothing:
word: on
use_tis: true
tis_mode: mask
grpo_std_normalization: false
clip_grad: 0.5
"""


def given(tmp_path: pathlib.Path, text: str, more: str = "", profiles: tuple[str, ...] = ()) -> Resolved:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return resolve(f"--custom-config-path {path} {more}".split(), profiles)


def test_what_is_no_option_is_for_users_functions(tmp_path: pathlib.Path):
    found = given(tmp_path, TEXT)
    args = args_namespace(found)
    assert (args.max_turns, args.rate, args.nothing, args.word) == (3, 1e-6, None, "on")
    assert args.judge == {"url": "http://h:1", "tries": [1, 2]}
    import argparse

    of_trainer = Settings.from_options(found.slime, found.custom).for_users(argparse.Namespace(lr=1))
    assert (of_trainer.max_turns, of_trainer.tis_mode, of_trainer.lr) == (3, "mask", 1)


def test_what_is_an_option_holds_for_slime_too(tmp_path: pathlib.Path):
    found = given(tmp_path, TEXT)
    assert found.slime.use_tis and found.slime.tis_mode == "mask" and not found.slime.grpo_std_normalization
    assert found.megatron["clip_grad"] == 0.5 and found.origins["megatron.clip_grad"] == "custom config"
    assert args_namespace(found).clip_grad == 0.5


def test_it_holds_over_a_flag_with_a_warning(tmp_path: pathlib.Path):
    found = given(tmp_path, "tis_mode: mask\nuse_tis: true\nlr: 2.0", "--tis-mode clip --use-tis --lr 1")
    assert found.slime.tis_mode == "mask" and found.megatron["lr"] == 2.0
    path = tmp_path / "mine.yaml"
    assert found.warnings == (
        f"--tis-mode is clip on the command line, and mask in {path}, which holds",
        f"--lr is 1.0 on the command line, and 2.0 in {path}, which holds",
    )


def test_a_phase_does_not_take_it_back(tmp_path: pathlib.Path):
    (tmp_path / "two.yaml").write_text("phases:\n- {name: a, slime: {tis_mode: clip, tis_clip: 3}}\n- {name: b}\n")
    found = given(tmp_path, TEXT, "", (str(tmp_path / "two.yaml"),))
    one = found.for_phase(0)
    assert (one.slime.tis_mode, one.slime.tis_clip, one.custom["max_turns"]) == ("mask", 3.0, 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "must be a map"),
        ("a-b: 1", "'a-b' cannot be an attribute of args"),
        ("tis_mode: sideways", "tis_mode got 'sideways'"),
        ("use_tis: 3", "use_tis is true or false, got 3"),
        ("train_iters: 3", "train-iters is set by slime"),
        ("a: 1\na: 2", "`a` is there twice"),
        ("custom_config_path: x", "a file cannot name another one"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: pathlib.Path, text: str, said: str):
    with pytest.raises(UsageError) as caught:
        given(tmp_path, text)
    assert said.replace("train-iters", "") in caught.value.message.replace("train_iters", "").replace("train-iters", "")
    assert "--custom-config-path" in caught.value.message


def test_it_is_recorded_and_a_resume_says_what_changed(tmp_path: pathlib.Path):
    before = resume.recorded(given(tmp_path, "max_turns: 3"))
    after = resume.recorded(given(tmp_path, "max_turns: 4"))
    (change,) = resume.changes(before, after)
    assert str(change) == "--custom-config-path: max_turns was 3, now 4" and resume.free(change.section, change.dest)
    assert resume.changes({name: value for name, value in before.items() if name != "custom"}, before)


def test_a_file_that_is_not_there_is_for_the_run_to_refuse():
    assert resolve("--custom-config-path /no/such.yaml".split()).custom == {}
