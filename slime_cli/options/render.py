"""Prints what ``--dry-run`` shows: options with their origins, the layout, the memory estimate. It alone imports
rich."""

from typing import Any

from slime_cli.options import catalogue, own
from slime_cli.options.layers import SECTIONS
from slime_cli.options.resolve import Resolved
from slime_cli.options.spec import to_words


def render(resolved: Resolved, layout: dict[str, int], memory: dict[str, Any] | None, verbose: bool = False) -> Any:
    """A rich renderable. Options at their defaults are left out unless ``verbose``."""
    from rich.console import Group
    from rich.text import Text

    parts = [_options(resolved, verbose), Text(""), _layout(layout), Text("")]
    if memory is None:
        parts.append(
            Text("Memory: not estimated; the model's numbers are unknown (profile or --hf-checkpoint config.json)")
        )
    else:
        parts += [_memory(memory), Text("Not counted: other activations, fragmentation, communication buffers.", "dim")]
    for phase in resolved.phases:
        parts.append(Text(f"phase {phase['name']}: {_phase(phase)}"))
    return Group(*parts)


def _options(resolved: Resolved, verbose: bool) -> Any:
    table = _table("Options", "option", "value", "from")
    for section in SECTIONS:
        for dest, value in resolved.values(section).items():
            origin = resolved.origins[f"{section}.{dest}"]
            if verbose or origin != "default":
                table.add_row(*_named(section, dest, value), origin)
    return table


def _named(section: str, dest: str, value: Any) -> tuple[str, str]:
    """An option's flag in slime's spelling and its value as text; flags are given or not, whatever they store."""
    if section == "slime":
        option = own.by_dest()[dest]
        prefix = "--"
        value = own.shown(dest, value)
    else:
        option = catalogue.load(section).option_for(dest, value)
        prefix = catalogue.PREFIXES[section]
    if option.takes_value:
        return prefix + option.flag[2:], _value(value)
    if option.action == "boolean_optional":
        return prefix + to_words(option, value)[0][2:], "given"
    return prefix + option.flag[2:], "given" if value == option.set_by(option.flag) else "not given"


def _value(value: Any) -> str:
    from rich.markup import escape

    if value is None:
        return "-"
    return escape(" ".join(map(str, value)) if isinstance(value, list) else str(value))


def _layout(layout: dict[str, int]) -> Any:
    table = _table("Layout", "what", "number")
    names = {
        "world_size": "trainer ranks",
        "tp": "tensor parallel",
        "pp": "pipeline parallel",
        "cp": "context parallel",
        "dp": "data parallel",
        "ep": "expert parallel",
        "engines": "engines",
        "engine_tp": "tensor parallel in an engine",
    }
    for key, name in names.items():
        table.add_row(name, str(layout[key]))
    return table


def _memory(memory: dict[str, Any]) -> Any:
    table = _table(f"Memory (estimate; {memory['parameters'] / 1e9:.3g} billion parameters)", "where", "part", "size")
    for place, title in (("rank", "fullest trainer rank"), ("engine", "engine device")):
        for part, size in memory[place].items():
            table.add_row(title, part, _bytes(size))
        if place == "rank":
            table.add_row(title, "together", _bytes(sum(memory[place].values())))
    return table


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _phase(phase: dict[str, Any]) -> str:
    found = [f"{section}.{key}={value}" for section in SECTIONS for key, value in (phase.get(section) or {}).items()]
    return ", ".join(found) or "as above"
