"""Versions pushed by hand over engines that read what lies in the folder: what each of them holds, after what.

1. After a push every engine holds the version, proven; the same push again sends nothing.
2. After a push that failed the engines that answer hold what they held before, or the error says what each holds.
3. A push that was killed is said by the next one, which finishes it.
4. Back is the version before, as often as there is one.
"""

import pytest
import torch

from slime_cli import manifests
from slime_cli.errors import DataError, EngineError
from slime_cli.weights import publish
from slime_cli.weights.folder import opened
from slime_cli.weights.pushing import Pushing
from slime_cli.weights.transports.delta import Delta
from tests import checkpoints
from tests.ranks import Ranks
from tests.scripted_engine import ReadingEngine


class Served:
    """Two engines, and versions beside their endpoint."""

    def __init__(self, folder):
        self.folder = folder
        self.model = checkpoints.write(folder / "model", vocab_size=64)
        self.engines = [ReadingEngine(self.model), ReadingEngine(self.model)]
        self.said = []

    def version(self, name, value):
        weights = {
            "model.norm.weight": torch.full((16,), float(value)),
            "model.embed_tokens.weight": torch.ones(64, 16),
        }
        target = self.folder / "weights" / name
        publish.write(weights.items(), target, hf_checkpoint=str(self.model), version=name, step=value, run="r")
        return opened(target)

    def pushing(self):
        endpoint = self.engines[0].endpoint(self.engines[1])
        urls = [engine.url for engine in self.engines]
        return Pushing(self.folder / "sync.json", endpoint, urls, self.said.append)

    def push(self, version):
        return self.pushing().push(version)

    def held(self):
        return [engine.version for engine in self.engines]

    def loads(self):
        return [sum(path == "/update_weights_from_disk" for path, _ in engine.posted) for engine in self.engines]


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)


def refusing(engine, name):
    """The engine does not load the version of this name."""
    load = engine.answers["/update_weights_from_disk"]

    def answer(body):
        refused = {"success": False, "message": "out of memory"}
        return refused if body["weight_version"] == name else load(body)

    engine.answers["/update_weights_from_disk"] = answer


def dies_at(engine, name):
    """The engine is gone once it was asked to load the version of this name."""
    load = engine.answers["/update_weights_from_disk"]

    def answer(body):
        if body["weight_version"] != name:
            return load(body)
        engine.server_close()  # no other connection is taken
        raise OSError("killed")

    engine.answers["/update_weights_from_disk"] = answer


# -- 1 -----------------------------------------------------------------------------------------------------------------


def test_every_engine_holds_what_was_pushed_and_a_second_push_sends_nothing(served):
    version = served.version("v000001", 1)
    for _ in range(2):
        assert [p.kind for p in served.push(version)] == ["checksum"] * 2
        assert served.held() == ["v000001"] * 2 and served.loads() == [1, 1]
    assert "hold v000001 already" in served.said[-1]


def test_other_weights_under_the_same_name_are_sent_to_the_engine_that_has_them(served):
    """Self-test: the proof fails before, and the engine holds every bit afterwards."""
    version = served.version("v000001", 1)
    served.push(version)
    engine = served.engines[1]
    engine.weights["model.norm.weight"][7] = 1.0001
    engine.summed()
    with pytest.raises(EngineError, match="holds other weights than v000001 in 1 tensors, model.norm.weight first"):
        served.pushing().verify(version)
    served.push(version)
    assert served.loads() == [1, 2]
    assert engine.weights["model.norm.weight"].tolist() == [1.0] * 16


def test_a_delta_is_pushed_by_its_chain(served):
    ranks = Ranks(served.model, {"model.norm.weight": torch.ones(16)}, 2)
    transport = Delta(served.folder / "run", 2, encoding="xor", full_interval=9, say=print)
    transport.write(ranks, 1)
    ranks.weights = {"model.norm.weight": torch.arange(16.0)}
    served.push(transport.write(ranks, 2))
    assert served.engines[1].weights["model.norm.weight"].tolist() == list(range(16))
    assert served.held() == ["v000002"] * 2


# -- 2 -----------------------------------------------------------------------------------------------------------------


