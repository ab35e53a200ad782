"""Cross-checks: each contradiction is found, says its numbers and its fix; and the layout and estimate."""

import dataclasses
import io

import pytest
from rich.console import Console

from slime_cli.errors import UsageError
from slime_cli.hardware import device
from slime_cli.options.checks import check, layout, off_policy
from slime_cli.options.derive import FULLY_ASYNC, longest
from slime_cli.options.evaluations import evaluation_sets
from slime_cli.options.memory import estimate
from slime_cli.options.render import render
from slime_cli.options.resolve import Resolved, resolve

GOOD = (
    "--hf-checkpoint h --prompt-data p --num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4 --rm-type math"
)


def resolved(more: str = "", base: str = GOOD):
    return resolve(f"{base} {more}".split())


def test_a_layer_that_is_unknown_hides_no_other_contradiction_of_adapters():
    with pytest.raises(UsageError) as caught:
        check(resolved("--lora-rank 4 --lora-target-modules q_prj --update-weight-mode delta"))
    assert "no layer is called q_prj" in caught.value.message and "a delta is of whole" in caught.value.message


def test_merged_adapters_go_by_any_transport_and_schedule():
    ways = ("--update-weight-transport ipc", "--update-weight-mode delta", "--schedule async", "--partial-rollout")
    for way in ways:
        assert check(resolved(f"--lora-rank 4 --lora-sync merged {way}")) == check(resolved(way))


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
        ("--rollout-temperature 0", "--rollout-temperature is 0.0"),
        ("--rollout-temperature nan", "--rollout-temperature takes a number, got 'nan'"),
        ("--rollout-endpoint e --colocate", "exclude each other"),
        ("--eval-interval 2", "--eval-interval without --eval-prompt-data"),
        ("--eval-prompt-data a b c --eval-interval 2", "give pairs"),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "not a multiple of"),
        ("--rm-workers 0", "--rm-workers is 0"),
        ("--num-layers 3 --pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2", "--num-layers 3"),
        ("--bf16 --fp16", "--bf16 and --fp16"),
        (
            "--sglang-speculative-algorithm EAGLE --sglang-speculative-draft-model-path other",
            "--sglang-speculative-draft-model-path other: SGLang loads each new version",
        ),
        (
            "--sglang-speculative-algorithm NEXTN --update-weight-transport nccl",
            "the layers that draft would keep old weights",
        ),
        ("--eps-clip-c 1", "above 1"),
        ("--advantage-estimator ppo --kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "both weigh the divergence"),
        ("--lora-rank 0", "--lora-rank is 0"),
        ("--lora-rank 4 --lora-dropout 1", "--lora-dropout is 1"),
        ("--lora-rank 4 --lora-target-modules q_prj", "no layer is called q_prj"),
        ("--lora-rank 4 --lora-target-modules q_proj v_proj", "in one layer, linear_qkv, which is adapted whole"),
        ("--lora-rank 3 --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2", "is not a multiple of"),
        ("--lora-rank 4 --advantage-estimator ppo", "its critic would train whole weights"),
        ("--lora-rank 4 --freeze-params-name-list x", "adapters are all that is trained"),
        ("--lora-rank 4 --ref-load d", "the reference is the base itself"),
        ("--lora-rank 4 --enable-mtp-training --mtp-num-layers 1", "(MTP) layers have no adapters"),
        (
            "--lora-rank 4 --update-weight-transport ipc",
            "it sends whole weights | leave it out, or give --lora-sync merged",
        ),
        ("--lora-rank 4 --update-weight-mode delta", "a delta is of whole weights"),
        ("--lora-rank 4 --update-weight-local-checkpoint-dir d", "load adapters as they are published"),
        ("--lora-rank 4 --schedule one-step-off --in-flight pause", "keeps the adapter that it began with"),
        ("--lora-rank 4 --schedule one-step-off --in-flight abort", "can't unload the adapter that they named"),
        ("--lora-rank 4 --partial-rollout", "can't unload the adapter that they named"),
        ("--lora-rank 4 --schedule async", "can't unload the adapter that they named"),
        ("--lora-rank 4 --offload-rollout", "loses its base"),
        ("--lora-rank 4 --sglang-dp-size 2", "into one copy of a model only"),
        ("--lora-rank 4 --num-experts 8", "a mixture of experts, beside which slime trains no adapters"),
        ("--use-tis --tis-clip-low 3", "--tis-clip-low 3.0 and --tis-clip 2.0"),
        ("--use-tis --use-rollout-logprobs", "their ratio is 1"),
        ("--use-opd", "--use-opd needs --opd-teacher-load or --opd-teacher-url"),
        ("--use-opd --opd-teacher-load a --opd-teacher-url b", "are two teachers"),
        (
            "--use-opd --opd-type megatron --opd-teacher-url b",
            "--opd-type megatron takes --opd-teacher-load, not --opd-teacher-url",
        ),
        (
            "--use-opd --opd-type sglang --opd-teacher-load a --opd-teacher-url b",
            "takes --opd-teacher-url, not --opd-teacher-load |",
        ),
        ("--use-opd --opd-teacher-url b --rollout-temperature 0.7", "at temperature 1, and would not compare"),
        ("--use-opd --opd-teacher-url b --opd-teacher-timeout 0", "above 0"),
        ("--use-top-p-replay --rollout-top-p 0.9", "--rollout-top-k -1: it bounds the tokens"),
        ("--use-top-p-replay --rollout-top-k 5 --use-opd --opd-teacher-url u", "of the whole distribution"),
        ("--update-weights-interval 0", "it must be at least 1"),
        ("--use-routing-replay --use-rollout-routing-replay", "exclude each other"),
        ("--use-routing-replay --use-rollout-logprobs", "use --use-rollout-routing-replay"),
        ("--use-rollout-routing-replay --moe-router-fusion", "--moe-router-fusion leaves out"),
        ("--loss-type custom_loss", "needs --custom-loss-function-path"),
        ("--eps-clip 1.5", "low <= 1"),
        ("--apply-chat-template-kwargs 5", "is not a JSON object"),
        ("--train-backend fsdp", "choose from megatron"),
        ("--debug-train-only", "there is nothing to train on"),
        ("--debug-train-only --load-debug-rollout-data a --debug-rollout-only", "leave one of the two out"),
        ("--debug-rollout-only --loss-type sft_loss", "nothing is generated"),
        ("--num-rollout 0", "there is nothing to evaluate"),
        ("--num-rollout 0 --eval-prompt-data a b --load-debug-rollout-data c", "there is nothing to evaluate"),
        ("--num-rollout -1", "--num-rollout is -1"),
        ("--save-debug-rollout-data a.parquet", "write {rollout_id} in it"),
        ("--save-debug-train-data a{0}.parquet", "only {rollout_id} stands for something"),
        ("--load-debug-rollout-data a --load-debug-rollout-data-subsample 0", "is 0.0"),
        ("--disable-compute-advantages-and-returns", "it goes with --loss-type sft_loss"),
        ("--rollout-function-path slime.rollout.sft_rollout.generate_rollout", "give --loss-type sft_loss"),
        ("--spec slime_plugins.models.qwen3_5_vl f", "Qwen3.5-VL with its images, which is not trained here"),
        ("--enable-mtp-training", "--enable-mtp-training without --mtp-num-layers"),
        ("--enable-mtp-training --mtp-num-layers 1 --mtp-use-repeated-layer", "one layer for all depths is not built"),
        ("--enable-mtp-training --mtp-num-layers 1 --overlap-grad-reduce", "has no gradient to wait for"),
        ("--spec slime_plugins.models.glm5.glm5 f", "GLM-5, a model with sparse attention, which is not trained here"),
        (
            "--spec my.module f",
            "--spec my.module f has no effect here | leave it out: a model follows from config.json",
        ),
        ("--custom-rm-path slime.rollout.on_policy_distillation.reward_func", "give --use-opd --opd-teacher-url"),
        ("--rollout-max-context-len 5 --rollout-max-prompt-len 5", "leaves no room for an answer"),
        (
            "--rollout-max-context-len 9 --rollout-max-response-len 5 --sglang-context-length 8",
            "--sglang-context-length 8 is below --rollout-max-context-len 9",
        ),
        (f"--rollout-function-path {FULLY_ASYNC} --schedule sync", "--schedule sync | leave one of the two out"),
        (
            "--rollout-function-path slime.rollout.a.b",
            "slime's own function, which is not here | leave it out: --schedule",
        ),
        ("--rollout-function-path a.b --schedule async", "with --schedule async: such a function makes whole rollouts"),
        ("--buffer-filter-path a.b --max-staleness 2", "a group that is not chosen would become too old"),
        ("--keep-checkpoints 0", "--keep-checkpoints is 0 | it must be at least 1"),
        ("--use-stateless-adam --optimizer sgd", "--use-stateless-adam with --optimizer sgd"),
        ("--use-stateless-adam --optimizer-cpu-offload", "--optimizer-cpu-offload is about moments"),
        ("--async-save --optimizer-cpu-offload", "pinned memory"),
    ],
)
def test_contradictions(more, said):
    with pytest.raises(UsageError) as caught:
        check(resolved(more))
    assert said in f"{caught.value.message} | {caught.value.fix}"


