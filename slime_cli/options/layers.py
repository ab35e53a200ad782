"""Where settings come from: the command line and profile maps, each read into one layer of checked values.

A layer maps (section, dest) to a value, or to UNSET where a flag is taken back. Unknown, refused and malformed options
end here with a UsageError that names the flag (or file and key) and, if unknown, the nearest names.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from slime_cli.errors import UsageError, together
from slime_cli.options import catalogue, managed, own
from slime_cli.options.characters import absent
from slime_cli.options.managed import refusal
from slime_cli.options.not_yet import NOT_WIRED, NOT_YET
from slime_cli.options.spec import UNSET, Option, check_passable, from_words, from_yaml

SECTIONS = ("slime", "megatron", "sglang", "router")
Layer = dict[tuple[str, str], Any]


def find(flag: str) -> tuple[str, Option] | None:
    """The section and option that ``flag``, spelt exactly, belongs to."""
    if option := own.by_flag().get(flag):
        return "slime", option
    for section in ("router", "sglang", "megatron"):
        prefix = catalogue.PREFIXES[section]
        if flag.startswith(prefix):
            option = catalogue.load(section).by_flag.get("--" + flag[len(prefix) :])
            return (section, option) if option else None
    return None


def all_flags() -> list[str]:
    """Every flag that a user may give, in slime's spelling."""
    native = [
        catalogue.PREFIXES[section] + flag[2:]
        for section in catalogue.PREFIXES
        for option in catalogue.load(section).options
        if not refusal(section, option.dest)
        for flag in option.flags
        if not (section == "megatron" and flag in own.OWN_OVER_MEGATRON)
    ]
    return [*(flag for flag in own.by_flag() if flag not in NOT_WIRED), *native]


def nearest(flag: str) -> list[str]:
    """Likely meanings of ``flag``: the same name in another section or spelling, then close ones."""
    known = all_flags()
    spelt = flag.replace("_", "-")
    bare = "--" + spelt[2:].removeprefix("sglang-").removeprefix("router-")
    same = [*dict.fromkeys([spelt, bare, *(prefix + bare[2:] for prefix in catalogue.PREFIXES.values())])]
    found = [name for name in same if name in known]
    prefix = next((prefix for prefix in ("--sglang-", "--router-") if spelt.startswith(prefix)), "")
    within = [name for name in known if name.startswith(prefix)]
    close = close_names(spelt, within, 0.7) or close_names(spelt, known, 0.6)
    return [*dict.fromkeys(found or close)][:3]


def close_names(name: str, known: Iterable[str], cutoff: float) -> list[str]:
    """Names nearest to ``name``, without those that are clearly farther than the nearest one."""
    found = difflib.get_close_matches(name, known, 3, cutoff)
    ratios = [difflib.SequenceMatcher(None, name, other).ratio() for other in found]
    return [other for other, ratio in zip(found, ratios, strict=True) if ratio > ratios[0] - 0.05]


def from_argv(argv: list[str], command: str) -> tuple[Layer, list[str]]:
    """Reads a command line. Words are taken as values up to the next one that begins with ``--``.

    Of an option that is given more than once the last one holds; what that overrides is said in the warnings that come
    back. Raises one UsageError with all options that cannot be used.
    """
    layer: Layer = {}
    overridden: dict[tuple[str, str], str] = {}
    refused: list[UsageError] = []
    words = list(argv)
    while words:
        try:
            key, option, flag, value = _next(words, command)
        except UsageError as error:
            refused.append(error)
            while words and not words[0].startswith("--"):
                words.pop(0)  # what would have been its values
            continue
        if key in layer and option.action == "append":
            value = layer[key] + value
        elif key in layer and layer[key] != value:
            now, before = (_shown(own.shown(option.dest, each)) for each in (value, layer[key]))
            overridden[key] = f"{flag} is given more than once: the last one holds, {now}; before it was {before}"
        layer[key] = value
    if refused:
        raise together(refused, "options cannot be used")
    return layer, list(overridden.values())


def _next(words: list[str], command: str) -> tuple[tuple[str, str], Option, str, Any]:
    """Removes an option with its values from ``words``: section and dest, the option, how it was spelt, the value."""
    flag, equals, text = words.pop(0).partition("=")
    section, option = _known(flag, equals, text)
    _check_command(command, section, option, flag)
    if option.takes_value:
        taken = [text] if equals else _take(option, flag, words)
        value = from_words(option, taken, flag)
        if section != "slime":
            check_passable(option, value, flag)
    else:
        value = _flag_value(option, flag, text if equals else "true")
        if value is UNSET:
            managed.check_taken_back(f"{flag}=false", section, option.dest)
    return (section, option.dest), option, flag, value


