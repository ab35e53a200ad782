"""``--custom-config-path``: a YAML map for users' functions, each key of which becomes an attribute of ``args``.

A key that is an option of slime's own or of Megatron's, spelt as an attribute is, means that option: it is checked as
any other, and slime follows it too. As in slime it holds over a flag; a warning says so where the two differ. Called
by :mod:`slime_cli.options.resolve`.
"""

from typing import Any

from slime_cli.errors import UsageError
from slime_cli.options import catalogue, characters, own
from slime_cli.options.layers import Layer, from_map
from slime_cli.options.spec import from_yaml

ORIGIN = "custom config"
"""Where such a value came from, as ``run.json`` and ``--dry-run`` have it."""


def read(path: str) -> tuple[Layer, dict[str, Any]]:
    """Options, and what is for users' functions alone. Raises UsageError for what is no such file."""
    where = f"--custom-config-path {path}"
    found = characters.read(path, where)
    found = {} if characters.absent(found) else found
    if not isinstance(found, dict):
        raise UsageError(f"{where}: must be a map, got {found!r}", "write NAME: VALUE")
    layer: Layer = {}
    extra: dict[str, Any] = {}
    for key, value in found.items():
        if not str(key).isidentifier():
            raise UsageError(f"{where}: {str(key)!r} cannot be an attribute of args", "spell it as a function reads it")
        if key in own.by_dest():
            layer["slime", key] = _own(key, value, f"{where}: {key}")
        elif key in catalogue.load("megatron").by_dest:
            layer |= from_map({"megatron": {key: value}}, where)
        else:
            extra[str(key)] = characters.as_json(value)
    return layer, extra


def _own(dest: str, value: Any, place: str) -> Any:
    """An option by the name of its attribute, which is positive where the flag is not."""
    option = own.by_dest()[dest]
    if dest == "custom_config_path":
        raise UsageError(f"{place}: a file cannot name another one", "put all of it into one")
    if option.takes_value:
        return from_yaml(option, dest, value, place)
    given = characters.as_json(value)
    if not isinstance(given, bool):
        raise UsageError(f"{place} is true or false, got {given!r}")
    return given