WITHOUT_EFFECT = [
    ("--max-tokens-per-gpu 5", "--max-tokens-per-gpu", "without --use-dynamic-batch-size"),
    ("--balance-data", "--balance-data", "with data parallel 1"),
    ("--balance-by-flops", "--balance-by-flops", "without --use-dynamic-batch-size"),
    ("--kl-loss-coef 0.1", "--kl-loss-coef", "without --use-kl-loss"),
    (
        "--rollout-endpoint e --sglang-router-port 9000",
        "--sglang-router-port",
        "with --rollout-endpoint: they are for `slime serve-rollout`",
    ),
    (
        "--rollout-endpoint e --sglang-dtype float32",
        "--sglang-dtype",
        "with --rollout-endpoint: they are for `slime serve-rollout`",
    ),
    ("--sequence-parallel", "--sequence-parallel", "with --tensor-model-parallel-size 1: Megatron turns it off"),
    ("--kl-coef 0.1", "--kl-coef", "with --advantage-estimator grpo; --use-kl-loss with --kl-loss-coef has"),
    ("--gamma 0.9", "--gamma", "with --advantage-estimator grpo, only with reinforce_plus_plus, ppo"),
    (
        "--advantage-estimator reinforce_plus_plus --lambd 0.9",
        "--lambd",
        "with --advantage-estimator reinforce_plus_plus, only with ppo",
    ),
    ("--megatron-config-path c.yaml", "--megatron-config-path", "with --advantage-estimator grpo, only with ppo"),
    (
        "--advantage-estimator cispo --eps-clip-c 3",
        "--eps-clip-c",
        (
            "with --advantage-estimator cispo, only with grpo, gspo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, ppo"
        ),
    ),
    ("--tis-clip 3", "--tis-clip", "without --use-tis"),
    ("--rs-veto-threshold 0.1", "--rs-veto-threshold", "without --use-rs"),
    (
        "--use-tis --tis-mode truncate --tis-clip-low 0.1",
        "--tis-clip-low",
        "with --tis-mode truncate, only with clip, mask",
    ),
    ("--opd-teacher-url b", "--opd-teacher-url", "without --use-opd"),
    ("--use-top-p-replay", "--use-top-p-replay", "without --rollout-top-p or --rollout-top-k: nothing is cut"),
    (
        "--keep-old-actor",
        "--keep-old-actor",
        "with --update-weights-interval 1: each rollout begins with the engines' weights",
    ),
    (
        "--keep-old-actor --update-weights-interval 2 --use-rollout-logprobs",
        "--keep-old-actor",
        "with --use-rollout-logprobs, which takes the engine's own numbers",
    ),
    ("--custom-tis-function-path a.b", "--custom-tis-function-path", "without --use-tis or --get-mismatch-metrics"),
    ("--opd-kl-coef 2", "--opd-kl-coef", "without --use-opd"),
    ("--eval-top-p 0.5", "--eval-top-p", "without --eval-prompt-data or --eval-config"),
    ("--stop-at-loss 0.1", "--stop-at-loss", "with --loss-type policy_loss, only with sft_loss"),
    (
        "--custom-loss-function-path a.b",
        "--custom-loss-function-path",
        "with --loss-type policy_loss, only with custom_loss",
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path a.b --custom-pg-loss-reducer-function-path a.b",
        "--custom-pg-loss-reducer-function-path",
        "with --loss-type custom_loss, only with policy_loss",
    ),
    ("--use-unbiased-kl", "--use-unbiased-kl", "without --use-kl-loss"),
    (
        "--use-stateless-adam --reset-optimizer-states",
        "--reset-optimizer-states",
        "with --use-stateless-adam: there is nothing to forget",
    ),
    (
        "--use-stateless-adam --dist-ckpt-optim-fully-reshardable",
        "--dist-ckpt-optim-fully-reshardable",
        "with --use-stateless-adam: that format asks for moments by name",
    ),
]


