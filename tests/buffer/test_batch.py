"""A rollout as columns and as a file: nothing lost on the way, nothing that does not fit let in."""

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from slime_cli.buffer.batch_files import read_parquet, to_parquet
from slime_cli.buffer.columns import TrainBatch
from slime_cli.buffer.types import Sample, Status

SHAPE = [2, 2]


def sample(index: int, tokens: int, response: int, **more) -> Sample:
    return Sample(
        index=index,
        group_index=index // 2,
        tokens=list(range(tokens)),
        response_length=response,
        reward=0.5,
        status=Status.COMPLETED,
        rollout_log_probs=[-1.0] * response,
        **more,
    )


def routed(index: int, tokens: int, response: int) -> Sample:
    chosen = np.arange(4 * (tokens - 1)).reshape(-1, *SHAPE) + 100 * index
    return sample(
        index, tokens, response, rollout_routed_experts=chosen.astype("<i2").tobytes(), routed_experts_shape=SHAPE
    )


def test_a_batch_survives_its_file(tmp_path):
    samples = [routed(0, 4, 2), routed(1, 5, 1)]
    path = tmp_path / "samples.parquet"
    path.write_bytes(to_parquet(samples))
    assert read_parquet(path) == samples


def test_chosen_experts_have_a_row_a_token_and_the_last_one_is_anybody_s():
    routes_TLK = TrainBatch.from_samples([routed(0, 4, 2), routed(1, 5, 1)]).routed_experts_TLK
    assert routes_TLK.shape == (9, *SHAPE) and routes_TLK.dtype == np.int16
    assert routes_TLK[4, 0, 0] == 100 and routes_TLK[2, 1, 1] == 11
    assert (routes_TLK[[3, 8]] == [0, 1]).all()


def test_without_chosen_experts_there_is_no_column():
    assert TrainBatch.from_samples([sample(0, 4, 2)]).routed_experts_TLK is None


def test_some_samples_without_experts_are_named():
    with pytest.raises(ValueError, match="sample 1 has no rollout_routed_experts"):
        TrainBatch.from_samples([routed(0, 4, 2), sample(1, 4, 2)])


def test_experts_for_another_number_of_tokens_are_refused():
    bad = routed(0, 4, 2)
    bad.rollout_routed_experts = bad.rollout_routed_experts[:-2]
    with pytest.raises(ValueError, match="22 bytes for 4 tokens"):
        TrainBatch.from_samples([bad])


SIBLINGS = [
    Sample(
        index=4,
        group_index=2,
        part=part,
        prompt="p",
        tokens=[1, 2, 3],
        response="r",
        response_length=2,
        reward=reward,
        loss_mask=[0, 1],
        rollout_log_probs=[-0.5, -0.25],
        rollout_id=7,
        status=Status.COMPLETED,
        metadata={"agent": part},
    )
    for part, reward in enumerate([1.0, {"score": 0.5}])
]


def test_parquet_keeps_siblings(tmp_path):
    (tmp_path / "samples.parquet").write_bytes(to_parquet(SIBLINGS))
    assert read_parquet(tmp_path / "samples.parquet") == SIBLINGS


def test_a_file_of_before_there_were_siblings_is_read(tmp_path):
    path = tmp_path / "samples.parquet"
    path.write_bytes(to_parquet(SIBLINGS))
    pq.write_table(pq.read_table(path).drop_columns("part"), path)
    assert read_parquet(path) == [dataclasses.replace(s, part=0) for s in SIBLINGS]


def test_siblings_share_their_trajectory_in_a_batch():
    batch = TrainBatch.from_samples([*SIBLINGS, dataclasses.replace(SIBLINGS[0], index=5)], reward_key="score")
    np.testing.assert_array_equal(batch.sample_index_N, [4, 4, 5])
    np.testing.assert_array_equal(batch.rewards_N, [1.0, 0.5, 1.0])
    np.testing.assert_array_equal(batch.group_index_N, [2, 2, 2])
