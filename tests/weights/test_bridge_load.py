"""A Megatron parameter that no tensor of the HF checkpoint gave is an error, never the value it was made with."""

import math
import types

import pytest
import torch

from slime_cli.errors import DataError
from slime_cli.weights.bridge import Bridge


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("local_tokens_per_expert", torch.zeros(4), persistent=False)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace()
        self.share_embeddings_and_output_weights = False
        self.embedding = torch.nn.Embedding(4, 2)
        self.output_layer = torch.nn.Linear(2, 4)
        self.router = Router()


def load(model: torch.nn.Module, value: float = 1.0, but: tuple[str, ...] = (), rows: int | None = None) -> None:
    """As megatron-bridge does: it writes what it finds and says nothing of the rest."""

    def load_hf_weights(models):
        with torch.no_grad():
            for name, tensor in [*models[0].named_parameters(), *models[0].named_buffers()]:
                if name not in but:
                    tensor[:rows].fill_(value)

    bridge = object.__new__(Bridge)
    bridge._source = "DIR"
    bridge._bridge = types.SimpleNamespace(load_hf_weights=load_hf_weights)
    bridge.load([model])


def test_what_is_given_is_loaded():
    model = Model()
    load(model)
    assert all((tensor == 1).all() for tensor in model.state_dict().values())
    load(model, but=("router.expert_bias", "router.local_tokens_per_expert"))  # not parameters


@pytest.mark.parametrize("name", ["embedding.weight", "output_layer.bias"])
def test_what_is_not_given_is_named(name):
    with pytest.raises(DataError, match=f"DIR: no tensor gave Megatron's {name}, or"):
        load(Model(), but=(name,))


def test_what_is_given_in_part_or_is_not_a_number_is_named():
    with pytest.raises(DataError, match="Megatron's embedding.weight and 2 more"):
        load(Model(), rows=3)
    with pytest.raises(DataError, match="not a number"):
        load(Model(), value=math.nan)