@pytest.mark.parametrize(("more", "flag", "why"), WITHOUT_EFFECT)
def test_an_option_without_effect_because_of_another_value_is_a_warning(more, flag, why):
    assert check(resolved(more)) == [f"{flag} has no effect {why}"]


def test_options_without_effect_for_one_reason_share_a_line():
    assert check(resolved("--tis-mode clip --tis-clip 3 --num-epoch 2 --oversize drop --max-tokens-per-gpu 5")) == [
        "--num-epoch has no effect beside --num-rollout, which says how many steps there are",
        "--max-tokens-per-gpu, --oversize have no effect without --use-dynamic-batch-size",
        "--tis-mode, --tis-clip have no effect without --use-tis",
    ]


def test_supervised_training_has_no_use_for_a_policys_options():
    sft = GOOD.replace("--rm-type math", "--loss-type sft_loss")
    more = "--use-tis --tis-clip 3 --eps-clip 0.3 --rm-type math --rollout-top-p 0.9 --sglang-dtype float32"
    idle = "--rollout-top-p, --rm-type, --eps-clip, --use-tis, --tis-clip, --sglang-dtype"
    assert check(resolved(more, sft)) == [
        f"{idle} have no effect with --loss-type sft_loss, only with policy_loss, custom_loss"
    ]
    assert check(resolved("--stop-at-loss 0.1 --use-stateless-adam --lr 1e-3", sft)) == []


