"""YAML whose scalars are the characters that were written: how profiles and role files are read.

YAML 1.1 takes ``12:30`` for 750, ``010`` for 8, ``on`` for true, ``2026-01-01`` for a date and ``1e-6`` for text. Here
nothing is guessed: what a scalar means is for the option that it is given to
(:func:`slime_cli.options.spec.from_yaml`). A key that is there twice in a map is an error.
"""

import functools
import json
import pathlib
import re
from typing import Any

from slime_cli.errors import UsageError

NULLS = ("", "~", "null", "Null", "NULL")
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")


class Plain(str):
    """A scalar without quotes; one in quotes is an ordinary ``str``."""

    __slots__ = ()


def absent(value: Any) -> bool:
    """Nothing is there: an empty entry, ``null`` or ``~``; not in quotes."""
    return value is None or isinstance(value, Plain) and value in NULLS


def as_json(value: Any) -> Any:
    """``value`` for an option that takes JSON: null, booleans and JSON's numbers without quotes mean that, all else is
    text."""
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if not isinstance(value, Plain):
        return value
    if absent(value):
        return None
    if _NUMBER.fullmatch(value):
        return json.loads(value)
    return BOOLEANS.get(value, str(value))


def read(path: str | pathlib.Path, where: str) -> Any:
    """Reads a YAML file: maps, lists, :class:`Plain` and ``str``. UsageError for a file that cannot be read."""
    import yaml

    try:
        return yaml.load(pathlib.Path(path).read_text(encoding="utf-8"), Loader=_loader())
    except OSError as error:
        raise UsageError(f"{where}: cannot be read: {error.strerror}", "check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{where}: not readable as YAML: {' '.join(str(error).split())}") from None


@functools.cache
def _loader() -> type:
    """Made when first used: importing yaml takes as long as all the rest of a resolution."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
            value = super().construct_scalar(node)
            return Plain(value) if getattr(node, "style", None) is None else value

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if str(key.value) in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is there twice", key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    merge = "<"  # a map merged into another: the only implicit tag that is not about a scalar's type
    Loader.yaml_implicit_resolvers = {merge: yaml.SafeLoader.yaml_implicit_resolvers[merge]}
    return Loader
