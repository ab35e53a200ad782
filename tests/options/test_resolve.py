"""The strict parse, precedence, and the way back into the engines' argv."""

import subprocess
import sys

import pytest

from slime_cli.errors import UsageError
from slime_cli.options.resolve import args_namespace, resolve


def refused(*argv: str, profiles=(), command="train") -> str:
    with pytest.raises(UsageError) as caught:
        resolve(list(argv), list(profiles), command)
    return f"{caught.value.message} | {caught.value.fix}"


def test_each_section_gets_its_own():
    argv = (
        "--rollout-batch-size 4 --lr=3e-4 --sglang-mem-fraction-static 0.5 --router-policy random --sequence-parallel"
    )
    found = resolve(argv.split())
    assert found.slime.rollout_batch_size == 4
    assert found.megatron["lr"] == 3e-4 and found.megatron["sequence_parallel"] is True
    assert found.sglang["mem_fraction_static"] == 0.5
    assert found.router["policy"] == "random"
    assert found.origins["megatron.lr"] == found.origins["slime.rollout_batch_size"] == "flag"
    assert found.origins["slime.rollout_seed"] == found.origins["megatron.micro_batch_size"] == "default"


def test_lists_json_and_stored_false():
    argv = ["--rollout-stop-token-ids", "1", "-2", "--apply-chat-template-kwargs", '{"enable_thinking": false}']
    found = resolve([*argv, "--disable-rewards-normalization", "--rollout-stop=--end"])
    assert found.slime.rollout_stop_token_ids == [1, -2]
    assert found.slime.apply_chat_template_kwargs == {"enable_thinking": False}
    assert found.slime.rewards_normalization is False
    assert found.slime.rollout_stop == ["--end"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--tensor-model-paralell-size 2", "did you mean --tensor-model-parallel-size?"),
        ("--mem-fraction-static 0.5", "did you mean --sglang-mem-fraction-static?"),
        ("--sglang-num-layers 2", "did you mean --num-layers?"),
        ("--sglang-mem-fraction-statc 2", "did you mean --sglang-mem-fraction-static?"),
        ("--router-polisy x", "did you mean --router-policy?"),
        ("--rollout_batch_size 2", "did you mean --rollout-batch-size?"),
        ("--rollout-batch 2", "unknown option --rollout-batch"),
        ("--sglang-tp-size 2", "use --rollout-num-gpus-per-engine"),
        ("--sglang-tensor-parallel-size 2", "use --rollout-num-gpus-per-engine"),
        ("--sglang-model-path x", "--hf-checkpoint"),
        ("--router-host x", "is set by slime"),
        ("--train-iters 5", "--num-rollout"),
        ("--rl-partial-rollouts", "Megatron's own RL loop"),
        (
            "--tokenizer-model x",
            "--tokenizer-model has no effect here | slime takes the tokenizer and the chat template of",
        ),
        ("--padded-vocab-size 512", "the embedding keeps the rows that the checkpoint has"),
        ("--finetune", "the weights of --load begin a run"),
        ("--tensorboard-dir x", "metrics.jsonl"),
        ("--manual-gc", "Megatron's own training loop"),
        ("--persistent-save-interval 5", "use --save-interval"),
        ("--save-retain-interval 5", "use --keep-checkpoints"),
        ("--use-persistent-ckpt-worker", "--async-save forks"),
        ("--lr", "--lr needs a value"),
        ("--prompt-data --lr 1", "written --prompt-data=VALUE"),
        ("--lr x", "--lr takes a number, got 'x'"),
        ("--num-layers 2.5", "takes a whole number"),
        ("--kl-loss-type k9", "choose from k1, k2, k3, low_var_kl"),
        ("--attention-backend flashy", "choose from auto, flash"),
        ("--apply-chat-template-kwargs {", "takes JSON"),
        ("stray", "unexpected word 'stray'"),
        ("--colocate yes", "unexpected word 'yes'"),
        ("--colocate=yes", "takes no value"),
        ("-h", "unexpected word '-h'"),
        ("--rollout-buffer-url u --ci-test --lr x --dump-details p --stray s", "5 options cannot be used"),
        (
            "--ci-test --ci-save-grad-norm k",
            "here\n  2. --ci-save-grad-norm is not an option here (leave it out: it belongs",
        ),
    ],
)
def test_refusals_name_the_flag_and_the_fix(argv, said):
    assert said in refused(*argv.split())


def test_a_native_flag_that_slime_gives_can_be_taken_back():
    assert "--dist-ckpt-optim-fully-reshardable" in resolve([]).megatron_argv()
    assert (
        "--dist-ckpt-optim-fully-reshardable"
        not in resolve(["--dist-ckpt-optim-fully-reshardable=false"]).megatron_argv()
    )


def test_same_flag_twice_with_one_value_is_fine():
    assert resolve(["--lr", "1", "--lr=1.0"]).megatron["lr"] == 1


def test_serve_rollout_refuses_flags_it_does_not_read():
    assert "does not read --lr" in refused("--lr", "1", command="serve-rollout")
    assert "does not read --eps-clip" in refused("--eps-clip", "0.1", command="serve-rollout")
    assert resolve(["--sglang-dtype", "float32"], [], "serve-rollout").sglang["dtype"] == "float32"


def test_batch_numbers_follow_from_each_other():
    found = resolve("--rollout-batch-size 8 --n-samples-per-prompt 4 --num-steps-per-rollout 2".split())
    assert found.megatron["global_batch_size"] == 16 and found.origins["megatron.global_batch_size"] == "derived"
    found = resolve("--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 8".split())
    assert found.slime.num_steps_per_rollout == 4
    found = resolve("--global-batch-size 8 --n-samples-per-prompt 4".split())
    assert found.slime.rollout_batch_size == found.slime.over_sampling_batch_size == 2


def test_values_that_follow_others():
    found = resolve("--rollout-temperature 0.7 --colocate --actor-num-gpus-per-node 4 --eval-top-p 0.5".split())
    assert found.slime.eval_temperature == 0.7 and found.slime.eval_top_p == 0.5
    assert found.slime.eps_clip_high == 0.2
    assert found.slime.rollout_num_gpus == 4
    assert resolve(["--rollout-endpoint", "e.json"]).slime.rollout_num_gpus == 0


def test_hooks_get_one_namespace():
    args = args_namespace(resolve("--num-layers 2 --rollout-top-k 5".split()))
    assert (args.num_layers, args.rollout_top_k, args.rm_type) == (2, 5, None)
    assert not hasattr(args, "hidden_size")


def test_defaults_are_not_shared_between_resolutions():
    resolve([]).slime.apply_chat_template_kwargs["x"] = 1
    assert resolve([]).slime.apply_chat_template_kwargs == {}


def test_resolving_imports_nothing_heavy():
    code = "import sys; from slime_cli.options import checks, memory, render, resolve\n"
    code += "resolve.resolve(['--lr', '1'], ['qwen3-4b'])\n"
    code += (
        "print([name for name in ('torch', 'sglang', 'megatron', 'rich', 'numpy', 'msgspec') if name in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
