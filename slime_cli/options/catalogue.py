"""The engines' native options, known without importing the engines: tables read out of their own argparse parsers.

``native/ENGINE-VERSION.json`` ships for the versions slime pins. :func:`load` takes the table that fits the installed
version exactly; for any other version it has a subprocess read that version's parsers, once, into the user's cache.
``python -m slime_cli.options.catalogue`` rewrites the shipped tables from what is installed. Only that, and the
subprocess, import an engine.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from slime_cli.errors import UsageError
from slime_cli.options.spec import Option

ENGINES = {"megatron": "megatron-core", "sglang": "sglang", "router": "sglang-router"}
"""Section -> distribution whose parser it is."""
PREFIXES = {"megatron": "--", "sglang": "--sglang-", "router": "--router-"}
"""Section -> what stands for the ``--`` of the engine's own flag on slime's command line."""
NATIVE = pathlib.Path(__file__).parent / "native"
HELP_LENGTH = 160


@dataclass(frozen=True)
class Catalogue:
    """All options of one engine, in its parser's order."""

    section: str
    version: str
    options: tuple[Option, ...]

    @functools.cached_property
    def by_flag(self) -> dict[str, Option]:
        """The engine's own spelling, ``--tp-size`` -> option."""
        return {flag: option for option in self.options for flag in option.flags}

    @functools.cached_property
    def by_key(self) -> dict[str, str]:
        """A profile's key with hyphens, ``tp-size`` -> the engine's own flag."""
        return {flag[2:].replace("_", "-"): flag for flag in reversed(self.by_flag)}

    @functools.cached_property
    def by_dest(self) -> dict[str, list[Option]]:
        """Options that store at a dest; those that the engine has not deprecated come first."""
        found: dict[str, list[Option]] = {}
        for option in sorted(self.options, key=lambda option: option.deprecated):
            found.setdefault(option.dest, []).append(option)
        return found

    def option_for(self, dest: str, value: Any) -> Option:
        """The option with which a command line can store ``value`` at ``dest``."""
        for option in self.by_dest.get(dest, ()):
            if option.takes_value or option.action == "boolean_optional" or option.set_by(option.flag) == value:
                return option
        raise UsageError(f"no {ENGINES[self.section]} {self.version} flag stores {value!r} in {dest}")


ADDED: dict[str, tuple[Option, ...]] = {
    "megatron": tuple(
        Option(
            dest=flag[2:].replace("-", "_"), flags=(flag,), action="store_true", type="bool", default=False, help=help
        )
        for flag, help in {
            "--post-self-attn-layernorm": "A norm behind attention, before the residual is added (GLM-4).",
            "--post-mlp-layernorm": "A norm behind the feed-forward, before the residual is added (GLM-4).",
            "--qk-layernorm-over-heads": "The norms of --qk-layernorm are over all heads at once (MiniMax-M2).",
        }.items()
    )
}
"""Section -> options that slime adds to the engine's own: what models are that Megatron has no option for."""


@functools.cache
def load(section: str) -> Catalogue:
    """The table of the installed version of a section's engine, or of the newest shipped one if none is installed; and
    what slime adds to it."""
    found = _load(section)
    return dataclasses.replace(found, options=found.options + ADDED.get(section, ()))


def _load(section: str) -> Catalogue:
    engine = ENGINES[section]
    try:
        version = metadata.version(engine)
    except metadata.PackageNotFoundError:
        return read(section, sorted(NATIVE.glob(f"{engine}-[0-9]*.json"))[-1])
    shipped = NATIVE / f"{engine}-{version}.json"
    return read(section, shipped if shipped.exists() else _cached(section, engine, version))


def read(section: str, path: pathlib.Path) -> Catalogue:
    """Reads one table. A deprecated spelling without choices of its own gets those of the option it stands for."""
    table = json.loads(path.read_text(encoding="utf-8"))
    choices = {fields["dest"]: fields["choices"] for fields in table["options"] if fields.get("choices")}
    for fields in table["options"]:
        if fields.get("deprecated") and fields["action"] == "store" and fields["dest"] in choices:
            fields.setdefault("choices", choices[fields["dest"]])
    return Catalogue(section, table["version"], tuple(option_of(fields) for fields in table["options"]))


def option_of(fields: dict[str, Any]) -> Option:
    """An Option from a table's row (or from :func:`describe`)."""
    choices = fields.get("choices")
    return Option(**{**fields, "flags": tuple(fields["flags"]), "choices": tuple(choices) if choices else None})


