"""The evaluation sets of a phase, each with its own options: ``--eval-prompt-data``, or the file of ``--eval-config``.

The file is slime's: ``eval:`` (or the top level) with ``datasets``, a list of maps with ``name`` and ``path``, and
``defaults``, a map that holds for each of them. What neither says, the ``--eval-*`` options say. An unknown key is an
error. Read once a process.
"""

import dataclasses
import functools
import pathlib
import re
from typing import Any

from slime_cli.errors import UsageError
from slime_cli.options import characters, own
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.spec import UNSET, from_yaml
from slime_cli.text import nearest

KEYS = {
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "top_k": "eval_top_k",
    "max_response_len": "eval_max_response_len",
    "min_new_tokens": "eval_min_new_tokens",
    "max_prompt_len": "eval_max_prompt_len",
    "max_context_len": "eval_max_context_len",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
    "apply_chat_template": "apply_chat_template",
    "apply_chat_template_kwargs": "apply_chat_template_kwargs",
    "custom_generate_function_path": "custom_generate_function_path",
    "reward_key": "eval_reward_key",
    "input_key": "eval_input_key",
    "label_key": "eval_label_key",
    "tool_key": "eval_tool_key",
    "metadata_key": "metadata_key",
}
"""Key of a set -> the option that it overrides."""
REWARD = ("rm_type", "custom_rm_path", "metadata_overrides")


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    name: str
    path: str
    """Its source, as ``--prompt-data`` takes it."""
    options: SlimeOptions
    """The phase's, with what the set has otherwise."""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Takes the place of the rows' own entries: ``rm_type``, ``custom_rm_path``, ``metadata_overrides``."""

    def metadata_of(self, row: dict[str, Any]) -> dict[str, Any]:
        """The metadata of a row's samples: a reward that the set names is the reward."""
        own_function = "rm_type" in self.metadata and "custom_rm_path" not in self.metadata
        kept = {key: value for key, value in row.items() if key != "custom_rm_path" or not own_function}
        return kept | self.metadata

    def settings(self) -> dict[str, Any]:
        """The sampling and fields that its answers were generated with, for the result's file."""
        return {key: getattr(self.options, dest) for key, dest in KEYS.items() if not key.endswith("_key")}


def evaluation_sets(s: SlimeOptions) -> list[EvaluationSet]:
    """In order; none without either option, or without engines. Raises UsageError for a file that cannot be read or
    has an unknown key."""
    if not s.generates:
        return []
    if s.eval_config:
        return [
            EvaluationSet(name, path, _with(s, options), dict(metadata))
            for name, path, options, metadata in _read(s.eval_config)
        ]
    words = s.eval_prompt_data or []
    if len(words) == 1:
        return [EvaluationSet(_file_name(words[0]), words[0], s)]
    return [EvaluationSet(name, path, s) for name, path in zip(words[::2], words[1::2], strict=False)]


def _with(s: SlimeOptions, options: dict[str, Any]) -> SlimeOptions:
    """The phase's options with a set's. A prompt leaves room for one token of an answer, as in the phase."""
    out = dataclasses.replace(s, **options)
    together = options.get("eval_max_context_len")
    if together is not None and "eval_max_prompt_len" not in options:
        longest = min(bound for bound in (out.eval_max_prompt_len, together - 1) if bound is not None)
        out = dataclasses.replace(out, eval_max_prompt_len=longest)
    return out


def _file_name(uri: str) -> str:
    """A source alone is named after its file or task."""
    source = re.sub(r"@\[[^\]]*\]$", "", uri)
    scheme, colon, rest = source.partition(":")
    inside = rest if colon and scheme in ("reasoning-gym", "datasets") else source
    return pathlib.PurePath(inside.partition("?")[0]).stem or source


@functools.cache
def _read(path: str) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Name, source, options by dest and metadata of each set."""
    where = f"--eval-config {path}"
    found = _map(characters.read(path, where), where)
    if "eval" in found:
        _known(found, ("eval",), where)
        found = _map(found["eval"], f"{where}: eval")
    _known(found, ("defaults", "datasets"), where)
    defaults = _map(found.get("defaults"), f"{where}: defaults")
    _known(defaults, (*KEYS, *REWARD), f"{where}: defaults")
    given = found.get("datasets")
    if not isinstance(given, list) or not given:
        raise UsageError(f"{where}: `datasets` must be a list of sets", "give each a name and a path")
    out = [_set(defaults, one, f"{where}: set {number}") for number, one in enumerate(given, 1)]
    names = [name for name, *_ in out]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{where}: two sets are called {twice[0]!r}", "give each its own name")
    return out


def _set(defaults: dict[str, Any], given: Any, where: str) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    one = _map(given, where)
    _known(one, ("name", "path", *KEYS, *REWARD), where)
    for key in ("name", "path"):
        if not isinstance(one.get(key), str) or not one[key] or characters.absent(one[key]):
            raise UsageError(f"{where} has no {key}", f"give it {key}: TEXT")
    merged = defaults | one
    options: dict[str, Any] = {}
    for key, dest in KEYS.items():
        option = own.by_dest()[dest]
        value: Any = from_yaml(option, key, merged[key], f"{where}: {key}") if key in merged else UNSET
        if value is UNSET and key in merged and not option.takes_value:
            value = option.default  # the flag is taken back for this set
        if value is UNSET:
            continue
        for number in value if isinstance(value, list) else [value]:
            if option.bounds is not None and not option.bounds.allow(number):
                raise UsageError(f"{where}: {key} is {number}", f"it must be {option.bounds}")
        options[dest] = value
    metadata = _map(characters.as_json(merged.get("metadata_overrides")), f"{where}: metadata_overrides")
    for key in ("rm_type", "custom_rm_path"):
        if not characters.absent(merged.get(key)):
            metadata[key] = str(merged[key])
    return str(one["name"]), str(one["path"]), options, metadata


def _map(given: Any, where: str) -> dict[str, Any]:
    if characters.absent(given):
        return {}
    if not isinstance(given, dict):
        raise UsageError(f"{where}: must be a map, got {given!r}", "write KEY: VALUE")
    return {str(key): value for key, value in given.items()}


def _known(given: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in given:
        if key in keys:
            continue
        raise UsageError(f"{where}: unknown key `{key}`{nearest(key, keys)}", f"keys are {', '.join(keys)}")
