"""Users' functions by import path (``pkg.mod.fn`` or ``file.py:fn``), checked when loaded.

Every ``--*-path`` option has a kind below: the call that slime makes. :func:`load` either returns something that
accepts that call or raises a UsageError saying what is wrong, where, and the nearest name. Loading is cached by path.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pathlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from slime_cli import processes
from slime_cli.buffer.types import PER_TOKEN, Sample, Span, Status
from slime_cli.buffer.values import NotPlain, plain
from slime_cli.errors import SlimeError, UsageError
from slime_cli.hooks import files as hook_files
from slime_cli.hooks import raised
from slime_cli.hooks.table import KINDS
from slime_cli.text import nearest


def load(path: str, kind: str) -> Callable[..., Any]:
    """The function (or class) at ``path``. UsageError when it is not there or does not accept the call."""
    if kind not in KINDS:
        raise ValueError(f"no such kind of hook: {kind!r}{nearest(kind, KINDS)}")
    function = _find(path, kind)
    _check_call(path, kind, function)
    return function


def reward_path(sample: Sample, args: Any) -> str | None:
    """The path of the user's reward function for this sample, if any."""
    return named(sample, "custom_rm_path") or args.custom_rm_path


def named(sample: Sample, key: str) -> Any:
    """The value that the row itself has under ``key``; one that is no text never names anything, and is shown as it is
    written."""
    value = sample.metadata.get(key)
    return value if value is None or isinstance(value, str) else repr(value)


def siblings(where: str, leased: Sample, result: Any) -> list[Sample]:
    """Samples that the generate function ``where`` returned for ``leased``: one, or the list it fanned out into (maybe
    empty).

    Each as a copy that has the trajectory's identity, whatever the function wrote there, and plain values where it left
    arrays. UsageError for anything else; ValueError for a status that there is not.
    """
    found = result if isinstance(result, list) else [result]
    strange = next((type(one).__name__ for one in found if not isinstance(one, Sample)), None)
    if strange:
        held = f"a list that holds {strange}" if isinstance(result, list) else strange
        raise UsageError(f"{where} returned {held}", "return a Sample, or a flat list of the Samples of one trajectory")
    identity = {"index": leased.index, "group_index": leased.group_index, "rollout_id": leased.rollout_id}
    return [dataclasses.replace(one, **identity, part=part, **plain_fields(one)) for part, one in enumerate(found)]


def unchanged(samples: list[Sample], copies: list[Sample]) -> bool:
    """True where a function left the copies that it was given as they were."""
    try:
        return samples == copies
    except Exception:  # an array, whose equality is no single truth: there was none
        return False


def plain_or_none(value: Any) -> Any:
    """The value as plain ones; None where it has no plain form."""
    try:
        return plain(value)
    except (NotPlain, RecursionError):
        return None


OTHER_LISTS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "routed_experts_shape")


def plain_fields(sample: Sample) -> dict[str, Any]:
    """The fields that functions like to fill with arrays, tensors or numbers of their kinds, and the status as one of
    ours."""
    lists = {name: getattr(sample, name) for name in ("tokens", *PER_TOKEN, *OTHER_LISTS)}
    out = {name: None if values is None else [_number(v) for v in _list(values)] for name, values in lists.items()}
    if out["loss_mask"] is not None:
        out["loss_mask"] = [int(value) if value in (0, 1) else value for value in out["loss_mask"]]
    versions = [str(version) for version in sample.weight_versions]
    spans = [Span(_number(length), version if version is None else str(version)) for length, version in sample.spans]
    return out | {
        "remove_sample": bool(sample.remove_sample),
        "status": Status(sample.status),
        "weight_versions": versions,
        "spans": spans,
        "response_length": _number(sample.response_length),
        **{name: _plain(sample, name) for name in ("metadata", "response", "label", "prompt")},
    }


def _plain(sample: Sample, name: str) -> Any:
    try:
        return plain(getattr(sample, name))
    except (NotPlain, RecursionError) as error:
        raise ValueError(f"sample {sample.index}: {name} can't be stored: {error}") from None


def _list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _number(value: Any) -> Any:
    """A Python number of an array's, a tensor's or a flag; anything else as it is."""
    if type(value) in (int, float):
        return value
    return int(value) if isinstance(value, bool) else _list(value)


def is_async(function: Callable[..., Any]) -> bool:
    """True for coroutine functions, partials of them, and objects whose ``__call__`` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def may_be_async(function: Callable[..., Any]) -> bool:
    """Also for a plain function that ``functools.wraps`` one that :func:`is_async`: it returns a coroutine, or has run
    it."""
    while isinstance(function, functools.partial):
        function = function.func
    return is_async(function) or is_async(inspect.unwrap(function))


async def awaited(result: Any) -> Any:
    """The value that a function returned, or that its coroutine returns."""
    return await result if inspect.isawaitable(result) else result


@dataclasses.dataclass(frozen=True)
class Hook:
    """A user's function as slime calls it: whatever it raises is a UsageError that names the user's file and line, and
    so is a coroutine in place of a result. For functions that can't fail for one sample alone."""

    path: str
    kind: str
    function: Callable[..., Any]

    @classmethod
    def load(cls, path: str, kind: str) -> "Hook":
        return cls(path, kind, load(path, kind))

    @property
    def name(self) -> str:
        return f"{self.kind} hook {self.path!r}"

    @property
    def where(self) -> str:
        """With the place of its definition."""
        return f"{self.name}: {place_of(self.function)}"

    def refuse(self, problem: str, fix: str) -> UsageError:
        """The error for something that the function may not do."""
        return UsageError(f"{self.where} {problem}", fix)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Its result; a function that it returns is guarded as well."""
        with self._named():
            result = self.function(*args, **kwargs)
        if inspect.iscoroutine(result):
            result.close()
            fix = "it returned a coroutine, not a result"
            raise UsageError(f"{self.name}: {place_of(self.function)} must not be async", fix)
        return dataclasses.replace(self, function=result) if inspect.isfunction(result) else result

    async def ask(self, *args: Any, **kwargs: Any) -> Any:
        """Its result, in the event loop: what it awaits is awaited."""
        with self._named():
            return await awaited(self.function(*args, **kwargs))

    async def in_thread(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`ask`, for functions that may block: one that is not async runs in a thread."""
        with self._named():
            if may_be_async(self.function):
                return await awaited(self.function(*args, **kwargs))
            return await awaited(await asyncio.to_thread(self.function, *args, **kwargs))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except SlimeError:
            raise
        except (Exception, SystemExit) as error:
            said = f"{self.name} raised {raised.sentence(error)}"
            raise UsageError(said, f"fix the function:\n{raised.trace(error)}") from error


