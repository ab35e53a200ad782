"""How much is shown of an engine's weights, that the result says no more than that, and what it costs.

1. An engine is verified only where every one of its tensors was compared with a published one.
2. Other weights than published, or than another engine's, are an error.
3. Nothing is read where sums cannot be compared; else only what the engine fuses, pads or casts, a chunk at a time.
4. What is read is itself compared with what was published.
5. So are the shards of tensor parallel ranks, and what a GPU sums up; quantised weights and layouts that are not known
   never count as verified.
"""

import hashlib
import tracemalloc

import pytest
import torch

from slime_cli import manifests
from slime_cli.errors import DataError, EngineError
from slime_cli.manifests import proof
from slime_cli.weights import folder as folders
from slime_cli.weights import publish, reading, sums, verification
from slime_cli.weights.held import FUSED
from tests import checkpoints
from tests.scripted_engine import ScriptedEngine

PREFIX = "model.layers.0."
WEIGHTS = {"model.norm.weight": torch.arange(16.0), "model.embed_tokens.weight": torch.ones(64, 16)}
SUMS = {name: publish.checksum(tensor) for name, tensor in WEIGHTS.items()}
OPAQUE = dict.fromkeys(SUMS, "0123456789abcdef")


def published(folder, weights):
    model = checkpoints.write(folder / "model", vocab_size=64)
    publish.write(iter(weights.items()), folder / "v000001", hf_checkpoint=str(model), version="v1", step=1, run="r")
    return folders.opened(folder / "v000001")


@pytest.fixture
def version(tmp_path):
    return published(tmp_path, WEIGHTS)


def engine_with(sums, device="cpu", ranks=1, **server_info):
    engine = ScriptedEngine("model", device=device, **server_info)
    engine.answers["/model_info"]["weight_version"] = "v1"
    engine.answers["/weights_checker"] = {"ranks": [{"checksums": sums}] * ranks}
    return engine


class Counting:
    """A version in memory that counts the bytes of its chunks that are alive."""

    name = "v1"

    def __init__(self, tensors, chunk):
        self.tensors = tensors
        self.chunk = chunk
        self.alive = self.most = 0
        self.read = []
        described = {
            name: manifests.Tensor(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                file="",
                checksum=publish.checksum(tensor),
            )
            for name, tensor in tensors.items()
        }
        self.manifest = manifests.Weights(
            version="v1", base=None, encoding="full", tensors=described, training_step=1, run="r"
        )

    def chunks(self, tensor):
        self.read.append(tensor)
        data = self.tensors[tensor].reshape(-1).view(torch.uint8).numpy().tobytes()
        for at in range(0, len(data), self.chunk):
            yield Chunk(data[at : at + self.chunk], self)


class Chunk(bytes):
    def __new__(cls, data, counter):
        made = super().__new__(cls, data)
        made.counter = counter
        counter.alive += len(data)
        counter.most = max(counter.most, counter.alive)
        return made

    def __del__(self):
        self.counter.alive -= len(self)


# -- 1, 2 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engines", "kinds", "verdict"),
    [
        ([dict(sums=SUMS)], ["checksum"], True),
        ([dict(sums=SUMS), dict(sums=SUMS)], ["checksum", "checksum"], True),
        ([dict(sums=OPAQUE, device="cuda")], ["version"], None),
        ([dict(sums=OPAQUE, device="cuda")] * 2, ["agreement", "agreement"], "agreement"),
        ([dict(sums=SUMS, ranks=2)], ["version"], None),
        ([dict(sums=SUMS | {"rotary.cache": "00"})], ["version"], None),  # nothing published is known to be that tensor
    ],
)
def test_engines_count_as_verified_only_where_every_tensor_was_compared(version, engines, kinds, verdict):
    made = [engine_with(**given) for given in engines]
    proofs = verification.verify(version, [e.url for e in made])
    assert [p.kind for p in proofs] == kinds and proof.verified(proofs) == verdict


def test_no_engine_is_no_proof():
    assert proof.verified([]) is None


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        (
            [dict(sums=SUMS | {"model.norm.weight": "00"})],
            "holds other weights than v1 in 1 tensors, model.norm.weight",
        ),
        ([dict(sums=SUMS), dict(sums=SUMS | {"model.norm.weight": "00"})], "holds other weights than"),
        (
            [dict(sums=OPAQUE, device="cuda"), dict(sums=OPAQUE | {"model.norm.weight": "00"}, device="cuda")],
            "hold different weights",
        ),
    ],
)
def test_other_weights_are_an_error(version, engines, said):
    with pytest.raises(EngineError, match=said):
        verification.verify(version, [engine_with(**given).url for given in engines])


def test_another_version_is_an_error(version):
    engine = engine_with(SUMS)
    engine.answers["/model_info"]["weight_version"] = "v0"
    with pytest.raises(EngineError, match="reports weight version 'v0', not 'v1'"):
        verification.verify(version, [engine.url])


def test_an_engine_that_somebody_else_has_updated_meanwhile_is_noticed():
    engine = engine_with(SUMS)
    verification.unchanged({engine.url: "v1"})
    with pytest.raises(
        EngineError, match="'v1', which this run did not send .its last were 'v000002'.: another process"
    ):
        verification.unchanged({engine.url: "v000002"})


