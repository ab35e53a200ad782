"""Cross-checks: each contradiction is found, says its numbers and its fix; and the layout and estimate."""

import io

import pytest
from rich.console import Console

from slime_cli.errors import UsageError
from slime_cli.options.checks import check, layout
from slime_cli.options.memory import estimate
from slime_cli.options.render import render
from slime_cli.options.resolve import resolve

GOOD = (
    "--hf-checkpoint h --prompt-data p --num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4 --rm-type math"
)


def resolved(more: str = "", base: str = GOOD):
    return resolve(f"{base} {more}".split())


def test_a_sound_run_has_no_warnings():
    assert check(resolved()) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--global-batch-size 7", "8 x --n-samples-per-prompt 4 = 32 samples, but --global-batch-size 7"),
        ("--global-batch-size 8 --num-steps-per-rollout 2", "8 x --num-steps-per-rollout 2 = 16"),
        ("--actor-num-gpus-per-node 3 --tensor-model-parallel-size 2", "3 trainer ranks"),
        ("--actor-num-gpus-per-node 3", "--global-batch-size 32 is not a multiple of data parallel 3"),
        ("--use-dynamic-batch-size", "needs --max-tokens-per-gpu"),
        ("--max-tokens-per-gpu 5", "add --use-dynamic-batch-size"),
        ("--balance-data", "--balance-data has no effect with data parallel 1"),
        ("--balance-by-flops", "--balance-by-flops has no effect | add --use-dynamic-batch-size"),
        ("--kl-loss-coef 0.1", "--kl-loss-coef has no effect"),
        ("--rollout-temperature 0", "--rollout-temperature is 0.0"),
        ("--rollout-temperature nan", "--rollout-temperature is nan"),
        ("--rollout-endpoint e --colocate", "exclude each other"),
        ("--rollout-endpoint e --sglang-dtype float32", "--sglang-dtype: no effect"),
        ("--sequence-parallel", "--sequence-parallel needs"),
        ("--eval-interval 2", "--eval-interval without --eval-prompt-data"),
        ("--eval-prompt-data a --eval-interval 2", "give pairs"),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "not a multiple of"),
        ("--rm-workers 0", "--rm-workers is 0"),
        ("--num-layers 3 --pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2", "--num-layers 3"),
        ("--bf16 --fp16", "--bf16 and --fp16"),
        ("--eps-clip-c 1", "above 1"),
        ("--kl-coef 0.1", "--kl-coef has no effect with --advantage-estimator grpo"),
        ("--advantage-estimator ppo --kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "both weigh the divergence"),
        ("--gamma 0.9", "--gamma has no effect with --advantage-estimator grpo | it is read by reinforce_plus_plus, ppo"),
        ("--advantage-estimator reinforce_plus_plus --lambd 0.9", "--lambd has no effect"),
        ("--megatron-config-path c.yaml", "--megatron-config-path has no effect"),
        ("--advantage-estimator cispo --eps-clip-c 3", "--eps-clip-c has no effect"),
        ("--tis-clip 3", "--tis-clip has no effect | add --use-tis"),
        ("--rs-veto-threshold 0.1", "add --use-rs"),
        ("--use-tis --tis-clip-low 3", "--tis-clip-low 3.0 and --tis-clip 2.0"),
        ("--use-tis --tis-mode truncate --tis-clip-low 0.1", "use --tis-mode clip"),
        ("--use-tis --use-rollout-logprobs", "their ratio is 1"),
        ("--use-opd", "--use-opd needs --opd-teacher-load or --opd-teacher-url"),
        ("--use-opd --opd-teacher-load a --opd-teacher-url b", "are two teachers"),
        ("--use-opd --opd-type megatron --opd-teacher-url b", "--opd-type megatron takes --opd-teacher-load, not --opd-teacher-url"),
        ("--use-opd --opd-type sglang --opd-teacher-load a --opd-teacher-url b", "takes --opd-teacher-url, not --opd-teacher-load |"),
        ("--use-opd --opd-teacher-url b --rollout-temperature 0.7", "at temperature 1, and would not compare"),
        ("--use-opd --opd-teacher-url b --opd-teacher-timeout 0", "above 0"),
        ("--opd-teacher-url b", "add --use-opd"),
        ("--use-top-p-replay", "nothing is cut"),
        ("--use-top-p-replay --rollout-top-p 0.9", "--rollout-top-k -1: it bounds the tokens"),
        ("--use-top-p-replay --rollout-top-k 5 --use-opd --opd-teacher-url u", "of the whole distribution"),
        ("--keep-old-actor", "no effect with --update-weights-interval 1"),
        ("--keep-old-actor --update-weights-interval 2 --use-rollout-logprobs", "which takes the engine's own numbers"),
        ("--update-weights-interval 0", "it must be at least 1"),
        ("--custom-tis-function-path a.b", "add --use-tis or --get-mismatch-metrics"),
        ("--use-routing-replay --use-rollout-routing-replay", "exclude each other"),
        ("--use-routing-replay --use-rollout-logprobs", "use --use-rollout-routing-replay"),
        ("--use-rollout-routing-replay --moe-router-fusion", "--moe-router-fusion leaves out"),
        ("--opd-kl-coef 2", "add --use-opd"),
        ("--loss-type custom_loss", "go together"),
        ("--use-unbiased-kl", "add --use-kl-loss"),
        ("--keep-checkpoints 0", "--keep-checkpoints is 0 | it must be at least 1"),
        ("--use-stateless-adam --optimizer sgd", "--use-stateless-adam with --optimizer sgd"),
        ("--use-stateless-adam --optimizer-cpu-offload", "--optimizer-cpu-offload is about moments"),
        ("--use-stateless-adam --reset-optimizer-states", "nothing to forget"),
        ("--async-save --optimizer-cpu-offload", "pinned memory"),
    ],
)
def test_contradictions(more, said):
    with pytest.raises(UsageError) as caught:
        check(resolved(more))
    assert said in f"{caught.value.message} | {caught.value.fix}"


