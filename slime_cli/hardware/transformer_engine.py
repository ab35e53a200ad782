"""Whether Transformer Engine can be used, and a stand-in where it cannot. For processes that train or convert.

A package that is there may not load (built for another torch, a library missing), so it is imported, and one that
does not load counts as none, with a word about it.

megatron-bridge imports transformer_engine for some of its LoRA layers, used or not. In the stand-in every name is a
class that can be imported, asked about with ``isinstance`` and derived from; whoever builds something from it gets an
error. Its LoRA beside local layers needs none of it (:func:`lora`).
"""

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any, Literal

from slime_cli.errors import UsageError
from slime_cli.hardware import adaptations

NAME = "transformer_engine"
STAND_IN_VERSION = "0.0.0"


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


LOCAL_ONLY = (
    "--experimental-attention-variant",
    "--post-self-attn-layernorm",
    "--post-mlp-layernorm",
    "--qk-layernorm-over-heads",
)
"""Megatron's options of models with layers that are not built on Transformer Engine's."""


def layers(kind: str, given: Sequence[str] = ()) -> Literal["local", "transformer_engine"]:
    """The layers that a model is built from: those that ``--transformer-impl`` among Megatron's options ``given`` asks
    for, else Transformer Engine's where a device of this ``kind`` can use them. UsageError for what is not there."""
    why = problem(kind)
    own = next((flag for flag in LOCAL_ONLY if flag in given), None)
    asked = [after for word, after in zip(given, given[1:]) if word == "--transformer-impl"]
    if asked and asked[-1] != NAME or own and not asked:
        return "local"
    if own:
        raise UsageError(
            f"--transformer-impl {NAME}: slime has the layers that {own} asks for among local ones alone",
            "leave --transformer-impl out",
        )
    if asked and why is not None:
        where = "on a CPU" if kind == "cpu" else "here: no such package is installed"
        raise UsageError(
            why or f"--transformer-impl {NAME}: it can't be used {where}",
            "leave the option out: Megatron's local layers are used then; docs/parallelism.md says how to install it",
        )
    return "local" if why is not None else NAME


def check(args: Any) -> None:
    """Raises UsageError for Megatron's options (its namespace) that slime does not train its layers with."""
    if args.fp8 and args.transformer_impl != NAME:
        raise UsageError(
            "--fp8-format: local layers have no FP8", f"install Transformer Engine, for --transformer-impl {NAME}"
        )
    if args.fp8 and args.fp8_recipe == "delayed":
        raise UsageError(
            "--fp8-recipe delayed: its scales follow from the steps before, and a checkpoint here has no such history",
            "--fp8-recipe blockwise (Hopper), mxfp8 (Blackwell) or tensorwise",
        )
    if args.fp8_param_gather:
        raise UsageError("--fp8-param-gather: weights are published and kept in bfloat16", "leave it out")


def stand_in() -> None:
    """Puts the stand-in where ``import transformer_engine`` finds it.

    Megatron decides whether it has Transformer Engine when it is first imported, so that import comes first; a package
    that does not load is hidden from it.
    """
    import torch

    if sys.modules.get(NAME) is not None:
        return
    adaptations.NO_TRANSFORMER_ENGINE.no_module(NAME)
    import megatron.core.models.gpt
    import megatron.core.transformer.transformer_layer  # noqa: F401

    inside = _StandIn(f"{NAME}.pytorch", torch.nn.Module)
    adaptations.NO_TRANSFORMER_ENGINE.module(inside)
    adaptations.NO_TRANSFORMER_ENGINE.module(_StandIn(NAME, torch.nn.Module, pytorch=inside))


def lora() -> Any:
    """megatron-bridge's LoRA, which works beside local layers too."""
    from megatron.bridge.peft import lora, utils
    from megatron.core.extensions import transformer_engine as layers

    if not layers.HAVE_TE:
        adaptations.LORA_WITHOUT_TRANSFORMER_ENGINE.replace(utils, HAVE_TE=False)
    return lora.LoRA


class _StandIn(types.ModuleType):
    """A package whose every name is a class that cannot be built."""

    def __init__(self, name: str, base: type, **inside: Any) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__ = []
        self.__dict__["__version__"] = STAND_IN_VERSION
        self.__dict__.update(inside)
        self._base = base

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}", (self._base,), {"__new__": _refuse})


class _Absent(type):
    """A class of the stand-in; every attribute is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{cls.__name__}.{name}", cls.__mro__[1:2], {"__new__": _refuse})


def _refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Raises UsageError; for a class that derives from a stand-in's too, whatever its ``__init__`` does."""
    name = next(kind.__name__ for kind in cls.__mro__ if isinstance(kind, _Absent) and kind.__module__ == __name__)
    raise UsageError(
        f"{name} is needed, and Transformer Engine is not installed (or does not load) here",
        "install transformer-engine on a machine with a GPU, or leave out what asks for its layers (FP8)",
    )


def forget() -> None:
    """Takes what has been imported of it out of this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def _version() -> str:
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"
