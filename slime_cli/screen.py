"""Shows the progress of a long command: progress bars on a terminal, a line now and then elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

QUIET_SECONDS = 10.0
WIDE = 120
"""Columns of a terminal that has room for a bar."""


class Screen:
    """One a command. ``say`` prints above a running bar."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self.start = time.time()

    def say(self, text: str, label: str = "", style: str = "") -> None:
        """``text`` as it is written: a path may have brackets."""
        line = Text.assemble(
            (f"{time.time() - self.start:6.1f}s  ", "dim"), (f"{label} " if label else "", style), text
        )
        self.console.print(line, soft_wrap=not self.console.is_terminal)

    def warn(self, text: str) -> None:
        self.say(text, "warning", "yellow")

    @contextlib.contextmanager
    def progress(self, label: str, total: int, start: int = 0) -> Iterator[Callable[..., None]]:
        """Yields ``advance(n=1, note="")``."""
        if self.console.is_terminal:
            # room: what a note has left
            bars = [BarColumn(40)] if self.console.width >= WIDE else []
            room = self.console.width - len(f"{label} {total}/{total} 0:00:00 ") - 41 * len(bars)
            columns = (
                TextColumn("{task.description}"),
                *bars,
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
            )
            with Progress(*columns, console=self.console) as bar:
                task = bar.add_task(label, total=total, completed=start, note="")

                def move(n: int = 1, note: str = "") -> None:
                    bar.update(task, advance=n)
                    if note:
                        bar.update(task, note=note if len(note) <= room else note[: max(0, room - 1)] + "…")

                yield move
            return
        done = start
        told = time.time()

        def advance(n: int = 1, note: str = "") -> None:
            nonlocal done, told
            done += n
            if time.time() - told >= QUIET_SECONDS or done == total:
                told = time.time()
                self.say(f"{label}: {done} of {total}  {note}")

        yield advance


def note(line: dict[str, Any]) -> str:
    """The text beside the progress bar after a rollout, from its line in ``metrics.jsonl``."""
    if "reward_mean" not in line:  # supervised
        return f"loss {line['train/loss']:.3f}"
    lost = f"  dropped {sum(line['dropped'].values())}" if line["dropped"] else ""
    if not any(name.startswith("train/") for name in line):  # --debug-rollout-only
        return f"reward {line['reward_mean']:.3f}{lost}"
    if "train/grad_norm" not in line:
        return f"reward {line['reward_mean']:.3f}  critic alone: value loss {line['train/value_loss']:.3f}{lost}"
    diff = line.get("train/train_rollout_logprob_abs_diff_max")
    compared = "" if diff is None else f"  logprob diff {diff:.1e}"
    return f"reward {line['reward_mean']:.3f}  grad {line['train/grad_norm']:.2f}{compared}{lost}"
