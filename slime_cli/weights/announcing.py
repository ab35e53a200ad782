"""Buckets that engines are told of before they are written, so that request, writing and loading overlap.

A bucket has the same tensors at the same places in every sync. So what it had in the sync before is announced, and the
loader in an engine (:mod:`slime_cli.weights.loading`) copies each part of it while the next is written. What turns out
to be otherwise is given up: the loader leaves that bucket, and the sender sends it and all that follow once they are
written, as in a first sync. Called by the rank that sends.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence

import torch

from slime_cli.weights import buckets, progress, shared

PART = 16 << 20
"""Bytes that are worth a part of their own. Each costs the writer a wait for its device."""
MOST = 8
"""Parts of a bucket: when all are written, the loader has the last one left to copy."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The tensors of a bucket, and their places."""

    places: list[buckets.Place]
    _views: "weakref.WeakKeyDictionary[shared.Shared, buckets.Expected]" = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    """By buffer: they are gone with it."""

    def expected(self, memory: shared.Shared) -> buckets.Expected:
        """The tensors in a buffer."""
        found = self._views.get(memory)
        if found is None:
            found = self._views[memory] = [(place, _views(memory, place)) for place in self.places]
        return found

    @functools.cached_property
    def text(self) -> str:
        """As the loader reads it."""
        return shared.described(self.places)

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """For each part, how many tensors are in it and in those before. Parts are of about equal size."""
        last, size = len(self.places), self.places[-1].end
        parts = min(max(size // PART, 1), MOST)
        found: list[int] = []
        reached = 0
        for number, place in enumerate(self.places, 1):
            if place.end < size and (now := place.end * parts // size) > reached:
                found.append(number)
                reached = now
        return (*found, last)


def _views(memory: shared.Shared, place: buckets.Place) -> Sequence[torch.Tensor]:
    whole = memory.flat[place.begin : place.end].view(place.dtype).view(place.shape)
    return whole.split(place.rows) if place.rows else [whole]


class Known:
    """The state that a sender keeps from one sync to the next."""

    def __init__(self) -> None:
        self.counts = progress.Written()
        self.reached: set[str] = set()
        """URLs of engines that can open the counts."""
        self._of: object = None
        self._layouts: list[Layout] = []

    def layouts(self, of: object) -> list[Layout]:
        """The last sync's buckets, to be kept up. ``of``: on which tensors and limits they depend; where those are not
        the last sync's, nothing is known."""
        if self._of != of:
            self._of, self._layouts = of, []
        return self._layouts


class Announcing:
    """One sync, as :func:`slime_cli.weights.buckets.packed` tells of it. ``layouts``: of ``known``; ``engines``: URLs;
    ``post``: sends each engine what a function gives for its URL."""

    def __init__(
        self, known: Known, layouts: list[Layout], engines: Sequence[str], post: Callable[[Callable[[str], str]], None]
    ) -> None:
        self._known = known
        self._counts = known.counts
        self._layouts = layouts
        self._numbers = {url: number for number, url in enumerate(engines)}
        self._post = post
        self._number = -1
        """The bucket that is being written."""
        self._now: Layout | None = None
        """The layout that engines were told for it; None if they were told nothing."""
        self._tensors = self._parts = 0
        """How many of it are written."""
        self._whole = 0
        """Parts of all buckets that were written as they were announced."""
        self._as_known = known.reached.issuperset(engines)
        self._counts.begin(len(engines))

    def begin(self, memory: shared.Shared) -> buckets.Expected:
        self._number += 1
        if not self._as_known or self._number >= len(self._layouts):
            return ()
        layout = self._layouts[self._number]
        if layout.places[-1].end > memory.flat.numel():
            return ()
        self._now, self._tensors, self._parts = layout, 0, 0
        self._tell(memory, layout, self._counts.announce(len(layout.ends)))
        return layout.expected(memory)

    def _tell(self, memory: shared.Shared, layout: Layout, before: int | None) -> None:
        """``before``: parts before those of this bucket; None where it is written."""

        def text(url: str) -> str:
            announced = self._counts.path, self._numbers[url], before, layout.ends
            return shared.placed(memory.opening, layout.text, announced)

        self._post(text)

    def added(self, place: buckets.Place) -> bool:
        """Notes a tensor that was added. True if it ends a part, which must be written and counted now; for the last
        part, :meth:`done` does that."""
        if self._now is None:
            return False
        places, ends = self._now.places, self._now.ends
        as_known = self._tensors < len(places) and (place is places[self._tensors] or place == places[self._tensors])
        if not as_known:
            self.give_up()
            return False
        self._tensors += 1
        return self._tensors == ends[self._parts] < len(places)

    def count(self) -> None:
        """The part is there for others."""
        self._parts += 1
        self._counts.count()

    def done(self, bucket: buckets.Bucket[shared.Shared]) -> None:
        """The bucket is written, and there for others. Engines are told of it now unless they were before, as it is."""
        if self._now is not None and self._tensors == len(self._now.places):
            self._whole += len(self._now.ends)
            self._now = None
            self.count()
            return
        self.give_up()
        layout = Layout(bucket.places)
        self._layouts[self._number :] = [layout]
        self._tell(bucket.memory, layout, None)

    def give_up(self) -> None:
        """Engines are not to wait for more of the bucket, if it was announced; nor is another one in this sync."""
        if self._now is not None:
            self._now = None
            self._as_known = False
            self._counts.give_up()

    def end(self, urls: Sequence[str]) -> dict[str, str]:
        """``urls``: engines that have answered everything. Those of them that have not loaded all of the buckets that
        were announced, with what to say of them."""
        self._known.reached.update(url for url in urls if self._counts.was_here(self._numbers[url]))
        return {
            url: f"{url} did not load all of the buckets that it was told of: its log says why"
            for url in urls
            if self._counts.loaded(self._numbers[url]) != self._whole
        }
