"""What ranks of an engine keep: against torch's own slicing of the whole tensors.

1. Ranks together keep every row and column, replicated keys and values included.
2. However a part comes in chunks.
3. What does not divide as SGLang divides it is not known.
"""

import pytest
import torch

from slime_cli.weights import held
from slime_cli.weights.held import Cut, Rank

LAYER = "model.layers.0."


def kept_by(part, tensor, rank, chunk):
    cut = held.cut(part, list(tensor.shape), rank)
    assert cut is not None
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    size = tensor.element_size()
    chunks = [data[at : at + chunk * size] for at in range(0, len(data), chunk * size)]
    pieces = held.kept(chunks, list(tensor.shape), size, [Cut(0, 0, tensor.shape[0]), cut])
    out = {0: b"", 1: b""}
    for index, piece in pieces:
        out[index] += piece
    assert out[0] == data
    return torch.frombuffer(bytearray(out[1]), dtype=tensor.dtype)


@pytest.mark.parametrize("chunk", [3, 64, 10_000])
@pytest.mark.parametrize("of", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "shape", "axis"),
    [
        ("self_attn.q_proj.weight", (16, 12), 0),
        ("self_attn.k_proj.bias", (8,), 0),
        ("mlp.up_proj.weight", (24, 12), 0),
        ("self_attn.o_proj.weight", (12, 16), 1),
        ("mlp.down_proj.weight", (12, 24), 1),
        ("self_attn.o_proj.bias", (12,), None),
        ("input_layernorm.weight", (12,), None),
    ],
)
def test_ranks_keep_their_share(name, shape, axis, of, chunk):
    tensor = torch.randn(shape)
    for place in range(of):
        found = kept_by(LAYER + name, tensor, Rank(place, of, kv_heads=4), chunk)
        share = tensor if axis is None else tensor.chunk(of, axis)[place]
        assert torch.equal(found, share.reshape(-1))


@pytest.mark.parametrize(("heads", "of"), [(2, 4), (1, 2), (4, 2)])
def test_keys_and_values_are_shared_by_heads(heads, of):
    tensor = torch.randn(heads * 4, 6)
    for place in range(of):
        found = kept_by(f"{LAYER}self_attn.v_proj.weight", tensor, Rank(place, of, kv_heads=heads), 5)
        share = tensor.chunk(of)[place] if heads >= of else tensor.chunk(heads)[place * heads // of]
        assert torch.equal(found, share.reshape(-1))


@pytest.mark.parametrize("of", [1, 2, 4])
@pytest.mark.parametrize("rows", [64, 70, 10])
def test_the_vocabulary_is_padded_before_it_is_shared(rows, of):
    tensor = torch.randn(rows, 6).half()
    padded = torch.cat([tensor, torch.zeros(-rows % 64, 6).half()])
    for place in range(of):
        found = kept_by("model.embed_tokens.weight", tensor, Rank(place, of), 7)
        assert torch.equal(found, padded.chunk(of)[place].reshape(-1))


@pytest.mark.parametrize(
    ("part", "shape", "rank"),
    [
        ("self_attn.q_proj.weight", [6, 4], Rank(0, 4, 2)),
        ("self_attn.k_proj.weight", [6, 4], Rank(0, 2, 0)),  # nobody knows how many heads these are
        ("self_attn.k_proj.weight", [6, 4], Rank(0, 2, 3)),
        ("self_attn.k_proj.weight", [6, 4], Rank(0, 4, 3)),
        ("mlp.down_proj.weight", [4, 6], Rank(0, 4, 2)),
    ],
)
def test_what_does_not_divide_is_not_known(part, shape, rank):
    assert held.cut(LAYER + part, shape, rank) is None


@pytest.mark.parametrize(
    ("name", "is_it"),
    [
        ("model.layers.0.self_attn.qkv_proj.bias", True),
        ("model.layers.0.self_attn.q_norm.weight", True),
        ("model.layers.11.post_attention_layernorm.weight", True),
        ("model.norm.weight", True),
        ("lm_head.weight", True),
        ("model.layers.0.linear_attn.conv1d.weight", False),
        ("model.layers.0.mlp.experts.w13_weight", False),
        ("draft.model.mtp_block.self_attn.qkv_proj.weight", False),
        ("draft.model.final_layernorm.weight", False),
        ("model.layers.0.mlp.gate.e_score_correction_bias", False),
    ],
)
def test_which_tensors_have_the_shape_of_their_parts(name, is_it):
    assert held.is_plain(name) is is_it


MTP = "model.mtp_layers.0."


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("draft.model.embed_tokens.weight", ("model.embed_tokens.weight",)),
        ("draft.lm_head.weight", ("lm_head.weight",)),
        ("draft.model.input_proj.weight", (f"{MTP}input_proj.weight",)),
        ("draft.model.token_layernorm.weight", (f"{MTP}token_layernorm.weight",)),
        ("draft.model.mtp_block.input_layernorm.weight", (f"{MTP}input_layernorm.weight",)),
        (
            "draft.model.mtp_block.self_attn.qkv_proj.bias",
            tuple(f"{MTP}self_attn.{part}_proj.bias" for part in "qkv"),
        ),
        # Another family's: a layer of these names is the model's own, not one that drafts.
        ("draft.model.layers.0.mlp.down_proj.weight", ("draft.model.layers.0.mlp.down_proj.weight",)),
        ("draft.model.norm.weight", ("draft.model.norm.weight",)),
    ],
)
def test_layers_that_draft_are_made_of_the_mtp_layer(name, parts):
    assert held.parts_of(name) == parts
