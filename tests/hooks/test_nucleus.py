"""What top-p and top-k left, rebuilt from an engine's most likely tokens, against SGLang's own rule."""

import asyncio
import types

import numpy as np
import pytest
import torch

from slime_cli.buffer.batch_files import read_parquet, to_parquet
from slime_cli.buffer.columns import TrainBatch
from slime_cli.buffer.types import Sample, Status
from slime_cli.errors import EngineError
from slime_cli.hooks import nucleus
from slime_cli.rollout.generate import Generator


def kept_by_sglang(p_TV: torch.Tensor, top_k: int, top_p: float) -> list[set[int]]:
    """``top_k_top_p_min_p_sampling_from_probs_torch`` of SGLang up to the draw."""
    sorted_TV, ids_TV = p_TV.sort(dim=-1, descending=True)
    sums_TV = torch.cumsum(sorted_TV, dim=-1)
    keep_TV = (torch.arange(p_TV.shape[-1]) < top_k) & ~((sums_TV - sorted_TV) > top_p)
    return [set(ids[keep].tolist()) for ids, keep in zip(ids_TV, keep_TV)]


def answer(log_p_TV: torch.Tensor, sampled: list[int], top_k: int) -> dict:
    values, ids = log_p_TV.topk(top_k, dim=-1)
    tops = [[[v, i, None] for v, i in zip(*row)] for row in zip(values.tolist(), ids.tolist())]
    scored = [[float(log_p_TV[t, token]), token, None] for t, token in enumerate(sampled)]
    return {"output_ids": list(sampled), "meta_info": {"output_top_logprobs": tops, "output_token_logprobs": scored}}


def answered(found: dict) -> Sample:
    """A sample that holds ``found`` as :mod:`slime_cli.rollout.turns` appends it."""
    sample = Sample(0, 0, tokens=[1])
    scores = [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]
    sample.append(found["output_ids"], log_probs=scores, version="v000001", trained=True)
    return sample


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (5, 1.0), (40, 0.5), (200, 0.95), (40, 1e-6)])
def test_the_cut_is_sglangs(top_k, top_p):
    generator = torch.Generator().manual_seed(top_k)
    p_TV = (torch.randn(200, 300, generator=generator) * 3).softmax(-1)
    want = kept_by_sglang(p_TV, top_k, top_p)
    sampled = [min(ids) for ids in want]
    found = answer(p_TV.log(), sampled, top_k)
    sample = answered(found)
    nucleus.extend(sample, found, top_p)
    sample.check()
    ends = sample.rollout_top_p_token_offsets
    got = [set(sample.rollout_top_p_token_ids[a:b]) for a, b in zip(ends, ends[1:])]
    for t in (t for t in range(200) if got[t] != want[t]):  # one token on the very edge of the mass
        assert (
            abs(float(p_TV[t, sorted(got[t] & want[t])].double().sum()) - top_p) < 1e-6 and len(got[t] ^ want[t]) == 1
        )
    assert sum(a != b for a, b in zip(got, want)) <= 1
    masses = [float(p_TV[t, sorted(ids)].double().sum()) for t, ids in enumerate(got)]
    exact = [
        float(p_TV[t, token].double().log()) - np.log(mass) for (t, token), mass in zip(enumerate(sampled), masses)
    ]
    np.testing.assert_allclose(sample.rollout_log_probs, exact, atol=1e-5)


def edge(top) -> dict:
    return {
        "output_ids": [9],
        "meta_info": {"output_top_logprobs": top, "output_token_logprobs": [[np.log(0.2), 9, None]]},
    }


def test_the_sampled_token_is_always_in():
    """A tie at the edge of top-k: the engine drew the one that its list leaves out."""
    found = edge([[[np.log(0.6), 3, None], [np.log(0.2), 4, None]]])
    sample = answered(found)
    nucleus.extend(sample, found, 1.0)
    assert sample.rollout_top_p_token_ids == [3, 4, 9] and sample.rollout_log_probs == [pytest.approx(np.log(0.2))]