def test_a_flag_that_one_of_the_phases_uses_is_not_idle(tmp_path):
    (tmp_path / "two.yaml").write_text("phases:\n- {name: warm, slime: {loss_type: sft_loss}}\n- {name: rl}\n")
    found = resolve(f"{GOOD} --eps-clip 0.3 --tis-clip 3 --balance-data".split(), [str(tmp_path / "two.yaml")])
    assert check(found) == [
        "--balance-data has no effect with data parallel 1",
        "phase rl: --tis-clip has no effect without --use-tis",
    ]


def test_the_last_of_two_values_holds_with_a_warning():
    found = resolved("--lr 1 --rotary-base 5 --lr 2 --lr 3 --bf16 --bf16=false --rollout-stop a --rollout-stop a")
    assert found.megatron["lr"] == 3.0 and "bf16" not in found.megatron
    assert check(found) == [
        "--lr is given more than once: the last one holds, 3.0; before it was 2.0",
        "--bf16 is given more than once: the last one holds, taken back; before it was True",
    ]


def test_a_teacher_in_rm_url_is_taken_as_in_slimes_scripts():
    found = resolved("--use-opd --opd-type sglang --rm-url http://h:1/generate")
    assert found.slime.opd_teacher_url == "http://h:1/generate"
    assert [text for text in check(found) if "--rm-url is taken for the teacher's address" in text]
    other = resolved("--use-opd --rm-type remote_rm --rm-url u --opd-teacher-load l")
    assert other.slime.opd_teacher_url is None and other.slime.opd_type == "megatron"
    with pytest.raises(UsageError, match="--use-opd needs"):
        check(resolved("--use-opd --rm-type remote_rm --rm-url u"))


