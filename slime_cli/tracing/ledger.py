"""``slime trace ledger`` and ``slime trace why``: each sample dispatched is trained, dropped or in flight."""

import collections
import dataclasses
import os
import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slime_cli.buffer.journal import Journal, Ledger, Record
from slime_cli.errors import DataError
from slime_cli.tracing.reading import journals


def ledgers(run_dir: str | os.PathLike[str]) -> dict[str, Ledger]:
    """Phase -> ledger. The phase of a single-phase run is ``""``."""
    found = {}
    for phase, path in journals(run_dir).items():
        with Journal.open_readonly(path) as journal:
            found[phase] = journal.ledger()
    return found


def total(parts: dict[str, Ledger]) -> Ledger:
    """The ledger of the whole run. It balances only if every phase does; see :func:`balanced`."""
    ledgers = parts.values()
    dropped: collections.Counter[str] = collections.Counter()
    in_flight: collections.Counter[str] = collections.Counter()
    for ledger in ledgers:
        dropped.update(ledger.dropped)
        in_flight.update(ledger.in_flight)
    return Ledger(
        dispatched=sum(ledger.dispatched for ledger in ledgers),
        trained=sum(ledger.trained for ledger in ledgers),
        dropped=dict(dropped),
        in_flight=dict(in_flight),
        trained_twice=sum(ledger.trained_twice for ledger in ledgers),
        committed=sum(ledger.committed for ledger in ledgers),
        rollbacks=tuple(rollback for ledger in ledgers for rollback in ledger.rollbacks),
    )


def balanced(parts: dict[str, Ledger]) -> bool:
    """Phase by phase: a surplus in one must not pay for a loss in another."""
    return all(ledger.balanced for ledger in parts.values())


def sentence(ledger: Ledger, holds: bool) -> str:
    """One line: ``1,024 dispatched = 960 trained + 32 dropped (stale 32) + 32 in flight: holds``."""
    drops = ", ".join(f"{reason or 'unnamed'} {count:,}" for reason, count in sorted(ledger.dropped.items()))
    flying = ", ".join(f"{fate.lower()} {count:,}" for fate, count in sorted(ledger.in_flight.items()))
    dropped = sum(ledger.dropped.values())
    in_flight = sum(ledger.in_flight.values())
    return (
        f"{ledger.dispatched:,} dispatched {'=' if holds else '≠'} {ledger.trained:,} trained"
        f" + {dropped:,} dropped{f' ({drops})' if drops else ''}"
        f" + {in_flight:,} in flight{f' ({flying})' if flying else ''}: {'holds' if holds else 'DOES NOT HOLD'}"
    )


def rollbacks(phase: str, ledger: Ledger) -> list[str]:
    """One line for each rollback: which commits no longer hold, why, and what happened to their samples."""
    where = f"phase {phase}: " if phase else ""
    return [
        f"{where}rolled back from step {r.from_step} to {r.to_step} on"
        f" {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(r.time))}: {r.again:,} samples given to be trained again,"
        f" {r.dropped:,} dropped (batch_lost); {r.reason}"
        for r in ledger.rollbacks
    ]


def problems(phase: str, ledger: Ledger) -> list[str]:
    """The sums that do not add up, in words; [] when the ledger balances."""
    where = f"phase {phase}: " if phase else ""
    placed = ledger.trained + sum(ledger.dropped.values()) + sum(ledger.in_flight.values())
    found = []
    if placed != ledger.dispatched:
        found.append(f"{where}{ledger.dispatched - placed:+,} samples dispatched but nowhere")
    if ledger.committed != ledger.trained:
        found.append(f"{where}{ledger.trained:,} samples are TRAINED, the commits claim {ledger.committed:,}")
    if ledger.trained_twice:
        found.append(f"{where}{ledger.trained_twice:,} trained twice")
    return found


def render(parts: dict[str, Ledger]) -> RenderableType:
    table = Table("phase", "dispatched", "trained", "dropped", "in flight", "trained twice", "sum")
    for column in table.columns[1:-1]:
        column.justify = "right"
    rows = dict(parts) if len(parts) == 1 else {**parts, "all": total(parts)}
    for phase, ledger in rows.items():
        holds = balanced(parts) if phase == "all" else ledger.balanced
        cells = (ledger.dispatched, ledger.trained, sum(ledger.dropped.values()), sum(ledger.in_flight.values()))
        verdict = Text("holds", "green") if holds else Text("DOES NOT HOLD", "bold red")
        table.add_row(phase or "run", *(f"{cell:,}" for cell in cells), f"{ledger.trained_twice:,}", verdict)
    lines = [Text(sentence(total(parts), balanced(parts)))]
    lines += [Text(line) for phase, ledger in parts.items() for line in rollbacks(phase, ledger)]
    lines += [Text(problem, "red") for phase, ledger in parts.items() for problem in problems(phase, ledger)]
    return Group(table, *lines)


def as_json(parts: dict[str, Ledger]) -> dict[str, object]:
    phases = {phase or "run": {**dataclasses.asdict(part), "balanced": part.balanced} for phase, part in parts.items()}
    return {"phases": phases, "total": dataclasses.asdict(total(parts)), "balanced": balanced(parts)}


def find(run_dir: str | os.PathLike[str], sample_index: int, phase: str | None = None) -> dict[str, Record]:
    """Phase -> what its journal says of the sample (indices start anew in each phase). DataError when none has it."""
    found = {}
    ranges = []
    for name, path in journals(run_dir).items():
        if phase is not None and name != phase:
            continue
        with Journal.open_readonly(path) as journal:
            record = journal.record(sample_index)
            ranges.append(f"{name or 'the run'} dispatched {journal.ledger().dispatched:,}")
        if record is not None:
            found[name] = record
    if not found:
        looked = "; ".join(ranges) or f"no phase {phase!r}"
        raise DataError(f"{run_dir}: no sample {sample_index} ({looked})", "indices count from 0 in each phase")
    return found


def render_record(phase: str, record: Record) -> RenderableType:
    """Everything about one sample, as a two-column table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    prompt = record.prompt.prompt
    text = prompt if isinstance(prompt, str) else " | ".join(f"{m.get('role')}: {m.get('content')}" for m in prompt)
    fate = record.fate.value + (f" ({record.reason})" if record.reason else "")
    cells = {
        "sample": f"{record.sample_index}, number {record.position} of group {record.group_index}",
        "phase": phase,
        "from": f"{record.source}:{record.row}, epoch {record.epoch}",
        "prompt": text if len(text) <= 300 else text[:299] + "…",
        "label": record.prompt.label,
        "fate": fate,
        "attempts": record.attempts,
        "reward": record.reward,
        "rollout": record.rollout_id,
        "step": record.step,
        "trained before": ", ".join(f"in step {step}, undone by a rollback" for step in record.undone),
        "weight version": record.weight_version,
    }
    for name, value in cells.items():
        if value not in (None, ""):
            table.add_row(Text(name, "bold"), Text(str(value)))
    return table
