"""slime's own launch scripts: which pass as they are, and that the others are refused for what is not there, by name.

``bench/slime_scripts.json`` holds the options of 45 scripts of slime's ``scripts/`` and ``examples/`` as one would type
them, with paths replaced. Only options are looked at here, nothing on disk.
"""

import pytest

from bench.scripts import SCRIPTS, without
from slime_cli.errors import UsageError
from slime_cli.options import layers, own
from slime_cli.options.checks import check
from slime_cli.options.managed import refusal
from slime_cli.options.not_yet import NOT_YET
from slime_cli.options.resolve import resolve

PASS = """
examples/on_policy_distillation_run-qwen3-8B-opd-megatron.sh
examples/search-r1_run_qwen2.5_3B.sh
scripts/low_precision_run-moonlight-16B-A3B-int4.sh
scripts/low_precision_run-qwen3-235B-A22B-int4.sh
scripts/low_precision_run-qwen3-30B-A3B-int4.sh
scripts/low_precision_run-qwen3-30b-a3b-fp8.sh
scripts/low_precision_run-qwen3-4b-fp8.sh
scripts/run-deepseek-r1.sh
scripts/run-glm4.7-355B-A32B.sh
scripts/run-moonlight-16B-A3B.sh
scripts/run-qwen2.5-0.5B-gb10-smoke.sh
scripts/run-qwen3-235B-A22B-sft.sh
scripts/run-qwen3-30B-A3B.sh
scripts/run-qwen3-32B.sh
scripts/run-qwen3-4B-amd.sh
scripts/run-qwen3-4B-base-sft.sh
scripts/run-qwen3-4B.sh
""".split()
REFUSED = {
    "--wandb-project": "a tracker; Megatron has an option of that name, which nothing reads here",
    "--sglang-config": "groups of engines with options of their own; SGLang's option of that name is a file",
    "--rollout-function-path": "a function for a whole rollout, as the fully asynchronous one",
    "--custom-reward-post-process-path": "slime's own function that adds a teacher's part: --use-opd does",
}
"""Options that are there in another meaning, or for other values only -> what the scripts want of them."""
CONTRADICT = {
    "examples/delta_weight_sync_run-glm4.7-30B-A3B-delta.sh": "--num-layers 47 is not a multiple of --pipeline-model",
    "scripts/run-glm4.7-30B-A3B.sh": "8 trainer ranks cannot be split into expert tensor 1 x expert 8 x pipeline 2",
    "examples/eval_multi_task_multi_task.sh": "--eval-interval without --eval-prompt-data",
}
"""Scripts that are refused without those options too -> what is said. Megatron cannot lay out the first two either; the
third has its sets in the file that it names with ``--eval-config``."""


def verdict(argv: list[str]) -> str:
    """What the options are refused with; an empty string when they pass."""
    try:
        check(resolve(argv))
    except UsageError as error:
        return f"{error.message} | {error.fix}"
    return ""


def test_these_scripts_pass_as_they_are():
    assert [name for name, argv in SCRIPTS.items() if not verdict(argv)] == PASS
    assert len(SCRIPTS) == 45


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - set(PASS)))
def test_a_refused_script_is_refused_for_options_that_are_not_there(name):
    said = verdict(SCRIPTS[name])
    lacking = {word for word in SCRIPTS[name] if word in NOT_YET or word in REFUSED or word.startswith("--wandb-")}
    assert lacking and all(flag in said for flag in lacking & NOT_YET.keys()), said
    assert "unknown option" not in said and "did you mean" not in said
    left = verdict(without(SCRIPTS[name], lacking))
    assert left.startswith(CONTRADICT[name]) if name in CONTRADICT else not left


def test_what_is_not_there_is_no_option_and_says_what_is():
    for flag, instead in NOT_YET.items():
        assert layers.find(flag) is None, f"{flag} is there: take it out of NOT_YET"
        assert len(instead) > 10
        assert [word for word in instead.split() if word.startswith("--") and "*" not in word and not known(word)] == []


def known(flag: str) -> bool:
    if flag.startswith("--help"):
        return True
    found = layers.find(flag.rstrip(",:;."))
    return found is not None and not refusal(found[0], found[1].dest)


def test_the_defaults_that_differ_in_substance():
    """Also said in docs/troubleshooting.md."""
    assert own.by_dest()["actor_num_gpus_per_node"].default == 1