@pytest.mark.parametrize(
    ("words", "sets"),
    [
        ("aime DIR/a.jsonl gsm DIR/g.parquet", [("aime", "DIR/a.jsonl"), ("gsm", "DIR/g.parquet")]),
        ("DIR/aime-2024.jsonl", [("aime-2024", "DIR/aime-2024.jsonl")]),
        ("DIR/a.b.jsonl@[0:5]", [("a.b", "DIR/a.b.jsonl@[0:5]")]),
        ("reasoning-gym:sums?seed=3@[:9]", [("sums", "reasoning-gym:sums?seed=3@[:9]")]),
    ],
)
def test_an_evaluation_set_alone_is_named_after_its_file(words, sets):
    found = resolved(f"--eval-interval 2 --eval-prompt-data {words}")
    assert check(found) == []
    assert [(one.name, one.path) for one in evaluation_sets(found.slime)] == sets


def test_what_slimes_scripts_say_of_what_is_so_anyway():
    sft = "--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only"
    more = "--train-backend megatron --disable-compute-advantages-and-returns"
    assert check(resolved(more, GOOD.replace("--rm-type math", sft))) == []
    assert check(resolved("--rollout-function-path slime.rollout.sglang_rollout.generate_rollout")) == []
    assert check(resolved("--no-offload-train")) == ["--no-offload-train has no effect without --offload"]


def test_what_is_offloaded():
    both = resolved("--colocate --offload")
    assert check(both) == [] and both.slime.offload_train and both.slime.offload_rollout
    one = resolved("--colocate --offload --no-offload-train")
    assert check(one) == [] and one.slime.offload_rollout and not one.slime.offload_train
    warnings = check(resolved("--offload-rollout"))
    assert len(warnings) == 1 and "--offload-rollout" in warnings[0] and "--colocate" in warnings[0]
    for words, message in (
        ("--colocate --offload-train --schedule async", "both need their memory"),
        ("--colocate --offload-train --no-offload-train", "exclude each other"),
        ("--colocate --offload --rollout-function-path mine.rollouts", "it may ask engines that have no memory"),
    ):
        with pytest.raises(UsageError, match=message):
            check(resolved(words))


def test_what_says_again_what_the_model_says_is_a_warning():
    sft = GOOD.replace("--rm-type math", "--loss-type sft_loss")
    assert check(resolved("--model-name qwen3 --loss-mask-type qwen3", sft)) == [
        "--model-name has no effect beside --hf-checkpoint: its config.json says which model it is",
        "--loss-mask-type has no effect here: the chat template itself says which tokens are an assistant's, "
        "whatever its kind; see --on-rewritten-turns and --opened-thinking for one that drops or opens thinking",
    ]
    assert check(resolved("--loss-mask-type qwen3")) == [
        "--loss-mask-type has no effect with --loss-type policy_loss, only with sft_loss"
    ]


def test_slimes_fully_asynchronous_rollouts_are_a_schedule():
    found = resolved(f"--rollout-function-path {FULLY_ASYNC} --use-tis")
    assert (found.slime.schedule, found.slime.max_staleness) == ("async", 1)
    (said,) = check(found)
    assert said.endswith("is --schedule async here, with --max-staleness 1: slime has no such bound")
    assert check(resolved(f"--rollout-function-path {FULLY_ASYNC} --use-tis --schedule async")) == []
    assert resolved().slime.schedule == "sync"


def test_slimes_functions_of_distillation_go_with_its_option():
    path = "slime.rollout.on_policy_distillation."
    functions = f"--custom-rm-path {path}reward_func --custom-reward-post-process-path {path}post_process_rewards"
    base = GOOD.replace("--rm-type math", functions)
    assert check(resolved("--use-opd --opd-teacher-url http://h:1/generate", base)) == []


@pytest.mark.parametrize(
    ("more", "prompt", "evaluated", "together"),
    [
        ("", None, None, 5),
        ("--rollout-max-context-len 9", 8, 8, 9),
        ("--rollout-max-context-len 9 --rollout-max-prompt-len 3", 3, 3, 8),
        ("--rollout-max-context-len 20 --rollout-max-prompt-len 3 --eval-max-context-len 3", 3, 2, 8),
        ("--eval-max-prompt-len 7 --rollout-max-prompt-len 4", 4, 7, 9),
        ("--eval-max-context-len 3", None, 2, 5),
    ],
)
def test_a_prompt_leaves_room_for_an_answer(more, prompt, evaluated, together):
    found = resolved(f"--rollout-max-response-len 5 {more}").slime
    assert (found.rollout_max_prompt_len, found.eval_max_prompt_len, longest(found)) == (prompt, evaluated, together)