def test_balance_goes_with_several_ranks_and_dynamic_batches():
    ranks = "--actor-num-gpus-per-node 4 --use-dynamic-batch-size --max-tokens-per-gpu 9"
    assert check(resolved(f"--balance-data --balance-by-flops {ranks}")) == []
    assert check(resolved("--balance-data=false")) == []


def test_all_contradictions_at_once():
    with pytest.raises(UsageError) as caught:
        check(resolve([]))
    for said in ("--hf-checkpoint", "--prompt-data", "--num-rollout", "--rollout-batch-size", "no reward"):
        assert said in caught.value.message


def test_one_sample_per_prompt_teaches_nothing_in_grpo():
    base = GOOD.replace("--n-samples-per-prompt 4", "")
    with pytest.raises(UsageError, match="nothing is learnt"):
        check(resolved(base=base))
    assert check(resolved("--disable-rewards-normalization", base)) == []


def test_reasoning_gym_brings_its_reward():
    assert check(resolved(base=GOOD.replace("--rm-type math", "").replace("data p", "data reasoning-gym:basic"))) == []


def test_warnings():
    assert "does not change the gradient" in check(resolved("--use-kl-loss"))[0]
    assert (
        "--oversize isolate applies"
        in check(resolved("--use-dynamic-batch-size --max-tokens-per-gpu 10 --rollout-max-response-len 20"))[0]
    )
    assert "must come with its own" in check(resolved(base=GOOD.replace("--rm-type math", "--custom-generate-function-path m.f")))[0]
    assert "cannot be resumed" in check(resolved("--no-save-optim"))[0]
    assert "none of them is the probability that a token was sampled with" in check(resolved("--rollout-top-p 0.9"))[0]
    assert check(resolved("--rollout-top-p 0.9 --rollout-top-k 50 --use-top-p-replay")) == []


def test_which_teacher_follows_from_what_is_given():
    assert resolved("--use-opd --opd-teacher-url u").slime["opd_type"] == "sglang"
    assert resolved("--use-opd --opd-teacher-load l").slime["opd_type"] == "megatron"
    assert check(resolved("--use-opd --opd-teacher-url u")) == check(resolved("--use-opd --opd-teacher-load l --rollout-temperature 0.7")) == []


