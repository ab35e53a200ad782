"""Which parts of a rank's networks are on the device, and which wait in the host's memory (``--offload-train``).

Megatron's parameters, main gradients and shards are views of a few large buffers, so it is storages that move: their
bytes go to pinned host memory and they are resized to nothing, which leaves every view, hook and optimizer state as it
is, and a later resize gives them memory again. Invariants: what comes back has the bytes that went; gradients have no
bytes worth keeping between two rollouts and come back as zeros; a pass over a part that is away is refused, since a
kernel would read from no address.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from slime_cli.hardware import device as hardware
from slime_cli.training.network import chained
from slime_cli.training.network.network import Network

PARTS = ("weights", "gradients", "optimizer")
FORGOTTEN = "gradients"
"""The part that is made anew."""

Storage = torch.UntypedStorage


class Residence:
    """``networks``: all of this rank. ``moves``: bytes are moved in fact, as on a GPU; on a CPU there is no other
    memory, and only who may compute changes."""

    def __init__(self, networks: Iterable[Network], moves: bool | None = None) -> None:
        self.networks = list(networks)
        self.moves = hardware.find().kind == "cuda" if moves is None else moves
        self._away: dict[str, list[tuple[Storage, int, torch.Tensor | None]]] = {}
        self._host: dict[tuple[str, int], torch.Tensor] = {}
        """Pinned memory is slow to get, so it is kept from one rollout to the next."""

    @property
    def away(self) -> frozenset[str]:
        return frozenset(self._away)

    def require(self, what: str, parts: Sequence[str] = PARTS) -> None:
        """Raises RuntimeError where ``what`` is asked for while one of ``parts`` is away."""
        if missing := [part for part in parts if part in self._away]:
            raise RuntimeError(f"{what} while {' and '.join(missing)} of the trainer wait in the host's memory")

    def offload(self, parts: Sequence[str]) -> int:
        """Bytes that the device has more afterwards. Raises RuntimeError for a part that is away already."""
        self.require(f"offloading {', '.join(parts)}", parts)
        freed = 0
        for part in parts:
            moved: list[tuple[Storage, int, torch.Tensor | None]] = []
            for number, storage in enumerate(self._storages(part) if self.moves else ()):
                size = storage.nbytes()
                moved.append((storage, size, None if part == FORGOTTEN else self._copied(storage, (part, number))))
                freed += size
            if self.moves:
                _wait()
            for storage, _, _ in moved:
                storage.resize_(0)
            self._away[part] = moved
        if self.moves and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return freed

    def onload(self, parts: Sequence[str]) -> None:
        """The parts are on the device again. Raises RuntimeError for one that is there."""
        if there := [part for part in parts if part not in self._away]:
            raise RuntimeError(f"{' and '.join(there)} of the trainer are on the device already")
        for part in parts:
            for storage, size, host in self._away[part]:
                storage.resize_(size)
                bytes_ = _bytes(storage)
                bytes_.zero_() if host is None else bytes_.copy_(host[:size], non_blocking=True)
            if self.moves:
                _wait()
            del self._away[part]

    def _copied(self, storage: Storage, place: tuple[str, int]) -> torch.Tensor:
        size = storage.nbytes()
        host = self._host.get(place)
        if host is None or len(host) < size:
            pinned = torch.cuda.is_available()
            host = self._host[place] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        host[:size].copy_(_bytes(storage), non_blocking=True)
        return host

    def _storages(self, part: str) -> list[Storage]:
        """The part's storages on the device, each once; what a part before it has is that one's (an optimizer in
        float32 steps the weights themselves)."""
        device = self.networks[0].device
        before: set[int] = set()
        for name in PARTS:
            tensors = [tensor for network in self.networks for tensor in _tensors(network, name)]
            storages = [tensor.untyped_storage() for tensor in tensors if tensor.device == device]
            found = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
            if name == part:
                return [storage for key, storage in found.items() if key not in before]
            before |= found.keys()
        raise ValueError(part)


def _tensors(network: Network, part: str) -> Iterator[torch.Tensor]:
    if part == "weights":
        yield from (tensor for _, tensor in network.parameters())
        for module in network.model:
            yield from (parameter.data for parameter in module.parameters())
    elif part == "gradients":
        for module in network.model:
            for name in ("buffers", "expert_parallel_buffers"):  # of Megatron's DDP, where it wraps the model
                found = getattr(module, name, ())
                yield from (buffer.grad_data for buffer in (() if callable(found) else found))
    else:
        for inner in chained.inner_optimizers(network.optimizer):
            made = getattr(inner, "optimizer", None)
            if made is not None:
                yield from (parameter.data for group in made.param_groups for parameter in group["params"])
                for state in made.state.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportCallIssue]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