@contextlib.contextmanager
def users_named(what: str) -> Iterator[None]:
    """For code of ours that runs what users' functions left behind, a model or a gradient: what their lines raise there
    is a UsageError that names them; anything else goes through."""
    try:
        yield
    except SlimeError:
        raise
    except Exception as error:
        if not raised.by_user(error):
            raise
        raise UsageError(f"{what} raised {raised.sentence(error)}", f"fix it:\n{raised.trace(error)}") from error


def accepted(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """The keywords of ``offered`` that the signature takes: how optional ones are passed."""
    function = function.function if isinstance(function, Hook) else function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in offered.items() if name in by_name}


SLIMES = {
    "slime.rollout.filter_hub.dynamic_sampling_filters.": "slime_cli.hooks.filters.",
    "slime.rollout.on_policy_distillation.": "slime_cli.hooks.distillation.",
}
"""Where functions that slime's launch scripts name are here."""


def _ours(path: str) -> str:
    """A path of slime's own package as that of the same function here."""
    theirs = next((prefix for prefix in SLIMES if path.startswith(prefix)), None)
    return path if theirs is None else SLIMES[theirs] + path.removeprefix(theirs)


def _find(path: str, kind: str) -> Any:
    where = f"{kind} hook {path!r}"
    path = _ours(path)
    module_name, _, name = path.rpartition(":" if ".py:" in path else ".")
    if not module_name or not name:
        raise UsageError(f"{where}: not an import path", "write package.module.function or file.py:function")
    module = _load_file(module_name, where) if ".py:" in path else _load_module(module_name, where)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        place = getattr(module, "__file__", None) or module.__name__
        raise UsageError(f"{where}: {place} has no {name!r}{nearest(name, public)}", "check the function's name")
    return getattr(module, name)


def is_here(path: str) -> bool:
    """True when the file or the module of a hook's path can be found; it is not imported. False does not say why."""
    module, _, _ = _ours(path).rpartition(":" if ".py:" in path else ".")
    if ".py:" in path:
        return pathlib.Path(module).expanduser().exists()
    top = module.partition(".")[0]
    if not top:
        return True  # no path at all: loading it says so
    processes.find_here(top)
    return _is_found(top, module.split(".")[1:])


def _is_found(package: str, rest: list[str]) -> bool:
    """A folder without code of its own (``examples``) may be another project's of that name: what is in it says."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is not None or not rest:
        return found is not None
    return _is_found(f"{package}.{rest[0]}", rest[1:])


def _load_module(name: str, where: str) -> ModuleType:
    """Tells "there is no such module" from "it is there and fails to import"."""
    processes.find_here(name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _broken(where, error) from error
        message = f"{where}: there is no module {error.name!r} on the import path"
        raise UsageError(message, "set PYTHONPATH to its folder, or write file.py:function") from None
    except (Exception, SystemExit) as error:
        raise _broken(where, error) from error


def _load_file(file: str, where: str) -> ModuleType:
    path = pathlib.Path(file).expanduser().resolve()
    if not path.is_file():
        names = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"{where}: there is no file {path}{nearest(path.name, names)}", "check the path")
    try:
        return hook_files.run(path)
    except (Exception, SystemExit) as error:
        raise _broken(where, error) from error


def _broken(where: str, error: BaseException) -> UsageError:
    """An import that raised, with the innermost line of the user's code."""
    return UsageError(f"{where}: importing it raised {raised.sentence(error)}", "fix the module")


def _check_call(path: str, kind: str, function: Any) -> None:
    call = KINDS[kind]
    where = f"{kind} hook {path!r}"
    if not callable(function):
        raise UsageError(f"{where}: it is {type(function).__name__}, not a function", f"slime calls {call}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-ins have no signature to check
    try:
        signature.bind(*call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        raise UsageError(
            f"{where}: {place_of(function)}{signature} does not accept the call: {error}", f"slime calls {call}"
        ) from None
    if call.form == "async" and not may_be_async(function):
        raise UsageError(f"{where}: {place_of(function)} must be an `async def`", f"slime calls {call}")
    if call.form == "sync" and is_async(function):
        raise UsageError(f"{where}: {place_of(function)} must not be async", f"slime calls {call}")


def place_of(function: Any) -> str:
    """``name (FILE:LINE)`` of its definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
