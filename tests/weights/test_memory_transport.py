"""Weights from memory into scripted engines, over shared buffers and over a group.

1. Every engine holds every bit, in buckets of the size that was asked for, is proven, and reports the version.
2. An engine that has a part of a version says so, and the next sync restores it.
3. An engine that refuses, dies or never answers ends in an error that names it, soon; others are not left waiting.
4. Engines that cannot take weights from memory are refused before anything is changed.
"""

import dataclasses
import json
import time

import pytest
import torch

from slime_cli import engine_api
from slime_cli.errors import EngineError, UsageError
from slime_cli.options.groups import SlimeOptions
from slime_cli.weights import group, transports
from slime_cli.weights.transports import memory
from slime_cli.weights.transports.memory import Memory
from tests.memory_engine import MemoryEngine
from tests.ranks import MemoryRank

WAYS = ("ipc", "nccl")


def weights(factor=1.0):
    torch.manual_seed(0)
    shapes = {"model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,), "model.o_proj.weight": (3, 5)}
    made = {name: torch.randn(shape) * factor for name, shape in shapes.items()}
    made["model.k_norm.weight"] = torch.randn(7).to(torch.bfloat16)
    return made | {"model.q_norm.weight": torch.randn(2, 2)}


@pytest.fixture
def learner():
    made = MemoryRank(weights(), step=3)
    yield made
    made.part()


@pytest.fixture
def engines():
    made = [MemoryEngine(weights()), MemoryEngine(weights())]
    yield made
    for engine in made:
        engine.end()


def urls(engines):
    return [engine.url for engine in engines]


def sync(transport, learner, engines):
    version = transport.write(learner, learner.step)
    transport.send(version, urls(engines), flush=True)
    return transport.verify(version, urls(engines))


def holds(engine, wanted):
    return all(torch.equal(engine.weights[name], tensor) for name, tensor in wanted.items())


# -- 1 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("buffer", "least"), [(1 << 30, 1), (100, 3)])
def test_every_engine_holds_every_bit_and_proves_it(learner, engines, way, buffer, least):
    transport = Memory(way, buffer=buffer)
    for step in (3, 4, 5):
        learner.step, learner.weights = step, weights(factor=step)
        proofs = sync(transport, learner, engines)
        assert {(p.version, p.kind) for p in proofs} == {(f"v{step:06d}", "checksum")}
        for engine in engines:
            assert holds(engine, learner.weights)
            assert engine.version == f"v{step:06d}"
    assert all(len(engine.buckets) >= 3 * least for engine in engines)
    if way == "ipc":
        forms = engines[0].formats
        assert forms[0] == "flattened_bucket" and forms[-1] == "direct", "what was proven is used"
        assert forms == sorted(forms, reverse=True)
    assert [version for version in engines[0].versions if version.endswith(memory.SPOILT)] == [
        f"v{step:06d}{memory.SPOILT}" for step in (3, 4, 5)
    ]
    transport.close()


def test_each_rank_of_an_engine_gets_a_payload_of_its_own(learner):
    engine = MemoryEngine(weights(), ranks=2)
    transport = Memory("ipc", buffer=100)
    transport.send(transport.write(learner, 3), [engine.url], flush=False)
    assert holds(engine, learner.weights)
    assert not any("flush" in path for path, _ in engine.posted)
    engine.end()


@pytest.mark.parametrize("begins", [True, False])
def test_an_engine_that_wants_to_know_where_an_update_begins_is_told(learner, begins):
    engine = MemoryEngine(weights())
    if begins:
        engine.answers |= {"/begin_weight_update": {}, "/end_weight_update": {}}
    transport = Memory("ipc")
    for _ in range(2):
        sync(transport, learner, [engine])
    told = [path.split("_")[0] for path, _ in engine.posted if path.endswith("_weight_update")]
    assert told == (["/begin", "/end"] * 3 if begins else ["/begin"]), "asked once, with an empty bracket"
    engine.end()


def test_nothing_can_be_sent_again_and_it_says_so(learner):
    transport = transports.chosen(SlimeOptions(update_weight_transport="ipc"), None, 3, print)
    assert transport.name == "ipc" and not transport.can_go_back and transport.kept(3) is None
    transport.prune(set())
    transport.close()


# -- 2 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_with_a_part_says_so_and_the_next_sync_restores_it(learner, engines, way):
    bad, good = engines
    transport = Memory(way, buffer=100)
    sync(transport, learner, engines)
    learner.step, learner.weights = 4, weights(factor=2.0)
    bad.broken_after = len(bad.buckets) + 2
    version = transport.write(learner, 4)
    with pytest.raises(EngineError) as caught:
        transport.send(version, urls(engines), flush=True)
    assert bad.url in caught.value.message
    assert bad.version == f"v000004{memory.SPOILT}"
    if way == "ipc":
        assert good.version == "v000004" and holds(good, learner.weights), "it has nothing to do with the other"
    else:
        assert good.version == f"v000004{memory.SPOILT}"
    bad.broken_after = None
    bad.formats = []
    assert {p.kind for p in sync(transport, learner, engines)} == {"checksum"}
    assert all(holds(engine, learner.weights) for engine in engines)
    assert set(bad.formats) == ({"flattened_bucket"} if way == "ipc" else set()), "nothing counts as proven any more"


@pytest.mark.parametrize("way", WAYS)
def test_the_proof_finds_spoilt_weights(learner, engines, way):
    transport = Memory(way)
    sync(transport, learner, engines)
    for engine in engines:
        engine.weights["model.norm.weight"][3] += 1
    version = transport.write(learner, 3)
    with pytest.raises(EngineError, match="holds other weights than v000003 in 1 tensors, model.norm.weight"):
        transport.verify(version, urls(engines))
    assert {p.kind for p in sync(transport, learner, engines)} == {"checksum"}


# -- 3 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_dies_in_the_middle_is_named(learner, engines, way):
    gone, good = engines
    gone.broken_after, gone.gone = 2, True
    transport = Memory(way, buffer=100)
    begun = time.monotonic()
    with pytest.raises(EngineError) as caught:
        transport.send(transport.write(learner, 3), urls(engines), flush=True)
    assert time.monotonic() - begun < 30 and gone.url in caught.value.message
    assert good.version == ("v000003" if way == "ipc" else f"v000003{memory.SPOILT}")


def test_an_engine_that_does_not_join_ends_in_an_error(learner, engines, monkeypatch):
    monkeypatch.setattr(group, "PATIENCE", 3.0)
    engines[1].answers["refuses to join"] = True
    transport = Memory("nccl")
    begun = time.monotonic()
    with pytest.raises(EngineError, match="init_weights_update_group answered 404"):
        transport.send(transport.write(learner, 3), urls(engines), flush=True)
    assert time.monotonic() - begun < 30
    engines[1].answers["refuses to join"] = False
    assert {p.kind for p in sync(transport, learner, engines)} == {"checksum"}, "another group"


def test_an_engine_that_takes_no_part_in_a_broadcast_is_given_up(learner, engines, monkeypatch):
    monkeypatch.setattr(group, "PATIENCE", 1.5)
    waits = engines[1]
    waits.answers["/update_weights_from_distributed"] = lambda body: time.sleep(3) or {"success": True}
    transport = Memory("nccl", buffer=100)
    with pytest.raises(EngineError, match="the group broke"):
        transport.send(transport.write(learner, 3), urls(engines), flush=True)
    assert waits.version == f"v000003{memory.SPOILT}"


def test_a_group_is_kept_for_the_same_engines_and_made_anew_for_others(learner, engines):
    transport = Memory("nccl")
    for chosen in (engines, engines, engines[:1], engines):
        sync(transport, learner, chosen)
    joined = [body["group_name"] for path, body in engines[0].posted if path == "/init_weights_update_group"]
    left = [body["group_name"] for path, body in engines[0].posted if path == "/destroy_weights_update_group"]
    assert len(set(joined)) == 3 and left == joined[:2]
    transport.close()
    left = [body["group_name"] for path, body in engines[0].posted if path == "/destroy_weights_update_group"]
    assert left == joined


# -- 4 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", [{"pp_size": 2}, {"dp_size": 2}, {"quantization": "fp8"}])
def test_engines_with_other_layouts_are_refused_before_anything_is_changed(learner, way, option):
    engine = MemoryEngine(weights(), **option)
    transport = Memory(way)
    with pytest.raises(UsageError, match="takes weights from files alone"):
        transport.send(transport.write(learner, 3), [engine.url], flush=True)
    assert engine.posted == []
    engine.end()


def test_a_group_reaches_no_layers_that_draft(learner):
    engine = MemoryEngine(weights(), speculative_algorithm="EAGLE", speculative_draft_model_path="model")
    transport = Memory("nccl")
    with pytest.raises(UsageError, match="would keep old weights"):
        transport.send(transport.write(learner, 3), [engine.url], flush=True)
    assert engine.posted == []
    engine.end()


def test_memory_is_shared_on_one_machine(learner, engines, monkeypatch):
    for owner, name, answer in (
        (learner, "devices", lambda: ["another-machine/"]),
        (memory.addresses, "is_mine", lambda host: False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, answer)
            transport = Memory("ipc")
            with pytest.raises(UsageError, match="are not all on this machine"):
                transport.send(transport.write(learner, 3), urls(engines), flush=True)
    assert not any(engine.posted for engine in engines)


def test_on_gpus_each_rank_of_an_engine_has_the_trainer_rank_on_the_same_one(monkeypatch):
    monkeypatch.setattr(memory.hardware, "gpus", lambda: ["aa", "bb", "cc"])
    here = [f"{memory.os.uname().nodename}/{gpu}" for gpu in ("cc", "bb")]
    engine = MemoryEngine(weights(), ranks=2, device="cuda", base_gpu_id=1)
    assert memory.receiver(engine.url, here, "ipc").sources == (1, 0)
    with pytest.raises(UsageError, match="NCCL takes no two processes there"):
        memory.receiver(engine.url, here, "nccl")
    engine.answers["/server_info"]["base_gpu_id"] = 0
    with pytest.raises(UsageError, match="computes on GPU aa, where no trainer rank is"):
        memory.receiver(engine.url, here, "ipc")
    assert memory.receiver(engine.url, here, "nccl").sources == (0, 0), "a group needs no GPU in common"
    engine.end()


def test_what_an_engine_gets_is_no_larger_for_larger_tensors(learner):
    sizes = {}
    for rows in (10, 100_000):
        learner.weights = {"model.a.weight": torch.zeros(rows, 8)}
        engine = MemoryEngine(learner.weights)
        sync(Memory("ipc"), learner, [engine])
        sizes[rows] = max(len(json.dumps(body)) for path, body in engine.posted if "from_tensor" in path)
        engine.end()
    assert sizes[100_000] < sizes[10] + 100 < 2000


@pytest.mark.parametrize(("known", "form"), [((), "direct"), (("theirs", engine_api.LOADER), engine_api.LOADER)])
def test_an_engine_that_keeps_tensors_fused_gets_them_so_once_that_is_proven(learner, known, form):
    torch.manual_seed(1)
    parts = {
        f"model.layers.0.self_attn.{name}_proj.weight": torch.randn(rows, 4) for name, rows in zip("qkv", (4, 2, 2))
    }
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    learner.weights = parts | {"model.embed_tokens.weight": torch.randn(60, 4)}

    class Fusing(MemoryEngine):
        def _load(self, named, held):
            got = dict(named)
            if fused not in got:
                got[fused] = torch.cat([got.pop(part) for part in parts])
                rows = got["model.embed_tokens.weight"]
                got["model.embed_tokens.weight"] = torch.cat([rows, torch.zeros(4, 4)])
            super()._load(list(got.items()), held)

    held = {fused: torch.zeros(8, 4), "model.embed_tokens.weight": torch.zeros(64, 4)}
    engine = Fusing(held, custom_weight_loader=list(known))
    transport = Memory("ipc")
    for _ in range(2):
        learner.weights = {name: tensor + 1 for name, tensor in learner.weights.items()}
        (shown,) = sync(transport, learner, [engine])
        assert shown.kind == "checksum"
    assert engine.formats == ["flattened_bucket", form]
    assert torch.equal(engine.weights[fused], torch.cat([learner.weights[part] for part in parts]))
    assert engine.weights["model.embed_tokens.weight"][60:].eq(0).all(), "the engine's padding"
    engine.end()


def test_tensors_of_which_the_bytes_alone_may_agree_are_left_to_the_engine(learner):
    learner.weights = {"model.layers.0.linear_attn.conv1d.weight": torch.randn(4, 1, 3)}
    engine = MemoryEngine(learner.weights)
    transport = Memory("ipc")
    for _ in range(2):
        (shown,) = sync(transport, learner, [engine])
        assert shown.kind == "checksum"
    assert engine.formats == ["flattened_bucket"] * 2
    engine.end()


def test_what_gpus_will_be_asked_is_said_with_the_weights(learner):
    engine = MemoryEngine(weights())
    transport = Memory("ipc")
    sync(transport, learner, [engine])
    asked = transport._asked
    assert asked is not None and asked.function == "Sha" and set(asked.names) == set(learner.weights)
    learner.step = 4
    sync(transport, learner, [engine])
    assert learner.sendings[-1].asked is None, "a processor has enough to do with sending"
    transport._asked = dataclasses.replace(asked, function="Tiles")
    learner.step = 5
    transport.send(transport.write(learner, 5), [engine.url], flush=True)
    assert learner.sendings[-1].asked == dataclasses.replace(asked, function="Tiles", step=5)
    engine.end()