def test_evaluation_takes_over_what_it_is_not_given():
    given = "--rollout-top-k 5 --use-top-p-replay --tool-key t --rollout-max-context-len 9"
    found = resolved(given).slime
    assert (found.eval_top_k, found.eval_tool_key, found.eval_max_context_len) == (5, "t", 9)
    found = resolved(f"{given} --eval-top-k 1 --eval-tool-key u --eval-max-context-len 8").slime
    assert (found.eval_top_k, found.eval_tool_key, found.eval_max_context_len) == (1, "u", 8)


def test_an_embedding_is_never_padded():
    """Scripts that ask for what is so anyway pass; others are told that it has no effect."""
    check(
        resolved(
            "--vocab-size 1024 --make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2"
            " --actor-num-gpus-per-node 2"
        )
    )
    for words in (
        "256",
        "128 --vocab-size 320",
        "256 --vocab-size 256 --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2",
        "0",
    ):
        with pytest.raises(UsageError, match="--make-vocab-size-divisible-by .* has no effect here") as caught:
            check(resolved(f"--make-vocab-size-divisible-by {words}"))
        assert "keeps the rows" in caught.value.fix or "keeps the rows" in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "hf/{step}",
        "hf/{0}",
        "hf/{",
        "hf/{rollout_id.x}",
        "hf/{}",
        "hf/{rollout_id",
        "hf/{rollout_id:zz}",
        "hf/{{rollout_id}}",
    ],
)
def test_an_export_whose_name_stands_for_nothing_is_refused(name):
    with pytest.raises(UsageError, match="--save-hf"):
        check(resolved(f"--save-hf {name}"))


@pytest.mark.parametrize("name", ["hf", "hf/{rollout_id}", "hf/{rollout_id:04d}"])
def test_an_export_is_named_after_its_rollout_or_replaces_the_last(name):
    check(resolved(f"--save-hf {name}"))


@pytest.mark.parametrize(
    ("kind", "given", "meanwhile"),
    [
        ("cuda", "", True),
        ("cuda", "--async-save=false", None),
        ("cuda", "--optimizer-cpu-offload", None),
        ("cpu", "", None),
        ("cpu", "--async-save", True),
    ],
)
def test_checkpoints_are_written_while_a_gpu_trains(monkeypatch, kind, given, meanwhile):
    monkeypatch.setattr(device, "find", lambda: device.Device(kind, 1, kind))
    assert resolved(given).megatron.get("async_save") is meanwhile


def test_the_bound_on_log_probabilities_is_for_what_slime_generates():
    assert resolved("").slime.max_logprob_diff == 0.05
    for other in ("--bf16", "--sglang-dtype bfloat16", "--rollout-endpoint e.json", "--sglang-quantization fp8"):
        assert resolved(other).slime.max_logprob_diff == 0.5
    assert resolved("--custom-generate-function-path a.py:f").slime.max_logprob_diff is None
    assert resolved("--custom-generate-function-path a.py:f --max-logprob-diff 1").slime.max_logprob_diff == 1.0
    assert resolved("--max-logprob-diff inf").slime.max_logprob_diff == float("inf")


def test_a_ratio_without_lower_bound():
    assert check(resolved("--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4")) == []


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
    assert (
        "must come with its own"
        in check(resolved(base=GOOD.replace("--rm-type math", "--custom-generate-function-path m.f")))[0]
    )
    assert "cannot be resumed" in check(resolved("--no-save-optim"))[0]
    assert "follows from config.json" in check(resolved("--spec slime_plugins.models.glm4 get_glm_spec"))[0]
    assert "stay as the checkpoint has them" in check(resolved("--mtp-num-layers 1"))[0]
    assert check(resolved("--mtp-num-layers 1 --enable-mtp-training")) == []
    assert "none of them is the probability that a token was sampled with" in check(resolved("--rollout-top-p 0.9"))[0]
    assert check(resolved("--rollout-top-p 0.9 --rollout-top-k 50 --use-top-p-replay")) == []


