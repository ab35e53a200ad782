"""make scripts: what is refused of a script is found whole, also what stands behind it, and files are stood in for."""

import pathlib

from bench import scripts
from slime_cli.errors import UsageError, together

SOUND = "--hf-checkpoint DIR/m --prompt-data DIR/p.jsonl --num-rollout 3 --rollout-batch-size 8 --rm-type math".split()


def test_a_script_is_tried_again_without_what_was_refused(tmp_path, monkeypatch):
    bad = [*SOUND, "--n-samples-per-prompt", "4", "--nonsense", "1", "--ref-ckpt-step", "3", "--eps-clip", "7"]
    monkeypatch.setitem(scripts.SCRIPTS, "bad.sh", bad)
    found = scripts.verdict("bad.sh", tmp_path)
    assert [cause["option"] for cause in found.refused] == ["--nonsense", "--ref-ckpt-step", "--eps-clip"]
    assert not found.passes and found.options == 9
    monkeypatch.setitem(scripts.SCRIPTS, "good.sh", [*SOUND, "--n-samples-per-prompt", "4"])
    assert scripts.verdict("good.sh", tmp_path).passes


def test_causes_are_counted_by_scripts():
    verdicts = [scripts.Verdict(name, 1, False, [{"option": "--x", "why": "x"}]) for name in "ab"]
    verdicts.append(scripts.Verdict("c", 1, False, [{"option": "--y", "why": "y"}, {"option": "--x", "why": "x"}]))
    assert scripts.by_cause(verdicts) == [("x", ["a", "b", "c"]), ("y", ["c"])]


def test_data_and_yaml_files_are_stood_in_for(tmp_path):
    argv = "--prompt-data DIR/a.parquet --eval-prompt-data one /x two /y --custom-config-path c.yaml --save DIR/s"
    found = scripts.with_stand_ins(argv.split(), tmp_path)
    rows = f"{tmp_path}/rows.jsonl"
    yaml = f"{tmp_path}/custom-config-path.yaml"
    assert (
        found
        == f"--prompt-data {rows} --eval-prompt-data one {rows} two {rows} --custom-config-path {yaml}".split()
        + [
            "--save",
            f"{tmp_path}/s",
        ]
    )
    assert pathlib.Path(rows).exists() and pathlib.Path(yaml).exists()
    assert scripts.with_stand_ins(["--eval-prompt-data", "/x"], tmp_path)[1] == rows


def test_an_error_that_lists_others_keeps_them():
    one, two, three = (UsageError(text) for text in "abc")
    assert together([together([one, two], "x"), three], "y").parts == (one, two, three)
    assert one.parts == (one,)
