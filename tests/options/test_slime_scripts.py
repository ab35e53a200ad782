"""slime's own launch scripts: which pass as they are, and that the others are refused for what is not there, by name.

``bench/slime_scripts.json`` holds the options of 45 scripts of slime's ``scripts/`` and ``examples/`` as one would type
them, with paths replaced.
"""

import pytest

from bench.scripts import SCRIPTS, Verdict, verdict
from slime_cli.options import layers, own
from slime_cli.options.managed import refusal
from slime_cli.options.not_yet import NOT_YET

PASS = """
examples/eval_multi_task_multi_task.sh
examples/fully_async_run-qwen2.5-0.5B-fully_async.sh
examples/multi_agent_run-qwen3-30B-A3B-multi-agent.sh
examples/on_policy_distillation_run-qwen3-8B-opd-megatron.sh
examples/on_policy_distillation_run-qwen3-8B-opd.sh
examples/retool_retool_qwen3_4b_rl.sh
examples/retool_retool_qwen3_4b_sft.sh
examples/search-r1_run_qwen2.5_3B.sh
examples/strands_sglang_strands_qwen3_8b.sh
examples/tau-bench_run_qwen3_4B.sh
examples/train_infer_mismatch_helper_run-qwen3-4b-mis.sh
scripts/low_precision_run-kimi-k2-Thinking-int4.sh
scripts/low_precision_run-moonlight-16B-A3B-int4.sh
scripts/low_precision_run-qwen3-235B-A22B-int4.sh
scripts/low_precision_run-qwen3-30B-A3B-int4.sh
scripts/low_precision_run-qwen3-30b-a3b-fp8.sh
scripts/low_precision_run-qwen3-4b-fp8.sh
scripts/run-deepseek-r1.sh
scripts/run-glm4.7-355B-A32B.sh
scripts/run-kimi-k2-Instruct.sh
scripts/run-kimi-k2-Thinking.sh
scripts/run-moonlight-16B-A3B.sh
scripts/run-qwen2.5-0.5B-gb10-smoke.sh
scripts/run-qwen2.5-0.5B-reproducibility.sh
scripts/run-qwen3-235B-A22B-sft.sh
scripts/run-qwen3-235B-A22B.sh
scripts/run-qwen3-30B-A3B.sh
scripts/run-qwen3-32B.sh
scripts/run-qwen3-4B-amd.sh
scripts/run-qwen3-4B-base-sft.sh
scripts/run-qwen3-4B.sh
""".split()
REASONS = {
    "--use-gated-attention": "Qwen3-Next, Qwen3.5, Qwen3.6",
    "--spec": "which is not trained here",
    "--post-self-attn-layernorm": "dense GLM-4",
    "--post-mlp-layernorm": "dense GLM-4",
    "--allgather-cp": "GLM-5",
    "--multimodal-keys": "only text is trained",
    "--sglang-config": "put the options in a profile",
    "--prefill-num-servers": "all engines of a run are alike",
    "--data-pad-size-multiplier": "--max-tokens-per-gpu bounds a micro-batch",
    "--num-layers": "is not a multiple of --pipeline-model-parallel-size",
    "": "cannot be split into expert tensor 1 x expert 8 x pipeline 2",
    "--update-weight": "",
}
"""Beginning of an option -> words of the reason why it is refused: a model or a feature that is not there. Megatron
cannot lay out two of the scripts either."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, Verdict]:
    folder = tmp_path_factory.mktemp("scripts")
    return {name: verdict(name, folder) for name in SCRIPTS}


def test_these_scripts_pass_as_they_are(verdicts):
    assert {*PASS} <= {name for name, found in verdicts.items() if found.passes}
    assert len(SCRIPTS) == 45


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - set(PASS)))
def test_a_refused_script_is_refused_for_what_is_not_there_by_name(verdicts, name):
    for cause in verdicts[name].refused:
        option = cause["option"]
        begun = "--update-weight" if option.startswith("--update-weight") else option
        assert REASONS[begun] in cause["why"], cause
        assert "unknown option" not in cause["why"] and "did you mean" not in cause["why"]


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
    assert own.by_dest()["update_weight_transport"].default == "disk"
