"""LoRA adapters under names of their own, over scripted engines that load, unload and answer as SGLang does.

1. An engine gets an adapter under a name that has its version and a digest, and then names the version.
2. The one before is unloaded; what is not this transport's stays, and the same bytes are not loaded twice.
3. What an engine computes is compared with the probe: another number is an error.
4. An engine's refusal is an error with its own words.
"""

import pathlib

import pytest
import torch

from slime_cli import manifests
from slime_cli.errors import EngineError, UsageError
from slime_cli.manifests import layout
from slime_cli.weights import matching, peft, publish
from slime_cli.weights.transport import Part
from slime_cli.weights.transports.adapters import Adapters
from tests.scripted_engine import ScriptedEngine

ADAPTER = manifests.Adapter(rank=2, alpha=4, dropout=0.0, modules=["linear_proj"])
TOKENS = [3, 1, 2]
LOG_PROBS = {1: -1.5, 2: -0.25}


class Learner:
    """Writes one value everywhere, which is the step unless ``value`` is set."""

    value: float | None = None

    def publish(self, folder: str, version: str, how) -> int:
        assert how.encoding == "adapter"
        target = pathlib.Path(folder)
        step = layout.step_of(version) or 0
        matrix = torch.full((2, 4), float(step) if self.value is None else self.value)
        named = {"model.layers.0.o_proj.lora_A.weight": matrix, "model.layers.0.o_proj.lora_B.weight": matrix.T}
        parts = [Part(peft.write(named.items(), target, ADAPTER, "base"), log_probs={1: LOG_PROBS[1]})]
        parts.append(Part({}, log_probs={2: LOG_PROBS[2]}))
        peft.seal(target, parts, TOKENS, publish.described(version, step, "run"))
        return 0


class LoraEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__("model", enable_lora=True, max_lora_rank=8, lora_target_modules=["o_proj", "q_proj"])
        self.loaded = {"of-another": "/x"}
        self.log_probs = list(LOG_PROBS.values())
        self.refuses = ""
        self.answers |= {
            "/load_lora_adapter": self._load,
            "/unload_lora_adapter": self._unload,
            "/update_weight_version": self._name,
            "/generate": self._generate,
            "/flush_cache?timeout=0.2": {},
        }
        self._list()

    def _list(self) -> None:
        models = [{"id": "model", "parent": None}, *({"id": name, "parent": "model"} for name in self.loaded)]
        self.answers["/v1/models"] = {"data": models}

    def _load(self, body):
        if self.refuses:
            return {"success": False, "error_message": self.refuses}
        assert (pathlib.Path(body["lora_path"]) / "adapter_config.json").is_file()
        self.loaded[body["lora_name"]] = body["lora_path"]
        self._list()
        return {"success": True}

    def _unload(self, body):
        del self.loaded[body["lora_name"]]
        self._list()
        return {"success": True}

    def _name(self, body):
        self.answers["/model_info"]["weight_version"] = body["new_version"]
        return {}

    def _generate(self, body):
        assert body["lora_path"] in self.loaded and body["input_ids"] == TOKENS
        entries = [[None, TOKENS[0], None], *([value, 0, None] for value in self.log_probs)]
        return {"meta_info": {"input_token_logprobs": entries}}


@pytest.fixture
def engine():
    found = LoraEngine()
    yield found
    found.shutdown()


@pytest.fixture
def transport(tmp_path):
    return Adapters(tmp_path, 2)


def sent(transport, engine, step, learner=None):
    version = transport.write(learner or Learner(), step)
    transport.send(version, [engine.url], flush=True)
    return version


def test_a_version_is_loaded_under_its_name_and_proven_and_the_one_before_unloaded(transport, engine):
    first = sent(transport, engine, 0)
    assert engine.loaded == {"of-another": "/x", transport.asked_for(first): str(first.path)}
    second = sent(transport, engine, 2)
    name = transport.asked_for(second)
    assert layout.version_of(name) == second.name == "v000002" and name != second.name
    assert engine.loaded == {"of-another": "/x", name: str(second.path)}
    (proof,) = transport.verify(second, [engine.url])
    assert (proof.version, proof.kind, proof.tensors) == ("v000002", "log_probs", 2)


def test_the_same_bytes_are_not_loaded_again_and_others_of_that_version_get_another_name(tmp_path, engine):
    sent(Adapters(tmp_path / "one", 2), engine, 0)
    before = len(engine.posted)
    sent(Adapters(tmp_path / "again", 2), engine, 0)
    assert "/load_lora_adapter" not in [path for path, _ in engine.posted[before:]]
    other = Learner()
    other.value = 7.0
    sent(Adapters(tmp_path / "other", 2), engine, 0, other)
    assert sum(name.startswith("v000000-") for name in engine.loaded) == 2


def test_an_engine_that_computes_something_else_is_named(transport, engine):
    version = sent(transport, engine, 0)
    engine.log_probs[1] += 0.01
    with pytest.raises(EngineError, match=r"log-probabilities of 2 tokens differ by up to 0\.01") as wrong:
        transport.verify(version, [engine.url])
    assert engine.url in wrong.value.message and "--lora-sync merged" in wrong.value.fix
    engine.log_probs[1] = float("nan")
    with pytest.raises(EngineError, match="differ by up to nan"):
        transport.verify(version, [engine.url])


def test_an_engine_of_another_version_is_named(transport, engine):
    version = sent(transport, engine, 0)
    engine.answers["/model_info"]["weight_version"] = "v000009"
    with pytest.raises(EngineError, match="reports weight version 'v000009'"):
        transport.verify(version, [engine.url])


def test_a_refusal_has_the_engines_words(transport, engine):
    engine.refuses = "rank 2 is too large"
    with pytest.raises(EngineError, match=r"/load_lora_adapter: v000000-\w{8}: rank 2 is too large"):
        sent(transport, engine, 0)


def test_what_is_kept_and_pruned(transport):
    for step in (0, 2, 4):
        transport.write(Learner(), step)
    kept = transport.kept(2)
    assert kept and kept.manifest.encoding == "adapter" and transport.kept(6) is None
    transport.prune({"v000000"})
    assert [path.name for path in layout.versions(transport.folder)] == ["v000000", "v000002", "v000004"]
    transport.prune(set())
    assert [path.name for path in layout.versions(transport.folder)] == ["v000002", "v000004"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"max_lora_rank": 16, "lora_target_modules": ["o_proj"]}, "takes ranks up to 8"),
        ({"max_lora_rank": 2, "lora_target_modules": ["o_proj", "up_proj"]}, "takes no adapters beside up_proj"),
    ],
)
def test_engines_that_were_not_started_for_it_are_refused_with_the_options_that_do(engine, wanted, said):
    matching.require_adapters([engine.url], {"max_lora_rank": 8, "lora_target_modules": ["q_proj"]})
    with pytest.raises(UsageError) as refused:
        matching.require_adapters([engine.url], wanted)
    assert said in refused.value.message
    assert f"--sglang-max-lora-rank {wanted['max_lora_rank']}" in refused.value.fix
    engine.answers["/server_info"]["enable_lora"] = None
    with pytest.raises(UsageError, match="serves no LoRA adapters"):
        matching.require_adapters([engine.url], wanted)
