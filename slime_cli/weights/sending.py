"""The present weights of the trainer's ranks into engines, straight from memory. Each rank keeps one :class:`Sender`.

Rank 0 speaks to the engines. While they load one bucket the ranks gather and write the next, and engines of one rank
with slime's loader load a bucket while it is written (:mod:`slime_cli.weights.announcing`): two buckets of
``--update-weight-buffer-size`` bound the memory. Every rank goes through all tensors whatever becomes of the engines,
for the others wait for it in each gathering; engines that failed are the answer, not an error. An engine with a part of
the new weights is spoilt: the caller has marked it before (:mod:`slime_cli.weights.transports.memory`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed

from slime_cli import engine_api
from slime_cli.weights import buckets, engine_tensors, shared
from slime_cli.weights.announcing import Announcing, Known
from slime_cli.weights.group import BrokenError, Group
from slime_cli.weights.held import Rank
from slime_cli.weights.posting import Posting
from slime_cli.weights.transport import Receiver, Sending

Named = Iterable[tuple[str, torch.Tensor]]
LOAD_TIMEOUT = 300.0
"""Seconds for an engine to load one bucket."""


class Sender:
    """``device``: where this rank's tensors are."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._shared = buckets.Buffers(lambda size: shared.Shared(size, device))
        self._own = buckets.Buffers(lambda size: _Own(size, device))
        self._group: Group | None = None
        self._session = engine_api.Session(LOAD_TIMEOUT)
        self._known = Known()
        self._texts: dict[int, tuple[str, list[shared.Opening], list[buckets.Place], list[str]]] = {}

    def send(self, named: Named, how: Sending, most: int) -> dict[str, str]:
        """On rank 0 the engines that have not all of ``named``, by URL, each with the reason. ``most``: bytes of all
        tensors together at most."""
        if how.way == "nccl":
            return self._over_group(named, how, most) if self.rank == 0 else _through(named)
        together = any(receiver.sources != (0,) * receiver.ranks for receiver in how.receivers)
        return self._into_shared(named, how, most, together) if together or self.rank == 0 else _through(named)

    def free(self) -> None:
        """The memory of both buffers is given back, until the next :meth:`send`."""
        self._known.counts.wait_closed()
        self._shared.free()
        self._own.free()

    def part(self) -> None:
        """Leaves the group with engines, if there is one."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _into_shared(self, named: Named, how: Sending, most: int, together: bool) -> dict[str, str]:
        """Buffers that engines open. ``together``: those of several ranks, each of which has all tensors."""
        urls = [receiver.url for receiver in how.receivers]
        posting = Posting(urls if self.rank == 0 else [], "/update_weights_from_tensor", self._session)
        sources = {receiver.url: receiver.sources for receiver in how.receivers}
        loaders = all(receiver.loader for receiver in how.receivers)
        form = ("placed" if loaders else "direct") if how.tensors else "flattened"
        body = {"load_format": _FORMS[form][0], "flush_cache": False}
        pieces = _as_kept(named, how.tensors) if how.tensors else _whole(named)
        ahead = self._ahead(how, posting, body) if form == "placed" and not together else None
        packed = buckets.packed(pieces, self._shared, limit=how.buffer, most=most, mixed=True, follower=ahead)
        try:
            for number, bucket in enumerate(packed):
                bucket.memory.written()
                if ahead is not None:
                    ahead.done(bucket)
                else:
                    openings = _of_all(bucket.memory.opening) if together else [bucket.memory.opening]
                    if self.rank == 0:
                        texts = self._described(number, openings, bucket, form)
                        posting.put(lambda url, texts=texts: body | {_TENSORS: [texts[s] for s in sources[url]]})
                posting.wait(1)
                if together:  # the buffer that is filled next is free
                    distributed.barrier()
            posting.wait(0)
            return posting.failed | (ahead.end(posting.left) if ahead else {})
        finally:
            if ahead is not None:
                ahead.give_up()
            posting.close()

    def _ahead(self, how: Sending, posting: Posting, body: dict[str, Any]) -> Announcing:
        """What tells engines of buckets before they are written."""

        def post(text: Callable[[str], str]) -> None:
            posting.put(lambda url: body | {_TENSORS: [text(url)]})

        layouts = self._known.layouts((how.buffer, how.tensors))
        return Announcing(self._known, layouts, [receiver.url for receiver in how.receivers], post)

    def _described(
        self, number: int, openings: list[shared.Opening], bucket: buckets.Bucket[shared.Shared], form: str
    ) -> list[str]:
        """What engines get, by the rank whose buffer they open. The same bucket is the same in every sync."""
        known = self._texts.get(number)
        if known is None or known[:3] != (form, openings, bucket.places):
            texts = [_FORMS[form][1](opening, bucket) for opening in openings]
            known = form, openings, bucket.places, texts
            self._texts[number] = known
        return known[3]

    def _over_group(self, named: Named, how: Sending, most: int) -> dict[str, str]:
        """Broadcasts to all engines at once: they have the weights together, or none of them has."""
        left = iter(named)
        posting = Posting([r.url for r in how.receivers], "/update_weights_from_distributed", self._session)
        try:
            group = self._joined(how.receivers)
            for bucket in buckets.packed(_whole(left), self._own, limit=how.buffer, most=most, mixed=False):
                described = {
                    "names": [place.name for place in bucket.places],
                    "dtypes": [str(place.dtype).removeprefix("torch.") for place in bucket.places],
                    "shapes": [list(place.shape) for place in bucket.places],
                    "group_name": group.name,
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                }
                bucket.memory.written()
                posting.put(lambda url, described=described: described)
                group.broadcast(bucket.memory.flat[: bucket.size], posting)
                posting.wait(1)
                if posting.failed:
                    raise BrokenError("; ".join(posting.failed.values()))
            posting.wait(0)
            if posting.failed:
                raise BrokenError("; ".join(posting.failed.values()))
            return {}
        except BrokenError as error:
            self.part()
            _through(left)
            return {r.url: posting.failed.get(r.url, f"the group broke: {error}") for r in how.receivers}
        finally:
            posting.close()

    def _joined(self, receivers: tuple[Receiver, ...]) -> Group:
        """The group with these engines: the one of the last time, unless others are to be reached now."""
        if self._group is not None and self._group.receivers != receivers:
            self.part()
        if self._group is None:
            self._group = Group(receivers, self.device)
        return self._group


_TENSORS = "serialized_named_tensors"
_FORMS = {
    "flattened": ("flattened_bucket", shared.flattened),
    "direct": ("direct", shared.direct),
    "placed": (engine_api.LOADER, lambda opening, bucket: shared.placed(opening, shared.described(bucket.places))),
}
"""SGLang's load format, and what writes a bucket so."""


class _Own:
    """A buffer that nobody else opens."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)

    def written(self) -> None:
        """Returns when the bytes are there for another thread's stream."""
        if self.flat.is_cuda:
            torch.cuda.current_stream(self.flat.device).synchronize()


def _through(named: Named) -> dict[str, str]:
    """Takes part in the gathering, and nothing else."""
    for _ in named:
        pass
    return {}


def _whole(named: Named) -> Iterator[buckets.Pieces]:
    """The model's tensors as they are."""
    for name, tensor in named:
        yield name, [tensor]


def _as_kept(named: Named, tensors: Sequence[str]) -> Iterator[buckets.Pieces]:
    """The tensors of an engine of one rank."""
    alone = Rank()
    for name, parts in engine_tensors.assembled(named, tensors):
        pieces = engine_tensors.pieces(parts, alone)
        assert pieces is not None  # it was proven
        yield name, pieces


def _of_all(opening: shared.Opening) -> list[shared.Opening]:
    """By rank."""
    found: list = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, opening)
    return found
