"""Acceptance of drafted tokens, from engines' answers to a rollout's figures."""

import types

import numpy as np
import pytest

from slime_cli.buffer.types import Sample
from slime_cli.hooks.client import keep_drafts
from slime_cli.loop import figures


def answer(tokens: int, **meta: int) -> dict:
    return {"output_ids": [1] * tokens, "meta_info": meta}


def batch(samples: list[Sample]) -> types.SimpleNamespace:
    indices_N = np.arange(len(samples))
    columns = types.SimpleNamespace(rewards_N=np.ones(len(samples)), group_index_N=indices_N, sample_index_N=indices_N)
    return types.SimpleNamespace(
        samples=samples, columns=columns, untold=0, staleness=lambda step, steps: np.zeros(len(samples))
    )


def test_acceptance_is_over_all_drafts_of_a_rollout_not_the_mean_of_answers():
    one, two = Sample(index=0, group_index=0), Sample(index=1, group_index=0)
    drafted = {"spec_verify_ct": 4, "spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 12}
    keep_drafts(one, answer(10, **drafted))
    keep_drafts(one, answer(2, spec_verify_ct=1, spec_num_correct_drafts=1, spec_num_proposed_drafts=3))
    keep_drafts(two, answer(5, spec_verify_ct=5, spec_num_correct_drafts=0, spec_num_proposed_drafts=15))
    found = figures.of_policy(batch([one, two]), 0, 1)
    assert found["spec_accept_rate"] == pytest.approx(7 / 30)
    assert found["spec_accept_length"] == pytest.approx(17 / 10)


def test_engines_that_do_not_draft_have_no_acceptance():
    sample = Sample(index=0, group_index=0, metadata={"rm_type": "math"})
    keep_drafts(sample, answer(10))
    assert sample.metadata == {"rm_type": "math"}
    assert not any(name.startswith("spec_") for name in figures.of_policy(batch([sample]), 0, 1))