def test_fused_tensors_are_the_parts_one_under_the_other_also_after_a_cast():
    q, k, v = (torch.randn(n, 24, dtype=torch.float32) for n in (48, 16, 16))
    gate, up = torch.randn(32, 24), torch.randn(32, 24)
    names = dict(zip(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), (q, k, v, gate, up), strict=True))
    counting = Counting({f"{PREFIX}{name}.weight": tensor for name, tensor in names.items()}, chunk=4 * 7)
    for dtype in (torch.float32, torch.bfloat16):
        held = {
            f"{PREFIX}qkv_proj.weight": publish.checksum(torch.cat([q, k, v]).to(dtype)),
            f"{PREFIX}gate_up_proj.weight": publish.checksum(torch.cat([gate, up]).to(dtype)),
        }
        engine = engine_with(held, dtype=str(dtype).removeprefix("torch."))
        assert [p.kind for p in verification.verify(counting, [engine.url])] == ["checksum"]
        for name in held:
            other = publish.checksum(torch.cat([k, q, v]).to(dtype))
            swapped = engine_with(held | {name: other}, dtype=str(dtype).removeprefix("torch."))
            with pytest.raises(EngineError, match=name):
                verification.verify(counting, [swapped.url])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_the_vocabulary_is_padded_as_the_engine_does(name, dtype):
    tensor = torch.randn(70, 8)
    padded = torch.cat([tensor, torch.zeros(58, 8)]).to(dtype)
    engine = engine_with({name: publish.checksum(padded)}, dtype=str(dtype).removeprefix("torch."))
    proofs = verification.verify(Counting({name: tensor}, 64), [engine.url])
    assert [p.kind for p in proofs] == ["checksum"]


def test_a_tensor_that_the_engine_keeps_in_its_own_dtype_is_still_compared():
    """A router's bias stays float32 in an engine that computes in bfloat16."""
    bias, weight = torch.randn(8), torch.randn(4, 4, dtype=torch.bfloat16)
    held = {"gate.bias": publish.checksum(bias), "o.weight": publish.checksum(weight)}
    counting = Counting({"gate.bias": bias, "o.weight": weight}, 64)
    engine = engine_with(held, dtype="bfloat16")
    assert [p.kind for p in verification.verify(counting, [engine.url])] == ["checksum"]
    other = engine_with(held | {"gate.bias": publish.checksum(bias + 1)}, dtype="bfloat16")
    with pytest.raises(EngineError, match="gate.bias"):
        verification.verify(counting, [other.url])


# -- 3 -----------------------------------------------------------------------------------------------------------------


def test_nothing_is_read_where_sums_cannot_be_compared_or_are_known():
    tensors = {f"{PREFIX}{part}.weight": torch.ones(8, 8) for part in ("q_proj", "k_proj", "v_proj", "o_proj")}
    counting = Counting(tensors, 64)
    names = (f"{PREFIX}qkv_proj.weight", f"{PREFIX}o_proj.weight")
    for given in (dict(device="cuda"), dict(ranks=2)):
        assert verification.verify(counting, [engine_with(dict.fromkeys(names, "ab"), **given).url])
    held = {names[1]: publish.checksum(tensors[names[1]])}
    assert [p.kind for p in verification.verify(counting, [engine_with(held).url])] == ["checksum"]
    assert counting.read == []


def test_two_chunks_of_a_model_are_in_memory_at_most_and_each_tensor_is_read_once_for_all_engines():
    layers = [f"model.layers.{n}." for n in range(20)]
    parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    tensors = {f"{layer}{part}.weight": torch.randn(64, 64) for layer in layers for part in parts}
    counting = Counting(tensors, chunk=1024)
    held = {}
    for layer in layers:
        for fused, names in FUSED.items():
            joined = torch.cat([tensors[f"{layer}{name}.weight"] for name in names])
            held[f"{layer}{fused}.weight"] = publish.checksum(joined)
    proofs = verification.verify(counting, [engine_with(held).url for _ in range(3)])
    assert {p.kind for p in proofs} == {"checksum"}
    assert sorted(counting.read) == sorted(tensors) and counting.most <= 2 * counting.chunk


def test_verifying_from_a_disk_takes_a_few_chunks_of_memory_whatever_the_size_of_a_tensor(tmp_path):
    big = {
        f"{PREFIX}{name}.weight": torch.zeros(24, 1 << 20, dtype=torch.bfloat16) for name in ("gate_proj", "up_proj")
    }
    version = published(tmp_path, big)  # 48 MiB each
    whole = hashlib.sha256()
    for _ in range(2 * 24):
        whole.update(bytes(4 << 20))
    held = {f"{PREFIX}gate_up_proj.weight": reading.shortened(whole)}
    engine = engine_with(held, dtype="float32")  # cast: twice the size
    tracemalloc.start()
    try:
        assert [p.kind for p in verification.verify(version, [engine.url])] == ["checksum"]
        assert tracemalloc.get_traced_memory()[1] < 8 * folders.CHUNK < 2 * big[f"{PREFIX}up_proj.weight"].nbytes
    finally:
        tracemalloc.stop()


