"""A run's folder: claimed by one configuration, resumed by the same one. Torch-free.

``RUN/`` holds run.json, metrics.jsonl, summary.json, trace/, logs/, endpoint.json and model/ (a ``tiny:`` checkpoint). A
stage's own things (journal.sqlite, rollouts/, checkpoints/, weights/, eval/) are in ``RUN/STAGE/``, or in ``RUN/`` itself for
a run without stages.
"""

import json
import os
import pathlib
import platform
import time

import slime_cli
from slime_cli import installed, manifests
from slime_cli.errors import UsageError
from slime_cli.hardware import device as hardware

NOT_IDENTITY = {"run_dir", "rollout_endpoint", "opd_teacher_url", "opd_teacher_timeout", "trace", "sglang_router_ip", "sglang_router_port"}
"""Options that may differ between attempts: they say where, not what."""


def versions() -> dict[str, str]:
    """slime's and the engines' versions, without importing them."""
    own = {"slime": slime_cli.__version__, "python": platform.python_version()}
    return own | {name: found for name in installed.TESTED if (found := installed.version(name))}


def claim(resolved, folder: str | os.PathLike) -> manifests.Run:
    """Writes or updates ``run.json``. Raises UsageError when the folder cannot be used or belongs to another configuration."""
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--run-dir {folder}: cannot write there ({error.strerror})", "choose a folder that you may write to") from None
    options = json.loads(json.dumps({name: getattr(resolved, name) for name in ("slime", "megatron", "sglang", "router", "stages")}, default=str))
    path = folder / "run.json"
    attempt, created = 1, time.time()
    if path.exists():
        before = manifests.read(path, manifests.Run)
        changed = _differences(before.options, options)
        if changed:
            raise UsageError(
                f"--run-dir {folder} holds a run with other options: {'; '.join(changed[:5])}",
                "choose another --run-dir, or start with the same options to resume",
            )
        attempt, created = before.attempt + 1, before.created
    device = hardware.find()
    run = manifests.Run(
        options=options, origins=resolved.origins, argv=list(resolved.argv), versions=versions(),
        hardware={"device": device.kind, "count": device.count, "name": device.name, "cores": os.cpu_count()},
        attempt=attempt, created=created,
    )  # fmt: skip
    manifests.write(path, run)
    return run


def _differences(before: dict, now: dict) -> list[str]:
    out = []
    for section in ("slime", "megatron", "sglang", "router"):
        old, new = before.get(section, {}), now[section]
        for name in sorted((old.keys() | new.keys()) - NOT_IDENTITY):
            if old.get(name) != new.get(name):
                out.append(f"{name} was {old.get(name)!r}, now {new.get(name)!r}")
    if before.get("stages") != now["stages"]:
        out.append("the profile's stages differ")
    return out


def append_line(path: pathlib.Path, values: dict) -> None:
    """One JSON line, whole or torn at the end of the file where readers skip it."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(values, default=float) + "\n")
