"""The ranks as one, over a scripted Ray: who is asked, in which words, and whose answer counts."""

import types
from typing import Any

import pytest
import ray

from slime_cli.cluster.learner import Begun, Learner, Trained
from slime_cli.weights.transport import Writing


class Method:
    def __init__(self, rank: "Rank", name: str) -> None:
        self.rank = rank
        self.name = name

    def remote(self, *arguments: Any) -> Any:
        self.rank.asked.append((self.name, *arguments))
        return self.rank.answers.get(self.name)


class Rank:
    """An actor: remembers what it is asked, and answers from a table."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple] = []

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


def learner(*ranks: Rank) -> Learner:
    fake = types.SimpleNamespace(
        get=list, put=lambda value: ("stored", value), exceptions=ray.exceptions, __name__="ray"
    )
    return Learner(fake, ranks)


def test_a_phase_begins_on_every_rank_at_the_address_of_rank_0_which_is_asked_once():
    begun = Begun(5, "cpu", "")
    ranks = [Rank(address=("host", 7), begin=begun), Rank(begin=Begun(6, "cpu", ""))]
    found = learner(*ranks)
    assert found.begin(["--lr", "1"], "settings", "model") == begun
    assert found.begin([], "settings", "model", ["--critic"]) == begun
    begins = [("begin", ["--lr", "1"], "settings", "model", None, ("host", 7))]
    begins.append(("begin", [], "settings", "model", ["--critic"], ("host", 7)))
    assert ranks[0].asked == [("address",), *begins] and ranks[1].asked == begins


@pytest.mark.parametrize("reporting", [0, 1])
def test_a_rollout_is_stored_once_and_the_rank_that_reports_says_the_step(reporting):
    ranks = [Rank(), Rank()]
    ranks[reporting].answers["train"] = Trained(3, {"loss": 1.0})
    assert learner(*ranks).train("batch") == Trained(3, {"loss": 1.0})
    assert all(rank.asked == [("train", ("stored", "batch"))] for rank in ranks)


def test_a_checkpoint_is_durable_when_it_is_on_every_rank_and_rank_0_alone_removes_one():
    ranks = [Rank(saved=True, save="folder", load=4), Rank(saved=False, save="folder", load=4)]
    found = learner(*ranks)
    assert found.save("root") == "folder" and found.load("path", weights_only=True) == 4
    assert found.saved(wait=False) is False
    found.remove(["old"])
    found.keep("reference")
    found.load_published("folder")
    everybody = [
        ("save", "root"),
        ("load", "path", True),
        ("saved", False),
        ("keep", "reference", None),
        ("load_published", "folder"),
    ]
    assert [a for a in ranks[0].asked if a != ("remove", ["old"])] == ranks[1].asked == everybody
    assert ("remove", ["old"]) in ranks[0].asked
    ranks[1].answers["saved"] = True
    assert found.saved(wait=True) is True


def test_a_version_is_prepared_and_sealed_by_rank_0_and_written_by_all():
    ranks = [Rank(publish="part 0", seal=100), Rank(publish="part 1")]
    how = Writing(encoding="xor", base="v000000")
    assert learner(*ranks).publish("target", "v000001", how) == 100
    assert ranks[0].asked == [
        ("prepare", "target", how),
        ("publish", "target", how),
        ("seal", "target", "v000001", how, ["part 0", "part 1"]),
    ]
    assert ranks[1].asked == [("publish", "target", how)]