def test_which_teacher_follows_from_what_is_given():
    assert resolved("--use-opd --opd-teacher-url u").slime.opd_type == "sglang"
    assert resolved("--use-opd --opd-teacher-load l").slime.opd_type == "megatron"
    assert (
        check(resolved("--use-opd --opd-teacher-url u"))
        == check(resolved("--use-opd --opd-teacher-load l --rollout-temperature 0.7"))
        == []
    )


def test_samples_of_older_weights_want_a_correction():
    assert "takes samples of older weights for the policy's own" in check(resolved("--update-weights-interval 2"))[0]
    for correction in ("--keep-old-actor", "--use-rollout-logprobs", "--use-tis"):
        assert check(resolved(f"--update-weights-interval 2 {correction}")) == []


def scheduled(more: str = "", **changed: object) -> Resolved:
    """Resolved options with some that the command line does not take yet."""
    found = resolved(more)
    return dataclasses.replace(found, slime=dataclasses.replace(found.slime, **changed))


@pytest.mark.parametrize("changed", [{"schedule": "one-step-off"}, {"schedule": "async"}, {"partial_rollout": True}])
def test_one_kept_version_does_not_do_where_a_batch_may_hold_several(changed):
    (said,) = off_policy.interval(scheduled(**changed))
    assert "samples of older weights for the policy's own; --use-rollout-logprobs or --use-tis weigh" in said
    for correction in ("--use-rollout-logprobs", "--use-tis", "--use-rs"):
        assert list(off_policy.interval(scheduled(correction, **changed))) == []
    for interval in (1, 2):
        kept = scheduled(f"--keep-old-actor --update-weights-interval {interval}", **changed)
        ((message, fix),) = off_policy.interval(kept)
        assert "keeps the weights of one version" in message and "--use-tis" in fix


def test_masking_what_older_weights_wrote_is_a_correction_too():
    masked = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    assert list(off_policy.interval(scheduled(**masked))) == []
    assert len(list(off_policy.interval(scheduled(**masked, schedule="async")))) == 1


def test_groups_that_over_sampling_leaves_over_are_of_other_versions_than_the_kept_one():
    ((message, _),) = off_policy.interval(resolved("--keep-old-actor --over-sampling-batch-size 12"))
    assert message.startswith(
        "--keep-old-actor with --over-sampling-batch-size 12: it keeps the weights of one version"
    )


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
        ("qwen3-0.6b", 0.596),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("glm4.5-355b-a32b", 352.8),
        ("moonlight", 15.96),
        ("deepseek-v3", 671.0),
        ("kimi-k2", 1026.4),
        ("llama3.1-8b", 8.03),
        ("qwen2.5-7b", 7.61),
    ],
)
def test_parameters_are_those_that_the_models_are_known_by(profile, billions):
    assert estimate(resolve(GOOD.split(), [profile]))["parameters"] / 1e9 == pytest.approx(billions, rel=2e-3)


def test_options_that_follow_from_the_checkpoint_complete_the_estimate():
    derived = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_layers": 1,
        "vocab_size": 10,
        "ffn_hidden_size": 16,
        "swiglu": True,
    }
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
        (
            {"megatron": {"tensor_model_parallel_size": 2}},
            {},
            "phase a and phase b differ in --tensor-model-parallel-size",
        ),
        ({"slime": {"rm_timeout": 3}}, {}, "differ in --rm-timeout"),
        ({"sglang": {"dtype": "float32"}}, {}, "differ in SGLang's options"),
        ({"slime": {"use_rollout_routing_replay": True}}, {}, "differ in SGLang's options"),
    ],
)
def test_phases_share_what_is_made_once(tmp_path, first, second, said):
    import yaml

    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"phases": [{"name": "a"} | first, {"name": "b"} | second]}))
    found = resolve(f"{GOOD} --actor-num-gpus-per-node 2".split(), [str(path)])
    with pytest.raises(UsageError, match=said):
        check(found)
