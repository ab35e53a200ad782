"""Which layers LoRA adapters are beside, by Megatron's names and HF's; and their memory."""

import pytest

from slime_cli.errors import UsageError
from slime_cli.options import adapters, memory
from slime_cli.options.resolve import resolve

SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16"
    " --group-query-attention --ffn-hidden-size 96 --swiglu --vocab-size 1000 --max-position-embeddings 64"
)
RUN = "--hf-checkpoint h --prompt-data p --num-rollout 3 --rollout-batch-size 8 --rm-type math"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["all-linear"], ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
        (["v_proj", "q_proj", "k_proj"], ["linear_qkv"]),
        (["down_proj", "linear_qkv"], ["linear_qkv", "linear_fc2"]),
        (["linear_fc1", "gate_proj"], ["linear_fc1"]),
    ],
)
def test_names_of_layers(names, found):
    assert adapters.modules(names) == found


def test_a_part_of_a_layer_is_refused_with_what_is_in_it():
    with pytest.raises(UsageError) as refused:
        adapters.modules(["up_proj"])
    assert "gate_proj, up_proj in one layer, linear_fc1" in refused.value.message
    assert "linear_fc1" in refused.value.fix


def test_names_in_hf():
    assert adapters.in_hf(["linear_qkv", "linear_fc2"]) == ["q_proj", "k_proj", "v_proj", "down_proj"]


def test_engines_are_started_for_adapters_alone_where_they_get_them_so():
    found = adapters.served(resolve(f"{RUN} --lora-rank 4 --lora-target-modules linear_qkv".split()).slime)
    assert found["enable_lora"] and found["max_lora_rank"] == 4
    assert found["lora_target_modules"] == ["q_proj", "k_proj", "v_proj"]
    assert adapters.served(resolve(f"{RUN} --lora-rank 4 --lora-sync merged".split()).slime) == {}
    assert adapters.served(resolve(RUN.split()).slime) == {}


def test_gradients_and_moments_are_those_of_the_adapters():
    whole = memory.estimate(resolve(f"{RUN} {SHAPE}".split()))
    found = memory.estimate(resolve(f"{RUN} {SHAPE} --lora-rank 4".split()))
    assert whole and found
    per_layer = (64 + 64 + 2 * 32) + (64 + 64) + (64 + 2 * 96) + (96 + 64)  # inputs + outputs of the four layers
    adapted = 4 * 2 * per_layer
    assert found["rank"]["weights"] == whole["rank"]["weights"]
    assert found["rank"]["gradients"] == pytest.approx(4 * adapted, rel=1e-6, abs=4)
    assert found["rank"]["optimizer"] / whole["rank"]["optimizer"] == pytest.approx(
        adapted / whole["parameters"], rel=1e-3
    )
