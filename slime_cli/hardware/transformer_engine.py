"""Whether Transformer Engine can be used. Imported by processes that train or convert, before Megatron.

A package that is there may not load (built for another torch, a library missing), so it is imported, and one that
does not load counts as none, with a word about it.
"""

import functools
import importlib.metadata
import importlib.util
import sys

NAME = "transformer_engine"


@functools.cache
def problem(kind: str) -> str | None:
    """None where a device of this ``kind`` can use it; else why not, an empty text where it simply is not there or
    the device has no use for it.
    """
    spec = importlib.util.find_spec(NAME)
    if kind != "cuda" or spec is None or spec.origin is None:  # the stand-in has no file
        return ""
    try:
        importlib.import_module(f"{NAME}.pytorch")
    except Exception as error:
        forget()
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        return (
            f"Transformer Engine {_version()} is installed and does not load, so Megatron's local layers are used: "
            f"{type(error).__name__}: {reason}"
        )
    return None


def forget() -> None:
    """Takes what has been imported of it out of this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def _version() -> str:
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"
