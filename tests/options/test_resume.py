"""What a resumed run may have otherwise.

1. What says how much, how fast, where and until when may change; data, model and algorithm may not.
2. A change is told by the flag that makes it.
3. What is recorded compares equal to itself after JSON, and to what an older slime recorded.
"""

import fnmatch
import json

import pytest

from slime_cli.errors import UsageError
from slime_cli.options import catalogue, own, resume
from slime_cli.options.managed import refusal
from slime_cli.options.resolve import resolve

BASE = "--hf-checkpoint h --prompt-data p --num-rollout 3 --rollout-batch-size 8 --rm-type math --load l"


def changes(before: str, now: str, profiles=((), ())) -> list[resume.Change]:
    old, new = (resolve(f"{BASE} {words}".split(), of) for words, of in zip((before, now), profiles, strict=True))
    return resume.changes(json.loads(json.dumps(resume.recorded(old))), resume.recorded(new))


def refused(found: list[resume.Change]) -> list[str]:
    return [change.dest for change in found if not resume.free(change.section, change.dest)]


@pytest.mark.parametrize(
    "words",
    [
        "--num-rollout 4",
        "--save-interval 2 --eval-interval 2 --eval-prompt-data e --update-weights-interval 2 --keep-checkpoints 1",
        "--rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 --colocate --sglang-server-concurrency 9",
        "--rm-timeout 3 --opd-teacher-timeout 9 --rm-workers 7 --rm-url http://h:1/x",
        "--sglang-mem-fraction-static 0.5 --sglang-log-level debug --sglang-watchdog-timeout 9 --sglang-pp-size 2",
        "--router-policy random --router-request-timeout-secs 9 --router-log-level info",
        "--use-dynamic-batch-size --max-tokens-per-gpu 99 --micro-batch-size 2 --recompute-granularity full",
        "--rollout-endpoint e.json --trace off --run-dir elsewhere --distributed-timeout-minutes 9",
        "--on-bad-row skip --on-nan-gradient skip --oversize drop --max-logprob-diff inf",
    ],
)
def test_how_much_how_fast_and_where_may_change(words):
    found = changes("", words)
    assert found and set(refused(found)) <= {"eval_prompt_data"}


@pytest.mark.parametrize(
    ("words", "dests"),
    [
        ("--prompt-data q", ["prompt_data"]),
        ("--hf-checkpoint g", ["hf_checkpoint"]),
        ("--lr 1e-4 --weight-decay 0.1", ["lr", "weight_decay"]),
        ("--advantage-estimator gspo", ["advantage_estimator"]),
        ("--rollout-batch-size 4", ["rollout_batch_size", "global_batch_size"]),
        ("--sglang-dtype float32 --sglang-quantization fp8", ["dtype", "quantization"]),
        ("--rollout-temperature 0.5", ["eval_temperature", "rollout_temperature"]),
        ("--rollout-seed 1 --seed 5", ["rollout_seed", "seed"]),
        ("--router-chat-template t", ["chat_template"]),
        ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2", None),
    ],
)
def test_what_rewrites_the_past_may_not(words, dests):
    found = refused(changes("", words))
    assert found and (dests is None or sorted(found) == sorted(dests))


def test_nothing_changes_from_a_run_to_itself():
    words = '--value-clip inf --rollout-stop a b --apply-chat-template-kwargs {"a":1} --lr 1e-5 --use-tis --bf16'
    assert changes(words, words) == []


def test_a_change_is_told_by_its_flag():
    words = "--disable-rewards-normalization --num-rollout 9 --sglang-dp-size 2 --rollout-stop a b"
    assert sorted(map(str, changes("", words))) == [
        "--disable-rewards-normalization was not given, now given",
        "--num-rollout was 3, now 9",
        "--rollout-stop was not given, now a b",
        "--sglang-dp-size was not given, now 2",
    ]


def test_an_option_that_slime_had_not_yet_was_at_its_default():
    now = resume.recorded(resolve(BASE.split()))
    before = now | {"slime": {dest: value for dest, value in now["slime"].items() if dest != "schedule"}}
    assert resume.changes(before, now) == []
    new = ("eval_top_k", "eval_tool_key", "max_staleness")
    async_ = resume.recorded(resolve([*BASE.split(), "--schedule", "async"]))
    before = async_ | {"slime": {dest: value for dest, value in async_["slime"].items() if dest not in new}}
    assert resume.changes(before, async_) == [], "what follows from others is not a change"
    gone = now | {"slime": now["slime"] | {"of_an_older_slime": 1}}
    assert [str(change) for change in resume.changes(gone, now)] == ["--of-an-older-slime was 1, now not given"]


def profile(tmp_path, name: str, *phases: str) -> list[str]:
    (tmp_path / f"{name}.yaml").write_text("phases:\n" + "".join(f"- {{{phase}}}\n" for phase in phases))
    return [str(tmp_path / f"{name}.yaml")]


def test_phases_may_change_what_the_whole_run_may(tmp_path):
    one = profile(tmp_path, "one", "name: warm, slime: {num_rollout: 2}", "name: rl, slime: {save-interval: 2}")
    two = profile(tmp_path, "two", "name: warm, slime: {num-rollout: 5}", "name: rl, megatron: {lr: 1e-3}")
    found = changes("", "", (one, two))
    assert [(change.name, change.now) for change in found] == [
        ("phase warm: slime.num_rollout", 5),
        ("phase rl: slime.save_interval", None),
        ("phase rl: megatron.lr", 0.001),
    ]
    assert refused(found) == ["lr"] and str(found[2]) == "phase rl: --lr was not given, now 0.001"
    assert changes("", "", (one, one)) == []


def test_phases_may_not_come_or_go(tmp_path):
    one = profile(tmp_path, "one", "name: warm", "name: rl")
    with pytest.raises(UsageError, match="phases were warm, rl, now they are none"):
        changes("", "", (one, ()))


@pytest.mark.parametrize("section", ["megatron", "sglang"])
def test_every_pattern_is_of_some_option_that_users_may_give(section):
    known = [option.dest for option in catalogue.load(section).options if not refusal(section, option.dest)]
    idle = [p for p in resume.FREE[section].split() if not fnmatch.filter(known, p)]
    assert not idle


def test_of_slimes_own_no_option_of_data_model_or_algorithm_is_free():
    bound = {option.dest for option in own.OPTIONS if option.group in ("data", "training", "algorithm")}
    free = {dest for dest in bound if resume.free("slime", dest)}
    assert free == {"on_bad_row", "on_nan_gradient"}, "what a run does about a failure"
