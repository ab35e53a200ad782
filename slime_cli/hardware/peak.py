"""The most memory that a part of a rank's work took: of the GPU's by torch's allocator, or of the host's by Linux.

Recorded in the spans of the trainer (``peak_bytes``), which ``slime profile memory`` reads. Parts follow one another,
and each begins the count anew.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

_SELF = pathlib.Path("/proc/self")
_base = 0
_most = 0


def begin() -> None:
    """Starts to count: memory that the process has now belongs to its libraries. On a GPU the allocator counts tensors
    alone."""
    global _base
    _base = _resident("VmRSS")


@contextlib.contextmanager
def during(about: dict[str, Any]) -> Iterator[None]:
    """The peak inside the block as ``about["peak_bytes"]``; on a CPU it is what the process has more than at
    :func:`begin`."""
    import torch

    cuda = torch.cuda.is_available()
    if cuda:
        _count_anew()
    else:
        with contextlib.suppress(OSError):  # some sandboxes have no such file: the peak is then of the process's life
            (_SELF / "clear_refs").write_text("5")
    try:
        yield
    finally:
        found = torch.cuda.max_memory_allocated() if cuda else max(0, _resident("VmHWM") - _base)
        about["peak_bytes"] = found


def forget() -> None:
    """:func:`most` counts from here on."""
    global _most
    _count_anew()
    _most = 0


def most() -> int:
    """The largest number of bytes of the GPU's allocator since :func:`forget`, over all parts; 0 on a CPU."""
    import torch

    return max(_most, torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


def _count_anew() -> None:
    global _most
    import torch

    _most = most()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def held() -> int:
    """Bytes of the GPU that this process keeps from others now, its context aside; 0 on a CPU."""
    import torch

    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def _resident(name: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    for line in (_SELF / "status").read_text().splitlines() if os.path.exists(_SELF / "status") else ():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0