def _shown(value: Any) -> str:
    if value is UNSET:
        return "taken back"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _known(flag: str, equals: str, text: str) -> tuple[str, Option]:
    if not flag.startswith("--") or flag == "--":
        word = flag + equals + text
        raise UsageError(f"unexpected word {word!r}", "options begin with --; a value follows its option")
    found = find(flag)
    if found is None:
        if flag in NOT_YET:
            raise UsageError(f"{flag} is not an option here", NOT_YET[flag])
        raise UsageError(f"unknown option {flag}", suggestion(nearest(flag)))
    _check_taken(flag, *found)
    return found


def _check_taken(place: str, section: str, option: Option) -> None:
    """Raises UsageError for an option that nobody may give."""
    if refusal(section, option.dest):
        raise managed.error(place, section, option.dest)
    if section == "slime" and option.flag in NOT_WIRED:
        raise UsageError(f"{place} has no effect yet", NOT_WIRED[option.flag])


def _check_command(command: str, section: str, option: Option, flag: str) -> None:
    """Refuses a flag that the command never reads. (Profiles may be shared between commands: theirs are not.)"""
    dests, sections = own.READ_BY.get(command, (None, SECTIONS))
    if section == "slime" and dests is not None and option.dest not in dests or section not in ("slime", *sections):
        raise UsageError(
            f"`slime {command}` does not read {flag}", "leave it out, or put it in a profile for `slime train`"
        )


def _take(option: Option, flag: str, words: list[str]) -> list[str]:
    """Removes from ``words``, and returns, those that are values of ``option``."""
    count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    if option.nargs is None or option.nargs == "?":
        count = min(count, 1)
    elif isinstance(option.nargs, int):
        count = min(count, option.nargs)
    if count == 0 and option.nargs not in ("*", "?"):
        following = f"; a value that begins with -- is written {flag}=VALUE" if words else ""
        raise UsageError(f"{flag} needs a value{following}", option.help)
    taken = words[:count]
    del words[:count]
    return taken


def _flag_value(option: Option, flag: str, text: str) -> Any:
    """``--flag=false`` takes back what a profile gives."""
    if text not in ("true", "false"):
        raise UsageError(f"{flag} takes no value, got {text!r}", f"write {flag}, or {flag}=false to take it back")
    return option.set_by(flag) if text == "true" else UNSET


def from_map(maps: dict[str, Any], where: str) -> Layer:
    """Reads the section maps of a profile or phase; keys other than sections are the caller's. ``where``: the file."""
    layer: Layer = {}
    for section in SECTIONS:
        entries = maps.get(section)
        entries = {} if absent(entries) else entries
        if not isinstance(entries, dict):
            raise UsageError(f"{where}: `{section}` must be a map of options, got {entries!r}")
        for key, value in entries.items():
            name = str(key).replace("_", "-")
            place = f"{where}: {section}.{key}"
            option = _entry(section, name, place)
            found = from_yaml(option, name, value, place)
            if found is UNSET and not option.takes_value:
                managed.check_taken_back(f"{place}: false", section, option.dest)
            elif section != "slime" and found is not UNSET:
                check_passable(option, found, place)
            if layer.get((section, option.dest), found) != found:
                raise UsageError(f"{place} gives {option.dest} a second value", "keep one of the two keys")
            layer[section, option.dest] = found
    return layer


def _entry(section: str, name: str, place: str) -> Option:
    """The option that a profile's key names."""
    if section == "slime":
        option = own.by_flag().get(f"--{name}")
        names = [flag[2:] for flag in own.by_flag()]
    else:
        table = catalogue.load(section)
        option = table.by_flag.get(table.by_key.get(name, ""))
        names = list(table.by_key)
    if option is None:
        if section == "slime" and f"--{name}" in NOT_YET:
            raise UsageError(f"{place} is not an option here", NOT_YET[f"--{name}"])
        raise UsageError(f"{place}: no such option", suggestion(_nearest_keys(section, name, names)))
    if section == "megatron" and f"--{name}" in own.OWN_OVER_MEGATRON:
        raise UsageError(f"{place} is slime's option", "move it to the `slime:` section")
    _check_taken(place, section, option)
    return option


def _nearest_keys(section: str, name: str, names: Iterable[str]) -> list[str]:
    elsewhere = []
    for other in SECTIONS:
        known = own.by_flag() if other == "slime" else catalogue.load(other).by_flag
        if other != section and f"--{name}" in known:
            elsewhere.append(f"{name} (in the `{other}:` section)")
    return elsewhere[:1] or close_names(name, names, 0.6)


def suggestion(names: list[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else "`slime train --help` lists the options"