def _cached(section: str, engine: str, version: str) -> pathlib.Path:
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "slime" / "native"
    path = folder / f"{engine}-{version}.json"
    if not path.exists():
        print(f"slime: {engine} {version} is new here; reading its options once into {path}", file=sys.stderr)
        generate(section, folder)
    return path


def generate(section: str, folder: pathlib.Path) -> pathlib.Path:
    """Has a subprocess write the installed engine's table into ``folder``. Takes as long as importing the engine."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory() as elsewhere:  # megatron.training must not be imported from site-packages as cwd
        command = [sys.executable, "-m", "slime_cli.options.catalogue", "--only", section, "--into", str(folder)]
        root = str(pathlib.Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command, cwd=elsewhere, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise UsageError(
            f"cannot read the options of {ENGINES[section]}:\n{tail}", "check the engine with `slime doctor`"
        )
    return pathlib.Path(done.stdout.strip().splitlines()[-1])


def native_parser(section: str) -> argparse.ArgumentParser:
    """The genuine parser of an engine. Imports the engine: seconds."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if section == "megatron":
        from megatron.training.arguments import add_megatron_arguments

        add_megatron_arguments(parser)
    elif section == "sglang":
        from sglang.srt.server_args import ServerArgs

        ServerArgs.add_cli_args(parser)
    else:
        from sglang_router.router_args import RouterArgs

        RouterArgs.add_cli_args(parser)
    return parser


def describe(action: argparse.Action) -> dict | None:
    """One argparse action as an Option's fields that differ from the defaults; None for actions that store nothing."""
    name = type(action).__name__
    kinds = {
        "_StoreTrueAction": "store_true",
        "_StoreFalseAction": "store_false",
        "DeprecatedStoreTrueAction": "store_true",
        "DeprecatedStoreConstAction": "store_const",
        "_StoreConstAction": "store_const",
        "BooleanOptionalAction": "boolean_optional",
        "_AppendAction": "append",
    }
    if name in ("_HelpAction", "_VersionAction", "DeprecatedAction") or not action.option_strings:
        return None
    kind = kinds.get(name, "store")
    takes_value = kind in ("store", "append")
    fields = {
        "dest": action.dest,
        "flags": list(action.option_strings),
        "action": kind,
        "type": _type_name(action.type) if takes_value else "bool",
        "nargs": action.nargs if takes_value else None,
        "choices": sorted(map(_plain, action.choices), key=_order) if action.choices else None,
        "default": None if action.default == argparse.SUPPRESS else _plain(action.default),
        "const": _plain(getattr(action, "const_value", action.const)) if kind == "store_const" or takes_value else None,
        "deprecated": name.startswith("Deprecated"),
        "help": " ".join((action.help or "").split())[:HELP_LENGTH],
    }
    return {key: value for key, value in fields.items() if value not in (None, False, "") or key == "default"}


def _type_name(converter: Any) -> str:
    if converter is None:
        return "str"
    return {int: "int", float: "float", str: "str", json.loads: "json"}.get(converter, "other")


def _order(choice: Any) -> tuple[str, Any]:
    """Choices are sorted: some parsers take them from a set, whose order differs from process to process."""
    return type(choice).__name__, choice


def _plain(value: Any) -> Any:
    """A default or choice as JSON; an enum by the name that its parser takes."""
    if hasattr(value, "name") and hasattr(value, "value"):
        return value.name
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return None


def write(section: str, folder: pathlib.Path) -> pathlib.Path:
    """Reads the installed engine's parser in this process and writes its table, one option a line."""
    from slime_cli.manifests.base import write_bytes

    engine = ENGINES[section]
    version = metadata.version(engine)
    lines = [json.dumps(found) for action in native_parser(section)._actions if (found := describe(action))]
    head = f'{{"engine": "{engine}", "version": "{version}", "options": [\n'
    path = folder / f"{engine}-{version}.json"
    write_bytes(path, (head + ",\n".join(lines) + "\n]}\n").encode())
    path.chmod(0o644)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of the installed engines' options.")
    parser.add_argument("--only", choices=sorted(ENGINES), help="one section instead of all")
    parser.add_argument("--into", type=pathlib.Path, default=NATIVE, help="folder; default: the shipped tables")
    given = parser.parse_args()
    for section in [given.only] if given.only else ENGINES:
        print(write(section, given.into))


if __name__ == "__main__":
    main()
