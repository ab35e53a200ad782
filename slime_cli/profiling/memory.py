"""A device's memory in each phase of a rollout: what was predicted before the run, and what was measured in it.

Used by ``slime profile memory``. The prediction is :mod:`slime_cli.options.memory_phases`'s, which the run writes down
when it starts; measured is the most that a trainer's rank had in the phase's spans (``peak_bytes``, of torch's
allocator, or on a CPU what its process has beside its libraries), and what an engine told when it had started. Pure,
but for the table.
"""

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from slime_cli.tracing import names
from slime_cli.tracing.spans import TraceSpan

PHASE_OF = {
    "log_probs": "log_probs",
    "ref_log_probs": "log_probs",
    "old_log_probs": "log_probs",
    "teacher_log_probs": "log_probs",
    "values": "log_probs",
    "forward_backward": "train",
    "optimizer": "train",
    "export": "publish",
    "offload": "generate",
}
"""Span of a trainer's rank -> phase of a rollout that it belongs to; what is held after the last part is offloaded is
what the trainer has while engines generate."""
Predicted = Mapping[str, Mapping[str, Mapping[str, int]]]
"""``[phase][side][part]``, bytes."""
Measured = dict[str, dict[str, int]]
"""``[phase][side]``, bytes."""


def measured(spans: Iterable[TraceSpan], phase: str) -> Measured:
    """In the steps of the run's phase of that name; nothing of what no span tells."""
    spans = list(spans)
    steps = sorted(
        (s.ts, s.end) for s in spans if s.process == names.RUN and s.name == names.STEP and s.phase in (phase, None)
    )
    starts = [start for start, _ in steps]
    found: Measured = {}
    for span in spans:
        at = bisect.bisect_right(starts, span.ts) - 1
        where = PHASE_OF.get(span.name)
        if where is None or span.process == names.RUN or at < 0 or span.ts > steps[at][1]:
            continue
        size = span.args.get("held_bytes" if span.name == "offload" else "peak_bytes")
        if span.name == "offload" and "weights" not in span.args.get("parts", ()):
            continue
        if size is not None:
            sides = found.setdefault(where, {})
            sides["trainer"] = max(sides.get("trainer", 0), int(size))
    told = [engine for span in spans if span.name == "wait_for_engines" for engine in span.args.get("engines", ())]
    if told and steps:
        found.setdefault("generate", {})["engine"] = max(sum(engine.values()) for engine in told)
    return found


def table(title: str, predicted: Predicted, found: Measured) -> Table:
    """Parts in a phase's rows, with their sum beside what was measured."""
    out = Table("phase", "side", "predicted", "measured", "parts", title=title, title_justify="left")
    for phase, sides in predicted.items():
        for side, parts in sides.items():
            if not parts and side not in found.get(phase, {}):
                continue
            size = found.get(phase, {}).get(side)
            words = ", ".join(f"{name} {amount(part)}" for name, part in parts.items())
            out.add_row(phase, side, amount(sum(parts.values())), "-" if size is None else amount(size), words)
    for column in out.columns[2:4]:
        column.justify = "right"
    return out


def amount(size: int) -> str:
    """With a binary unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def as_json(predicted: Predicted, found: Measured) -> dict[str, Any]:
    return {
        phase: {side: {"predicted": parts, "measured": found.get(phase, {}).get(side)} for side, parts in sides.items()}
        for phase, sides in predicted.items()
    }
