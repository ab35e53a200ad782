"""The engine's side of a sync through shared memory, on a model of parameters."""

import base64
import importlib
import pickle
import types

import pytest
import torch

from slime_cli import engine_api
from slime_cli.weights import buckets, loading, shared


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 5)
        self.second = torch.nn.Linear(5, 3, dtype=torch.bfloat16)
        self.tied = torch.nn.Linear(3, 5, bias=False)
        self.tied.weight = self.first.weight
        self.across = torch.nn.Parameter(torch.zeros(4, 6).t())
        self.one = torch.nn.Parameter(torch.zeros(()))


def wanted(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    named = dict(Model().named_parameters())
    return {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in named.items()}


def load(model: torch.nn.Module, weights: dict[str, torch.Tensor], limit: int = 1 << 20) -> int:
    """All of them, as an engine gets them; how many buckets that were."""
    buffers = buckets.Buffers(lambda size: shared.Shared(size, torch.device("cpu")))
    pieces = ((name, [tensor]) for name, tensor in weights.items())
    sent = 0
    for bucket in buckets.packed(pieces, buffers, limit=limit, most=1 << 20, mixed=True):
        text = shared.placed(bucket.memory.opening, shared.described(bucket.places))
        loading.load(model, pickle.loads(base64.b64decode(text)))
        sent += 1
    return sent


@pytest.mark.parametrize("limit", [1 << 20, 64, 1])
def test_every_tensor_gets_its_bits_in_every_sync(limit):
    model = Model()
    for seed in (1, 2, 1):
        sent = load(model, wanted(seed), limit)
        assert (sent > 1) == (limit < 1 << 20)
        for name, tensor in model.named_parameters():
            assert torch.equal(tensor, wanted(seed)[name]), name
        assert model.across.stride() == (1, 6), "the engine's own tensors, where they were"


def test_a_tied_tensor_has_all_of_its_names():
    model = Model()
    load(model, {"tied.weight": torch.ones(5, 3)})
    assert model.first.weight.eq(1).all()


def test_a_parameter_that_was_put_in_another_ones_place_gets_what_comes_next():
    model = Model()
    load(model, wanted(1))
    old = model.first.bias
    model.first.bias = torch.nn.Parameter(torch.zeros(5))
    load(model, wanted(2))
    assert torch.equal(model.first.bias, wanted(2)["first.bias"])
    assert torch.equal(old, wanted(1)["first.bias"])


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("third.weight", torch.zeros(5, 3)),
        ("first.weight", torch.zeros(3, 5)),
        ("first.weight", torch.zeros(5, 3).bfloat16()),
    ],
)
def test_what_the_model_has_not_or_not_so_is_named(name, tensor):
    with pytest.raises(ValueError, match=rf"weights for {name}, .*: the engine has"):
        load(Model(), {name: tensor})


def test_engines_find_the_loader_by_its_name():
    module, _, name = engine_api.LOADER.rpartition(".")
    found: types.ModuleType = importlib.import_module(module)
    assert getattr(found, name) is loading.load
