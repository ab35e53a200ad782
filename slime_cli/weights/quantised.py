"""Quantised checkpoints on the trainer's ranks: read as floating point, and published as they are.

The trainer computes in floating point. It begins with the weights that a quantised ``--hf-checkpoint`` stands for
(:class:`Restored`), and each version goes out in that checkpoint's format (:class:`Publishing`): the same names, dtypes
and settings, a weight at a time as the ranks export it, with the bytes that ``slime convert`` gives the same weights.
"""

import functools
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from slime_cli.errors import DataError
from slime_cli.models import architecture, headers, quantise, schemes

Named = Iterable[tuple[str, torch.Tensor]]


class Publishing:
    """Weights in the format ``scheme`` of the checkpoint in ``folder``."""

    def __init__(self, folder: str | os.PathLike, scheme: schemes.Scheme) -> None:
        self.folder = folder
        self.scheme = scheme
        self.converted = schemes.converted(folder, scheme)

    def through(self, named: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """``named`` as the checkpoint holds them. Raises DataError for NaN and infinity, with the tensor's name, once
        all of ``named`` is taken: other ranks wait for this one in each gathering."""
        rest = iter(named)
        for name, tensor in rest:
            if name not in self.converted:
                yield name, tensor
                continue
            try:
                stored = quantise.stored(name, tensor.detach(), self.scheme)
            except DataError as error:
                for _ in rest:
                    pass
                raise DataError(f"{name} {error.message}", error.fix) from None
            yield from stored.items()


def publishing(folder: str | os.PathLike) -> Publishing | None:
    """For versions of the model in ``folder``; None where its weights are not quantised."""
    scheme = schemes.of_config(architecture.read_config(str(folder)))
    return None if scheme is None else Publishing(folder, scheme)


class Restored:
    """The tensors of the quantised checkpoint in ``folder`` as a model in bfloat16 has them, one read at a time."""

    def __init__(self, folder: str | os.PathLike, scheme: schemes.Scheme) -> None:
        self.folder = pathlib.Path(folder)
        self.scheme = scheme
        self.converted = schemes.converted(folder, scheme)
        self._files = {name: held.file for name, held in headers.read(folder).tensors.items()}

    def names(self) -> list[str]:
        parts = {f"{name}{suffix}" for name in self.converted for suffix in _SUFFIXES}
        parts |= {f"{name.rpartition('.')[0]}.input_scale" for name in self.converted}
        return sorted(self.converted | (self._files.keys() - parts))

    def read(self, name: str) -> torch.Tensor:
        """Raises DataError for parts that do not fit together, KeyError for a name that is not there."""
        if name not in self.converted:
            return self._read(name)
        try:
            return quantise.restored(name, lambda part: self._read(part) if part in self._files else None, self.scheme)
        except DataError as error:
            raise DataError(f"{self.folder}: {name} {error.message}", error.fix) from None

    def _read(self, name: str) -> torch.Tensor:
        return _opened(self.folder / self._files[name]).get_tensor(name)


_SUFFIXES = ("_scale_inv", "_scale", "_packed", "_shape", "_zero_point")


@functools.lru_cache(maxsize=4)
def _opened(path: pathlib.Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")