def test_one_engine_that_refuses_brings_all_back(served):
    served.push(served.version("v000001", 1))
    refusing(served.engines[1], "v000002")
    with pytest.raises(EngineError, match="out of memory; rolled back, engines hold: .* v000001, .* v000001"):
        served.push(served.version("v000002", 2))
    assert served.held() == ["v000001"] * 2
    assert all(engine.weights["model.norm.weight"][0] == 1 for engine in served.engines)
    assert served.pushing().held().name == "v000001"


def test_before_the_first_push_back_is_the_model_that_the_engines_started_with(served):
    refusing(served.engines[0], "v000001")
    with pytest.raises(EngineError, match="rolled back, engines hold: .* default, .* default"):
        served.push(served.version("v000001", 1))
    assert served.held() == ["default"] * 2


def test_an_engine_that_dies_in_the_middle_is_named_and_the_other_is_brought_back(served):
    served.push(served.version("v000001", 1))
    dies_at(served.engines[1], "v000002")
    with pytest.raises(EngineError) as caught:
        served.push(served.version("v000002", 2))
    assert f"{served.engines[1].url} does not answer" in caught.value.message
    assert served.engines[0].version == "v000001" and "rolled back" in caught.value.message


def test_weights_that_arrive_wrong_are_no_success(served):
    def wrong(body):
        answer = load(body)
        if body["weight_version"] == "v000002":
            engine.weights["model.norm.weight"][0] = 99
            engine.summed()
        return answer

    served.push(served.version("v000001", 1))
    engine = served.engines[0]
    load = engine.answers["/update_weights_from_disk"]
    engine.answers["/update_weights_from_disk"] = wrong
    with pytest.raises(EngineError, match="holds other weights than v000002 .*rolled back"):
        served.push(served.version("v000002", 2))
    assert served.held() == ["v000001"] * 2


def test_where_nothing_is_known_of_before_the_engines_are_named_as_they_are(served):
    for engine in served.engines:
        engine.answers["/model_info"] = engine.answers["/model_info"] | {"weight_version": "of-somebody"}
    refusing(served.engines[1], "v000001")
    with pytest.raises(EngineError, match="no version before is known here, .* v000001, .* of-somebody"):
        served.push(served.version("v000001", 1))


# -- 3, 4 --------------------------------------------------------------------------------------------------------------


def test_a_push_that_was_killed_is_finished_by_the_next_one(served):
    served.push(served.version("v000001", 1))
    version = served.version("v000002", 2)

    def killed(body):
        raise KeyboardInterrupt

    pushing = served.pushing()
    pushing._load = lambda version, urls: type(pushing)._load(pushing, version, urls[:1]) or killed(None)
    with pytest.raises(KeyboardInterrupt):
        pushing.push(version)
    assert served.held() == ["v000002", "v000001"]
    with pytest.raises(EngineError, match="hold different versions: .* v000002, .* v000001"):
        served.pushing().held()
    served.push(version)
    assert served.held() == ["v000002"] * 2 and served.loads() == [2, 2]
    assert manifests.read(served.folder / "sync.json", manifests.Synced).pending is None


def test_another_version_in_place_of_one_that_was_not_finished_is_said(served):
    versions = [served.version(f"v00000{n}", n) for n in (1, 2, 3)]
    served.push(versions[0])
    pushing = served.pushing()
    pushing._write(pending=manifests.Pushed(version="v000002", folder=str(versions[1].path)))
    served.push(versions[2])
    assert "a push of v000002 was not finished" in served.said


def test_back_as_often_as_there_is_something_before(served):
    for n in (1, 2):
        served.push(served.version(f"v00000{n}", n))
    assert [p.version for p in served.pushing().rollback()] == ["v000001"] * 2
    assert served.engines[0].weights["model.norm.weight"][0] == 1
    served.pushing().rollback()
    assert served.held() == ["default"] * 2
    with pytest.raises(DataError, match="no version before is recorded"):
        served.pushing().rollback()


def test_what_lies_nowhere_is_not_verified(served):
    for engine in served.engines:
        engine.answers["/model_info"] = engine.answers["/model_info"] | {"weight_version": "of-somebody"}
    with pytest.raises(DataError, match="the engines hold of-somebody, and where that lies is not known here"):
        served.pushing().held()
