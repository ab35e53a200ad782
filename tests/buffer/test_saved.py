"""Saved rollouts. Contracts: 1. what is saved is loaded as it was, from a file or from a run's folder; 2. a share has
the groups of the begin and of the end; 3. what is no saved rollout is named and refused, a pickle unread; 4. adopted
groups are trajectories of the run that adopts them: new indices, siblings together, and an account that balances, also
after a kill between.
"""

import collections
import dataclasses
import pickle
import types

import pytest

from slime_cli.buffer import batch as batches
from slime_cli.buffer import saved
from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.sources.open import NoPrompts
from slime_cli.buffer.types import Sample, Span, Status
from slime_cli.errors import DataError
from slime_cli.manifests import layout


def sample(index: int, group: int, part: int = 0) -> Sample:
    return Sample(
        index,
        group,
        prompt="?",
        tokens=[1, 5, 6],
        response="ab",
        response_length=2,
        label="7",
        reward=float(index),
        loss_mask=[1, 0],
        rollout_log_probs=[-1.0, 0.0],
        weight_versions=["v000002"],
        spans=[Span(1, "v000002"), Span(1, None)],
        part=part,
        status=Status.COMPLETED,
        metadata={"k": [group]},
    )


SAMPLES = [sample(20 + i, 7 + i // 2) for i in range(8)]  # four groups of two


def made(folder, samples=SAMPLES):
    cursors = batches.Cursors({}, {})
    ages = {s.index: 0 for s in samples}
    given = dict(groups=4, dropped=collections.Counter(), cursors=cursors, reward_key=None, ages=ages)
    return batches.new(folder, 3, list(samples), **given)


def options(template, share=None):
    return types.SimpleNamespace(load_debug_rollout_data=str(template), load_debug_rollout_data_subsample=share)


def test_what_is_saved_is_loaded_as_it_was(tmp_path):
    batch = made(tmp_path)
    saved.save(str(tmp_path / "deep" / "{rollout_id:03d}.parquet"), batch)
    for template in ("deep/{rollout_id:03d}.parquet", "rollouts/{rollout_id:06d}"):
        groups, path = saved.load(options(tmp_path / template), 3)
        assert [len(group) for group in groups] == [2, 2, 2, 2] and path.endswith(".parquet")
        assert [s for group in groups for s in group] == batch.samples


@pytest.mark.parametrize(("share", "kept"), [(1.0, [7, 8, 9, 10]), (0.5, [7, 10]), (0.75, [7, 8, 10]), (0.01, [7])])
def test_a_share_has_the_begin_and_the_end(tmp_path, share, kept):
    made(tmp_path)
    groups, _ = saved.load(options(tmp_path / "rollouts/{rollout_id:06d}", share), 3)
    assert [group[0].group_index for group in groups] == kept


class Runs:
    ran = False

    def __reduce__(self):
        return exec, ("from tests.buffer.test_saved import Runs; Runs.ran = True",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps({"rollout_id": 0, "samples": [Runs()]}), "is a pickle"),
        (b"PK\x03\x04archive", "is a pickle"),
        (b"PAR1 and no more", "cannot be read"),
        (b"", "is no Parquet file"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_saved_rollout_is_named_and_refused(tmp_path, content, said):
    path = tmp_path / "0.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        saved.load(options(tmp_path / "{rollout_id}.pt"), 0)
    assert str(path) in caught.value.message and "--save-debug-rollout-data" in caught.value.fix
    assert not Runs.ran


def test_a_sample_that_does_not_fit_the_model_is_named(tmp_path):
    made(tmp_path)
    with pytest.raises(DataError, match="token 6 is beyond"):
        saved.load(options(tmp_path / "rollouts/{rollout_id:06d}"), 3, lambda s: "token 6 is beyond")


def buffer_of(folder) -> DataBuffer:
    dealing = dict(samples_per_prompt=9, shuffle=False, seed=0, render=lambda row: None, gate=Gate(4, None))
    return DataBuffer(Journal(folder / layout.JOURNAL), NoPrompts(), folder=folder, **dealing)


def test_adopted_groups_are_the_run_s_own_and_the_account_balances(tmp_path):
    fanned_out = [sample(20, 7), sample(20, 7, part=1), sample(21, 7), sample(5, 9)]
    buffer = buffer_of(tmp_path)
    groups = buffer.adopt([fanned_out[:3], fanned_out[3:]], "there.parquet")
    batch = buffer.make(buffer.supervised(0, groups))
    assert [(s.index, s.group_index, s.part) for s in batch.samples] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (2, 1, 0)]
    for mine, theirs in zip(batch.samples, fanned_out, strict=True):
        ids = dict(index=theirs.index, group_index=theirs.group_index, rollout_id=None)
        assert dataclasses.replace(mine, **ids) == theirs
    later = buffer.make(buffer.supervised(1, buffer.adopt([fanned_out[3:]], "there.parquet")))
    assert [(s.index, s.group_index) for s in later.samples] == [(3, 2)]
    ledger = buffer.ledger()
    assert ledger.balanced and (ledger.dispatched, ledger.in_flight) == (4, {"BATCHED": 4})
    buffer.close()


def test_killed_before_the_batch_was_made_it_adopts_again_and_drops_what_it_had(tmp_path):
    buffer = buffer_of(tmp_path)
    buffer.adopt([SAMPLES[:2], SAMPLES[2:4]], "there.parquet")
    buffer.close()
    buffer = buffer_of(tmp_path)
    batch = buffer.make(buffer.supervised(0, buffer.adopt([SAMPLES[:2]], "there.parquet")))
    assert [s.index for s in batch.samples] == [4, 5]
    ledger = buffer.ledger()
    assert ledger.balanced and ledger.dropped == {"adopted_again": 4} and ledger.in_flight == {"BATCHED": 2}
    buffer.close()