def test_an_answer_without_the_most_likely_tokens_is_an_error():
    with pytest.raises(EngineError, match="1 tokens but the most likely tokens of None"):
        nucleus.extend(answered(edge(None)), edge(None), 1.0)


def test_a_second_answer_extends_what_the_first_left_and_skips_what_nobody_sampled():
    first = edge([[[np.log(0.6), 3, None], [np.log(0.2), 9, None]]])
    sample = answered(first)
    nucleus.extend(sample, first, 1.0)
    sample.append([50, 51], log_probs=None, version=None, trained=False)
    sample.append([9], log_probs=[np.log(0.2)], version="v000002", trained=True)
    nucleus.extend(sample, edge([[[np.log(0.2), 9, None]]]), 1.0)
    sample.check()
    assert sample.rollout_top_p_token_ids == [3, 9, 9] and sample.rollout_top_p_token_offsets == [0, 2, 2, 2, 3]
    assert sample.rollout_log_probs == pytest.approx([np.log(0.25), 0, 0, 0])


def test_the_columns_travel_with_their_sample(tmp_path):
    first = Sample(
        0,
        0,
        tokens=[1, 9, 8],
        response_length=2,
        reward=1.0,
        rollout_top_p_token_ids=[9, 7],
        rollout_top_p_token_offsets=[0, 2, 2],
    )
    second = Sample(
        1,
        0,
        tokens=[1, 5],
        response_length=1,
        reward=1.0,
        rollout_top_p_token_ids=[5],
        rollout_top_p_token_offsets=[0, 1],
    )
    (tmp_path / "s.parquet").write_bytes(to_parquet([first, second]))
    batch = TrainBatch.from_samples(read_parquet(tmp_path / "s.parquet"))
    assert batch.kept_ids_K.tolist() == [9, 7, 5] and batch.kept_counts_R.tolist() == [2, 0, 1]
    for offsets in ([0, 2], [1, 2, 2], [0, 3, 3], [0, 2, 1], None):
        with pytest.raises(ValueError, match="rollout_top_p_token"):
            Sample(
                2,
                0,
                tokens=[1, 2, 3],
                response_length=2,
                rollout_top_p_token_ids=[1, 2],
                rollout_top_p_token_offsets=offsets,
            ).check()


def test_asked_for_in_rollouts_and_not_in_evaluations():
    asked = []

    async def generate(body):
        asked.append(body)
        meta = {"output_token_logprobs": [[-1.0, 4, None]], "output_top_logprobs": [[[-0.5, 3, None], [-1.0, 4, None]]]}
        return [{"text": "x", "output_ids": [4], "meta_info": meta | {"finish_reason": {"type": "stop"}}}]

    names = (
        "rollout_max_response_len rollout_stop rollout_stop_token_ids rollout_skip_special_tokens"
        " custom_generate_function_path mask_offpolicy_in_partial_rollout rollout_max_context_len eval_max_context_len"
    )
    args = types.SimpleNamespace(
        **dict.fromkeys(f"{names} dynamic_sampling_filter_path rollout_sample_hook_path".split())
    )
    args.rollout_temperature = 1.0
    args.rollout_top_p = 0.99
    args.rollout_top_k = 2
    args.rollout_max_response_len = 8
    args.use_top_p_replay = True
    generator = Generator(args, types.SimpleNamespace(generate=generate, streams=False, aborts=0), None)
    for params in (None, generator.sampling_params()):
        sample = Sample(0, 0)
        group = types.SimpleNamespace(row=None, pending=[sample], rendered=types.SimpleNamespace(tokens=[1]))
        assert asyncio.run(generator.generate(group, params)) == [[sample]]
        assert sample.status is Status.COMPLETED and (sample.rollout_top_p_token_ids == [3, 4]) == (params is None)
    assert asked[0]["top_logprobs_num"] == 2 and "top_logprobs_num" not in asked[1]
