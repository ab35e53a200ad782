"""A run's folder: claimed by one configuration, resumed by one that does not rewrite its past. Torch-free.

What lies where in it: :mod:`slime_cli.manifests.layout`.
"""

import contextlib
import json
import os
import pathlib
import platform
import socket
import time
from collections.abc import Iterator

import msgspec

import slime_cli
from slime_cli import disk, installed, locks, manifests
from slime_cli.errors import UsageError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import layout
from slime_cli.options import resume
from slime_cli.options.resolve import Resolved

PhaseOf = tuple[str, Resolved, pathlib.Path]
"""Name, options and folder of a phase."""


def phases(resolved: Resolved, run_dir: pathlib.Path) -> list[PhaseOf]:
    """The phases of a run in order; one called train where the profile names none."""
    if not resolved.phases:
        return [("train", resolved, run_dir)]
    return [(phase["name"], resolved.for_phase(i), run_dir / phase["name"]) for i, phase in enumerate(resolved.phases)]


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
    """This process is the only one to run ``folder``, until it ends, however that is. Raises UsageError when there is
    another."""
    fd = _lock(folder, make=True)
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        os.close(fd)


def refuse_second(folder: pathlib.Path) -> None:
    """Raises UsageError when another process runs ``folder``. Changes nothing."""
    with contextlib.suppress(OSError):  # none has run there, or nobody can: that is said where it is claimed
        os.close(_lock(folder, make=False))


def _lock(folder: pathlib.Path, *, make: bool) -> int:
    try:
        return locks.take(folder / layout.LOCK, make=make)
    except locks.TakenError as error:
        message = f"--run-dir {folder}: {str(error) or 'another process'} is running it"
        raise UsageError(message, "wait for it or stop it, or choose another --run-dir") from None


def versions() -> dict[str, str]:
    """slime's and the engines' versions, without importing them."""
    own = {"slime": slime_cli.__version__, "python": platform.python_version()}
    return own | {name: found for name in installed.TESTED if (found := installed.version(name))}


def earlier(resolved: Resolved, folder: pathlib.Path) -> manifests.Run | None:
    """The run that the folder holds. Raises UsageError when these options would rewrite its past."""
    before = _read(folder)
    refused = [str(change) for change in changed(resolved, folder) if not resume.free(change.section, change.dest)]
    if refused:
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise UsageError(
            f"--run-dir {folder} holds a run with other options: {'; '.join(refused[:5])}{more}",
            "choose another --run-dir, or resume with these as they were; rollouts, intervals, engines, timeouts and "
            "memory may change (docs/options.md)",
        )
    return before


def changed(resolved: Resolved, folder: pathlib.Path) -> list[resume.Change]:
    """Options that the attempt before had otherwise; none where there was none."""
    before = _read(folder)
    return resume.changes(before.options, resume.recorded(resolved)) if before else []


def _read(folder: pathlib.Path) -> manifests.Run | None:
    path = folder / layout.RUN
    return manifests.read(path, manifests.Run) if path.exists() else None


def claim(resolved: Resolved, folder: str | os.PathLike) -> manifests.Run:
    """Writes or updates ``run.json``. Raises UsageError when these options would rewrite the run's past."""
    folder = pathlib.Path(folder)
    before = earlier(resolved, folder)
    number, created = (before.attempt + 1, before.created) if before else (1, time.time())
    device = hardware.find()
    attempt = manifests.Attempt(
        number=number,
        started=time.time(),
        argv=list(resolved.argv),
        changed={change.name: (change.before, change.now) for change in changed(resolved, folder)},
        versions=versions(),
        hardware={"device": device.kind, "count": device.count, "name": device.name, "cores": os.cpu_count()},
    )
    run = manifests.Run(
        options=resume.recorded(resolved),
        origins=resolved.origins,
        argv=attempt.argv,
        versions=attempt.versions,
        hardware=attempt.hardware,
        attempt=number,
        created=created,
        attempts=[*(before.attempts if before else ()), attempt],
    )
    manifests.write(folder / layout.RUN, run)
    return run


def computed_with(folder: pathlib.Path, kernels: str) -> None:
    """Adds to ``run.json`` what the trainer was found to compute with, for this attempt."""
    run = _read(folder)
    if run is None:
        return
    now = run.hardware | {"trainer_kernels": kernels}
    attempts = [*run.attempts[:-1], *(msgspec.structs.replace(last, hardware=now) for last in run.attempts[-1:])]
    manifests.write(folder / layout.RUN, msgspec.structs.replace(run, hardware=now, attempts=attempts))


def append_line(path: pathlib.Path, values: dict) -> None:
    """One JSON line, whole or torn at the end of the file where readers skip it."""
    with disk.naming(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(values, default=float) + "\n")
