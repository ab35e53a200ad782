"""Examples from the buffer to a batch: a conversation that fans out is one trajectory."""

import numpy as np
import torch

from slime_cli.buffer.buffer import DataBuffer
from slime_cli.buffer.columns import TrainBatch
from slime_cli.buffer.gate import Gate
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import PromptRow
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.supervised import examples
from slime_cli.training.algorithm.losses import sample_weights
from tests.rollout.rendering import DROPS, TURNS


class Rows(list):
    name = "rows.jsonl"


TALKS = [TURNS[:3], TURNS, [*TURNS, TURNS[1], {"role": "assistant", "content": "8 9"}]]


def test_siblings_reach_the_batch_together_and_share_their_denominator(render, tmp_path):
    rows = Rows(PromptRow(talk, None, {}, "rows.jsonl", i) for i, talk in enumerate(TALKS, 1))
    changed = render(DROPS.replace("[-1]", "[:0]"))
    journal = Journal(tmp_path / "journal.sqlite")
    buffer = DataBuffer(
        journal,
        rows,
        folder=tmp_path,
        gate=Gate(3, None),
        samples_per_prompt=1,
        shuffle=False,
        seed=0,
        render=Boundary().checked(changed.example),
        on_bad_row="fail",
        say=print,
    )
    groups = examples(buffer, Boundary(), 3)
    batch = buffer.make(buffer.supervised(0, groups))
    ledger = journal.ledger()
    buffer.close()
    assert [(s.index, s.part) for s in batch.samples] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    columns = TrainBatch.from_samples(batch.samples)
    trained_N = np.array([sum(s.effective_mask()) for s in batch.samples])
    weights = sample_weights(torch.tensor(trained_N), torch.tensor(columns.sample_index_N), 3, per_token=False)
    assert trained_N.tolist() == [2, 2, 2, 2, 2, 4]
    assert torch.allclose(weights, torch.tensor([1 / 6, 1 / 12, 1 / 12, 1 / 24, 1 / 24, 1 / 24]))
    assert ledger.balanced and (ledger.dispatched, ledger.in_flight) == (3, {"BATCHED": 3})