def test_samples_of_older_weights_want_a_correction():
    assert "takes samples of older weights for the policy's own" in check(resolved("--update-weights-interval 2"))[0]
    for correction in ("--keep-old-actor", "--use-rollout-logprobs", "--use-tis"):
        assert check(resolved(f"--update-weights-interval 2 {correction}")) == []


def test_layout_counts_ranks_and_engines():
    found = layout(
        resolved(
            "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 "
            "--context-parallel-size 2 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2"
        )
    )
    assert found == {"tp": 2, "pp": 1, "cp": 2, "dp": 4, "ep": 1, "world_size": 16, "engine_tp": 2, "engines": 4}


def test_estimate_divides_by_the_layout():
    argv = f"{GOOD} --bf16 --use-distributed-optimizer --actor-num-gpus-per-node 4".split()
    one = estimate(resolve(argv, ["qwen3-0.6b"]))
    two = estimate(resolve([*argv, "--tensor-model-parallel-size", "2"], ["qwen3-0.6b"]))
    assert one["rank"]["weights"] == 2 * one["parameters"] and one["rank"]["gradients"] == 4 * one["parameters"]
    assert one["rank"]["optimizer"] == 3 * one["parameters"]
    assert two["rank"]["weights"] == pytest.approx(one["rank"]["weights"] / 2, rel=1e-3)
    assert estimate(resolve(argv)) is None


@pytest.mark.parametrize(
    ("profile", "billions"),
    [
        ("qwen3-0.6b", 0.596), ("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235.1), ("glm4.5-355b-a32b", 352.8), ("moonlight", 15.96),
        ("deepseek-v3", 671.0), ("kimi-k2", 1026.4), ("llama3.1-8b", 8.03), ("qwen2.5-7b", 7.61),
    ],
)  # fmt: skip
def test_parameters_are_those_that_the_models_are_known_by(profile, billions):
    assert estimate(resolve(GOOD.split(), [profile]))["parameters"] / 1e9 == pytest.approx(billions, rel=2e-3)


def test_options_that_follow_from_the_checkpoint_complete_the_estimate():
    derived = {"hidden_size": 8, "num_attention_heads": 2, "num_layers": 1, "vocab_size": 10, "ffn_hidden_size": 16, "swiglu": True}
    assert estimate(resolved(), derived)["parameters"] == 10 * 8 + 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8 + 8


def shown(found, memory, verbose=False) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(found, layout(found), memory, verbose))
    return console.file.getvalue()


def test_dry_run_shows_origins_layout_and_memory():
    found = resolve(f"{GOOD} --sglang-mem-fraction-static 0.5 --rollout-stop [/b]".split(), ["qwen3-4b"])
    text = shown(found, estimate(found))
    for said in (
        "--sglang-mem-fraction-static",
        "profile qwen3-4b",
        "derived",
        "[/b]",
        "data parallel",
        "4.02 billion",
    ):
        assert said in text
    assert "--rollout-seed" not in text and "--rollout-seed" in shown(found, None, verbose=True)
    assert "--disable-bias-linear" in text and "given" in text


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"megatron": {"tensor_model_parallel_size": 2}}, {}, "stage a and stage b differ in --tensor-model-parallel-size"),
        ({"slime": {"rm_timeout": 3}}, {}, "differ in --rm-timeout"),
        ({"sglang": {"dtype": "float32"}}, {}, "differ in SGLang's options"),
        ({"slime": {"use_rollout_routing_replay": True}}, {}, "differ in SGLang's options"),
    ],
)
def test_stages_share_what_is_made_once(tmp_path, first, second, said):
    import yaml

    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"stages": [{"name": "a"} | first, {"name": "b"} | second]}))
    found = resolve(f"{GOOD} --actor-num-gpus-per-node 2".split(), [str(path)])
    with pytest.raises(UsageError, match=said):
        check(found)