# -- 4 -----------------------------------------------------------------------------------------------------------------


def test_bytes_that_changed_on_the_disk_since_they_were_published_prove_nothing(tmp_path):
    weights = {f"{PREFIX}{name}.weight": torch.ones(8, 8) for name in ("gate_proj", "up_proj")}
    version = published(tmp_path, weights)
    file = version.path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    spoilt = torch.frombuffer(bytearray(data[-2 * 8 * 8 * 4 :]), dtype=torch.float32)  # what an engine would load
    engine = engine_with({f"{PREFIX}gate_up_proj.weight": publish.checksum(spoilt)})
    with pytest.raises(DataError, match="is not what was published"):
        verification.verify(version, [engine.url])
    file.write_bytes(bytes(data[:-8]))
    with pytest.raises(DataError, match="model.safetensors: no .*gate_proj"):
        verification.verify(version, [engine.url])


# -- 5 -----------------------------------------------------------------------------------------------------------------


def on_gpu(tensor):
    summed = sums.Tiles()
    summed.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return summed.text()


def two_ranks(tensors, add):
    """What two tensor parallel ranks hold of a layer, summed up by ``add``, as ``/weights_checker`` answers."""
    q, k, v, o = (tensors[f"{PREFIX}{part}.weight"] for part in ("q_proj", "k_proj", "v_proj", "o_proj"))
    ranks = []
    for place in range(2):
        found = {
            f"{PREFIX}qkv_proj.weight": add(torch.cat([part.chunk(2)[place] for part in (q, k, v)])),
            f"{PREFIX}o_proj.weight": add(o.chunk(2, 1)[place]),
            "model.norm.weight": add(tensors["model.norm.weight"]),
        }
        told = {"tp_rank": place, "tp_size": 2}
        ranks.append({"checksums": found, "parallelism_info": told})
    return {"ranks": ranks}


@pytest.mark.parametrize(("device", "add"), [("cuda", on_gpu), ("cpu", publish.checksum)])
def test_shards_of_tensor_parallel_ranks_are_compared_on_every_device(tmp_path, device, add):
    shapes = {"q_proj": (16, 8), "k_proj": (8, 8), "v_proj": (8, 8), "o_proj": (8, 16)}
    tensors = {f"{PREFIX}{part}.weight": torch.randn(shape) for part, shape in shapes.items()}
    tensors["model.norm.weight"] = torch.randn(8)
    model = checkpoints.write(tmp_path / "model", num_key_value_heads=2)
    engine = engine_with({}, device=device, dtype="bfloat16", version="0.5.16")
    engine.answers["/model_info"]["model_path"] = str(model)
    engine.answers["/weights_checker"] = answer = two_ranks(tensors, lambda t: add(t.bfloat16()))
    version = Counting(tensors, 128)
    assert [p.kind for p in verification.verify(version, [engine.url])] == ["checksum"]
    assert sorted(set(version.read)) == sorted(tensors)
    other = tensors | {f"{PREFIX}k_proj.weight": tensors[f"{PREFIX}k_proj.weight"].roll(1, 0)}
    changed = two_ranks(other, lambda t: add(t.bfloat16()))
    engine.answers["/weights_checker"] = {"ranks": [answer["ranks"][0], changed["ranks"][1]]}
    with pytest.raises(EngineError, match="qkv_proj"):
        verification.verify(version, [engine.url])


@pytest.mark.parametrize(
    "given", [dict(version="0.5.99"), dict(enable_dp_attention=True), dict(ep_size=2), dict(moe_dense_tp_size=1)]
)
def test_an_engine_of_another_layout_or_function_does_not_count_as_verified(version, given):
    engine = engine_with(OPAQUE, device="cuda", **({"version": "0.5.16"} | given))
    assert [p.kind for p in verification.verify(version, [engine.url])] == ["version"]


def test_heads_that_do_not_divide_are_padded_on_a_cpu_in_a_way_that_is_not_known(tmp_path):
    tensors = {f"{PREFIX}o_proj.weight": torch.randn(8, 16), f"{PREFIX}q_proj.weight": torch.randn(16, 8)}
    told = [{"tp_rank": place, "tp_size": 2} for place in range(2)]
    engine = engine_with({}, dtype="float32")
    engine.answers["/model_info"]["model_path"] = str(checkpoints.write(tmp_path / "model", num_key_value_heads=1))
    engine.answers["/weights_checker"] = {
        "ranks": [{"checksums": dict.fromkeys(tensors, "00"), "parallelism_info": one} for one in told]
    }
    assert [p.kind for p in verification.verify(Counting(tensors, 64), [engine.url])] == ["version"]


def test_quantised_weights_do_not_count_as_verified():
    tensors = {"o_proj.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "norm.weight": torch.ones(4)}
    engine = engine_with(dict.fromkeys(tensors, "00"), dtype="bfloat16")
    assert [p.kind for p in verification.verify(Counting(tensors, 64), [engine.url])] == ["version"]
