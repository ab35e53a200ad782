"""A run's folder: claimed by one configuration, resumed by the same one. Torch-free.

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

import slime_cli
from slime_cli import disk, installed, locks, manifests
from slime_cli.errors import UsageError
from slime_cli.hardware import device as hardware
from slime_cli.manifests import layout
from slime_cli.options.resolve import Resolved

JOURNAL = layout.JOURNAL
METRICS = layout.METRICS
StageOf = tuple[str, Resolved, pathlib.Path]
"""Name, options and folder of a stage."""
NOT_IDENTITY = {
    "run_dir",
    "on_damaged_checkpoint",
    "rollout_endpoint",
    "opd_teacher_url",
    "opd_teacher_timeout",
    "trace",
    "sglang_router_ip",
    "sglang_router_port",
    "max_groups_without_progress",
    "drop_rollouts",
    "max_logprob_diff",
}
"""Options that may differ between attempts: they say where, not what, or what a resume does, or when to give up."""


def stages(resolved: Resolved, run_dir: pathlib.Path) -> list[StageOf]:
    """The stages of a run in order; one called train where the profile names none."""
    if not resolved.stages:
        return [("train", resolved, run_dir)]
    return [(stage["name"], resolved.for_stage(i), run_dir / stage["name"]) for i, stage in enumerate(resolved.stages)]


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
    """The run that the folder holds. Raises UsageError when it belongs to another configuration."""
    path = folder / layout.RUN
    if not path.exists():
        return None
    before = manifests.read(path, manifests.Run)
    changed = _differences(before.options, _options(resolved))
    if changed:
        raise UsageError(
            f"--run-dir {folder} holds a run with other options: {'; '.join(changed[:5])}",
            "choose another --run-dir, or start with the same options to resume",
        )
    return before


def _options(resolved: Resolved) -> dict:
    """As ``run.json`` has them."""
    names = ("slime", "megatron", "sglang", "router", "stages")
    return json.loads(json.dumps({name: resolved.values(name) for name in names}, default=str))


def claim(resolved: Resolved, folder: str | os.PathLike) -> manifests.Run:
    """Writes or updates ``run.json``. Raises UsageError when the folder belongs to another configuration."""
    folder = pathlib.Path(folder)
    before = earlier(resolved, folder)
    attempt, created = (before.attempt + 1, before.created) if before else (1, time.time())
    device = hardware.find()
    run = manifests.Run(
        options=_options(resolved),
        origins=resolved.origins,
        argv=list(resolved.argv),
        versions=versions(),
        hardware={"device": device.kind, "count": device.count, "name": device.name, "cores": os.cpu_count()},
        attempt=attempt,
        created=created,
    )
    manifests.write(folder / layout.RUN, run)
    return run


def _differences(before: dict, now: dict) -> list[str]:
    out = []
    for section in ("slime", "megatron", "sglang", "router"):
        old = before.get(section, {})
        new = now[section]
        for name in sorted((old.keys() | new.keys()) - NOT_IDENTITY):
            if old.get(name) != new.get(name):
                out.append(f"{name} was {old.get(name)!r}, now {new.get(name)!r}")
    if before.get("stages") != now["stages"]:
        out.append("the profile's stages differ")
    return out


def append_line(path: pathlib.Path, values: dict) -> None:
    """One JSON line, whole or torn at the end of the file where readers skip it."""
    with disk.naming(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(values, default=float) + "\n")
