"""Profiles: named YAML files of options, shipped under ``slime_cli/profiles`` or the user's own.

Sections ``slime: megatron: sglang: router:`` hold options by native name, hyphens or underscores; ``phases:`` is a list
of such maps with a ``name``, each laid over the profile's top level for one part of a run; ``cpu:`` is such a map for
machines without a GPU, laid over the top level there; ``description:`` is for people.
"""

import difflib
import pathlib
import re
from dataclasses import dataclass
from typing import Any

from slime_cli.errors import UsageError
from slime_cli.hardware import device as hardware
from slime_cli.options import characters
from slime_cli.options.layers import SECTIONS, Layer, close_names, from_map, suggestion

FOLDER = pathlib.Path(__file__).parents[1] / "profiles"
KINDS = ("runs", "models")
"""Subfolders, in the order in which a name is looked up."""

CPU = "cpu"
"""The key of what a machine without a GPU has otherwise."""
STAGE_NAME = re.compile(r"\w([\w .:+=-]{0,61}[\w:+=-])?")
"""A phase's name is a folder in the run directory, and stands in messages and file names."""


@dataclass(frozen=True)
class Profile:
    """One profile, checked."""

    name: str
    """As the user gave it."""
    path: pathlib.Path
    description: str
    layer: Layer
    phases: tuple[dict[str, Any], ...]
    """As written: ``name`` and section maps. Every entry has passed :func:`from_map`."""


def available() -> dict[str, list[str]]:
    """Kind -> names of the shipped profiles."""
    return {kind: sorted(path.stem for path in (FOLDER / kind).glob("*.yaml")) for kind in KINDS}


def find(name: str) -> pathlib.Path:
    """The file of a profile's name, or of a path to one."""
    for kind in KINDS:
        if (path := FOLDER / kind / f"{name}.yaml").is_file():
            return path
    if name.endswith((".yaml", ".yml")):
        if (path := pathlib.Path(name)).is_file():
            return path
        raise UsageError(f"profile {name}: no such file")
    known = available()
    names = [found for kind in KINDS for found in known[kind]]
    listing = "; ".join(f"{kind}: {', '.join(known[kind])}" for kind in KINDS if known[kind])
    close = close_names(name, names, 0.6)
    raise UsageError(
        f"no profile {name!r}", f"{suggestion(close) + ' ' if close else ''}available: {listing}, or a .yaml file"
    )


def load(name: str) -> Profile:
    """Finds, reads and checks a profile."""
    path = find(name)
    content = characters.read(path, str(path))
    content = {} if characters.absent(content) else content
    _check_keys(content, (*SECTIONS, "phases", CPU, "description"), str(path))
    phases = content.get("phases")
    phases = [] if characters.absent(phases) else phases
    if not isinstance(phases, list):
        raise UsageError(f"{path}: `phases` must be a list, got {phases!r}")
    named = []
    for number, phase in enumerate(phases):
        where = f"{path}: phase {number + 1}"
        _check_keys(phase, (*SECTIONS, "name"), where)
        from_map(phase, where)
        named.append(
            {**phase, "name": _phase_name(phase.get("name"), number, [other["name"] for other in named], where)}
        )
    layer = from_map(content, str(path)) | _on_a_cpu(content.get(CPU), f"{path}: {CPU}")
    return Profile(name, path, str(content.get("description", "")).strip(), layer, tuple(named))


def _on_a_cpu(maps: Any, where: str) -> Layer:
    """The options under a profile's ``cpu:``; none on a machine with a GPU. They are checked on both."""
    if characters.absent(maps):
        return {}
    _check_keys(maps, SECTIONS, where)
    layer = from_map(maps, where)
    return layer if hardware.find().kind == "cpu" else {}


def _phase_name(given: Any, number: int, others: list[str], where: str) -> str:
    name = f"phase-{number + 1}" if characters.absent(given) else given
    if not isinstance(name, str) or not STAGE_NAME.fullmatch(name):
        fix = "it becomes a folder: up to 63 letters, digits, spaces and ._:+=- that begin with a letter or digit"
        raise UsageError(f"{where}: {name!r} is no name of a phase", fix)
    from slime_cli.manifests import layout  # its package imports msgspec, which only a profile of several phases needs

    if name in layout.RESERVED:
        raise UsageError(f"{where}: a run directory has a {name} of its own", "give the phase another name")
    if name.casefold() in map(str.casefold, others):
        raise UsageError(f"{where}: another phase is called {name!r} too", "give each phase a name of its own")
    return str(name)


def _check_keys(content: Any, allowed: tuple[str, ...], where: str) -> None:
    if not isinstance(content, dict):
        raise UsageError(f"{where}: must be a map with {', '.join(allowed)}, got {content!r}")
    for key in content:
        if key not in allowed:
            close = difflib.get_close_matches(str(key), allowed, 1, 0.5)
            fix = suggestion(close) if close else f"sections are {', '.join(allowed)}"
            raise UsageError(f"{where}: unknown section `{key}`", fix)
