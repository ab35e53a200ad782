"""A scripted engine that takes weights from memory, as stock SGLang does: it opens buffers, and joins groups.

``by_rank`` is what its ranks hold, ``weights`` what the first does; its sums are of those. ``broken_after``: so many
buckets are loaded, and then it refuses, or is gone (``gone``).
"""

import base64
import datetime
import io
import json
import pickle
import threading

import torch
from torch import distributed

from slime_cli import engine_api
from slime_cli.weights import loading, publish
from tests.scripted_engine import ScriptedEngine

ALLOWED = ("builtins", "functools", "torch", "types")
"""Modules that SGLang's own unpickler allows, of those that matter here."""


class Unpickler(pickle.Unpickler):
    def find_class(self, module_name, global_name):
        assert module_name.split(".")[0] in ALLOWED, f"{module_name}.{global_name} is refused by an engine"
        return super().find_class(module_name, global_name)


def _opened(found, form):
    if form == "direct":
        return found
    assert form == "flattened_bucket"
    flat = found["flattened_tensor"]
    return [(m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)) for m in found["metadata"]]


def _model(held: dict[str, torch.Tensor]) -> torch.nn.Module:
    """What slime's loader knows of a model, over the same memory."""
    made = torch.nn.Module()
    for name, tensor in held.items():
        made._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
    return made


class MemoryEngine(ScriptedEngine):
    def __init__(self, weights: dict[str, torch.Tensor], *, ranks: int = 1, **server_info):
        super().__init__("model", version="0.5.16", tp_size=ranks, **server_info)
        self.ranks = ranks
        self.hold(weights)
        self.broken_after: int | None = None
        self.gone = False
        self.buckets: list[list[str]] = []
        self.formats: list[str] = []
        self.announced: list[loading.Announced | None] = []
        """How far buckets for slime's loader were written."""
        self.versions: list[str] = []
        self._groups: dict = {}
        self._turn = threading.Lock()
        for path, answer in (
            ("/update_weights_from_tensor", self._from_tensor),
            ("/update_weights_from_distributed", self._from_group),
            ("/init_weights_update_group", self._join),
            ("/destroy_weights_update_group", self._leave),
            ("/update_weight_version", self._name),
            ("/weights_checker", self._sums),
        ):
            self.answers[path] = answer
        self.answers["/flush_cache?timeout=0.2"] = {}

    def hold(self, weights: dict[str, torch.Tensor]) -> None:
        """A model of tensors as these, of zeros."""
        self.by_rank = [{name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(self.ranks)]
        self.weights = self.by_rank[0]
        self._models = [_model(held) for held in self.by_rank]

    @property
    def version(self) -> str:
        return self.answers["/model_info"]["weight_version"]

    def end(self) -> None:
        self.shutdown()
        self.server_close()

    def _fails(self) -> bool:
        if self.broken_after is None or len(self.buckets) < self.broken_after:
            return False
        if self.gone:
            raise ConnectionResetError("the engine is gone")
        return True

    def _load(self, named, held) -> None:
        """Into the weights ``held`` by one of its ranks."""
        self.buckets.append([name for name, _ in named])
        for name, tensor in named:
            assert held[name].shape == tensor.shape
            held[name].copy_(tensor)

    def _from_tensor(self, body):
        with self._turn:
            if self._fails():
                return None
            assert len(body["serialized_named_tensors"]) == self.ranks and body["flush_cache"] is False
            self.formats.append(body["load_format"])
            for rank, text in enumerate(body["serialized_named_tensors"]):
                found = Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
                if body["load_format"] == engine_api.LOADER:
                    self._by_loader(rank, found)
                else:
                    self._load(_opened(found, body["load_format"]), self.by_rank[rank])
            return {"success": True}

    def _by_loader(self, rank, found) -> None:
        (((text, _, announced), _),) = found
        self.announced.append(announced)
        self.buckets.append([place[0] for place in json.loads(text)])
        loading.load(self._models[rank], found)

    def _from_group(self, body):
        with self._turn:
            if self._fails():
                return None
            shapes = zip(body["shapes"], body["dtypes"], strict=True)
            tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
            self._groups[body["group_name"]].broadcast(flat, 0).wait()
            at = 0
            for tensor in tensors:
                size = tensor.nbytes
                tensor.copy_(flat[at : at + size].view(tensor.dtype).reshape(tensor.shape))
                at += size
            self._load(list(zip(body["names"], tensors, strict=True)), self.weights)
            return {"success": True}

    def _join(self, body):
        if self.answers.get("refuses to join"):
            return None
        name, size = body["group_name"], body["world_size"]
        assert body["backend"] == "gloo"
        patience = datetime.timedelta(seconds=3)
        store = distributed.TCPStore(body["master_address"], body["master_port"], size, False, patience)
        for prefix in (name, f"{name}/", "cpu/"):
            store = distributed.PrefixStore(prefix, store)
        try:
            self._groups[name] = distributed.ProcessGroupGloo(store, body["rank_offset"], size, patience)
        except RuntimeError:
            return None
        return {"success": True}

    def _leave(self, body):
        self._groups.pop(body["group_name"], None)
        return {"success": True}

    def _name(self, body):
        assert body["abort_all_requests"] is False
        self.versions.append(body["new_version"])
        self.answers["/model_info"] = self.answers["/model_info"] | {"weight_version": body["new_version"]}
        return {"success": True}

    def _sums(self, body):
        sums = {name: publish.checksum(tensor) for name, tensor in self.weights.items()}
        return {"ranks": [{"checksums": sums}]}
