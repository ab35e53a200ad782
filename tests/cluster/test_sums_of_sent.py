"""A trainer rank sums up what it sends, where that is asked for, and answers with it once."""

import contextlib
import types

import torch

from slime_cli.cluster.trainer_actor import TrainerRank
from slime_cli.weights import sums, tensor_sums
from slime_cli.weights.held import Rank
from slime_cli.weights.transport import Asked, Sending

WEIGHTS = {f"model.layers.{i}.mlp.down_proj.weight": torch.full((4, 4), float(i)) for i in range(4)}
ASKED = Asked(tuple(WEIGHTS), "auto", "Tiles", (Rank(),), 7)


class Stub(TrainerRank):
    """The second of two ranks, with weights that are counted each time that they are gathered."""

    def __init__(self):
        self.rank, self.world_size = 1, 2
        self.tracer = types.SimpleNamespace(span=lambda *_, **__: contextlib.nullcontext())
        self.trainer = types.SimpleNamespace(policy=types.SimpleNamespace(model=[]))
        self.sender = types.SimpleNamespace(send=lambda named, how, most: dict.fromkeys(dict(named), "sent"))
        self.summed = None
        self.gathered = 0
        self.factor = 1.0

    def _present(self, step):
        assert step == 7
        self.gathered += 1
        return ((name, tensor * self.factor) for name, tensor in WEIGHTS.items())


def want(factor=1.0):
    scaled = {name: tensor * factor for name, tensor in WEIGHTS.items()}
    return tensor_sums.of(scaled.items(), list(WEIGHTS)[1::2], "auto", sums.Tiles, [Rank()])


def test_sums_of_what_was_sent_are_there_and_are_given_once():
    rank = Stub()
    assert set(rank.send(Sending("ipc", (), 7, asked=ASKED))) == set(WEIGHTS), "all of them reach the sender"
    assert rank.sums(ASKED) == want() and rank.gathered == 1
    rank.factor = 3.0
    assert rank.sums(ASKED) == want(3.0) and rank.gathered == 2, "the second time of what there is then"


def test_another_question_is_answered_anew():
    rank = Stub()
    rank.send(Sending("ipc", (), 7, asked=ASKED))
    other = Asked(ASKED.names, "float32", "Sha", ASKED.ranks, 7)
    assert rank.sums(other) != want() and rank.gathered == 2


def test_nothing_is_summed_up_unasked():
    rank = Stub()
    rank.send(Sending("ipc", (), 7))
    assert rank.summed is None
