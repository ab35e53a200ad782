"""``slime doctor``: is this machine, this environment and this checkpoint fit for a run? Looks, never changes anything.

A finding is ok, a warning (a run may still work) or a failure, and one that is not ok says what to do. Nothing of the
engines is imported into this process: versions come from package metadata, imports are tried in processes of their own.
"""

import dataclasses
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import typer

from slime_cli import installed, plain
from slime_cli.findings import Finding, Status

IMPORTS = {
    "sglang": "import sglang.srt.server_args",
    "sglang-router": "import sglang_router.launch_router",
    "megatron-core": "import megatron.core, megatron.training",
    "megatron-bridge": "from slime_cli.hardware import device; device.prepare_trainer(); import megatron.bridge",
    "ray": "import ray",
}
"""Statement that shows an engine can be imported, by name."""
IN_ENGINES = ("sglang", "sglang-router")
"""Packages that engines import, in an environment without Megatron."""

GIB = 1 << 30


def check_python() -> Finding:
    found = platform.python_version()
    if sys.version_info[:2] == (3, 12):
        return Finding("python", "ok", found)
    return Finding("python", "fail", f"{found}, slime needs 3.12", "make one with Python 3.12: uv venv -p 3.12")


def check_versions(version: Callable[[str], str | None] = installed.version) -> Iterator[Finding]:
    for name, tested in installed.TESTED.items():
        fix = f"{installed.command(name)}, or install from ci/lock-*.txt"
        found = version(name)
        if found is None:
            yield Finding(name, "fail", "not installed", fix)
        elif found.split("+")[0] == tested:
            yield Finding(name, "ok", found)
        else:
            yield Finding(name, "warn", f"{found}, tested with {tested}", fix)


def check_import(name: str, statement: str, timeout: float = 300.0) -> Finding:
    """Runs ``statement`` in a new interpreter, in the environment that slime gives the processes that import it."""
    from slime_cli.hardware.device import engine_environment

    title = f"import {name}"
    environment = dict(os.environ)
    # Some engines put their folder's modules (types, logging) before the standard library's when started in it.
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            done = subprocess.run(
                [sys.executable, "-c", statement],
                cwd=elsewhere,
                env=engine_environment(environment) if name in IN_ENGINES else environment,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Finding(title, "fail", f"no end after {timeout:.0f} s", f'try it by hand: python -c "{statement}"')
    if done.returncode == 0:
        return Finding(title, "ok", statement.removeprefix("import "))
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return Finding(title, "fail", last[:300], f'see the traceback of: python -c "{statement}"')


def check_device() -> Finding:
    from slime_cli.hardware.device import find

    device = find()
    if device.kind == "cuda":
        return Finding("device", "ok", f"{device.count} x {device.name}")
    return Finding("device", "ok", f"no GPU: engines run on {usable_cores()} CPU cores")


def usable_cores() -> int:
    """Cores that this process may use: affinity and the container's quota count, not only the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _first_word("/sys/fs/cgroup/cpu.max")
    period = _word("/sys/fs/cgroup/cpu.max", 1)
    if limit and period and limit.isdigit():
        cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def _word(path: str, number: int) -> str | None:
    try:
        words = pathlib.Path(path).read_text().split()
    except OSError:
        return None
    return words[number] if len(words) > number else None


def _first_word(path: str) -> str | None:
    return _word(path, 0)


def check_cores() -> Finding:
    cores = usable_cores()
    if cores >= 2:
        return Finding("cores", "ok", str(cores))
    return Finding("cores", "warn", f"{cores}", "an engine and a trainer want a core each: expect timeouts with one")


def check_memory(minimum: int = 6 * GIB) -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    free = memory.available
    limit = _first_word("/sys/fs/cgroup/memory.max")
    used = _first_word("/sys/fs/cgroup/memory.current")
    if limit and limit.isdigit() and used and used.isdigit():
        free = min(free, int(limit) - int(used))
    detail = f"{free / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    if free >= minimum:
        return Finding("memory", "ok", detail)
    return Finding("memory", "warn", detail, f"even a small run needs {minimum / GIB:.0f} GiB: end other programs")


def existing_parent(path: pathlib.Path) -> pathlib.Path:
    """``path`` or the nearest folder above it that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_run_dir(run_dir: pathlib.Path) -> Iterator[Finding]:
    """Writable, enough space, and on a file system that SQLite's write-ahead log works on."""
    folder = existing_parent(run_dir)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".slime-doctor-"):
            pass
        yield Finding("run directory", "ok", f"{run_dir} can be written")
    except OSError as error:
        yield Finding("run directory", "fail", f"{folder}: {error.strerror}", "give another --run-dir")
    free = shutil.disk_usage(folder).free
    status: Status = "fail" if free < GIB else "warn" if free < 10 * GIB else "ok"
    fix = "" if status == "ok" else "checkpoints and weights need room: free some, or put --run-dir on another disk"
    yield Finding("disk", status, f"{free / GIB:.1f} GiB free at {folder}", fix)
    kind = file_system(folder)
    if kind.startswith(("nfs", "cifs", "smb", "lustre", "fuse.", "9p", "ceph", "gpfs", "beegfs")):
        fix = "put --run-dir on a local disk: SQLite's write-ahead log needs all its processes on one host"
        yield Finding("file system", "warn", f"{folder} is on {kind}", fix)


def file_system(path: pathlib.Path) -> str:
    """The type of the mount that holds ``path``; empty when unknown."""
    import psutil

    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    for parent in (path, *path.parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return ""


def check_shared_memory(path: str = "/dev/shm", minimum: int = GIB) -> Finding:
    if not os.path.isdir(path):
        return Finding("shared memory", "warn", f"{path} is missing", "mount a tmpfs there: Ray and NCCL need it")
    size = shutil.disk_usage(path)
    detail = f"{size.free / GIB:.2f} GiB free of {size.total / GIB:.2f} at {path}"
    if size.free >= minimum:
        return Finding("shared memory", "ok", detail)
    fix = "in docker: --shm-size=8g or --ipc=host" if size.total < minimum else f"remove what lies in {path}"
    return Finding("shared memory", "warn", detail, fix)


def check_port(port: int) -> Finding:
    name = f"port {port}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            fix = f"see who has it (ss -ltnp 'sport = :{port}'), or take another"
            return Finding(name, "fail", f"127.0.0.1:{port}: {reason}", fix)
    return Finding(name, "ok", "free on 127.0.0.1")


def check_proxies(environment: dict[str, str]) -> Finding:
    names = [n for n in environment if n.lower() in ("http_proxy", "https_proxy", "all_proxy") and environment[n]]
    if not names:
        return Finding("proxies", "ok", "none set")
    exempt = f"{environment.get('no_proxy', '')},{environment.get('NO_PROXY', '')}".replace(" ", "").split(",")
    missing = [host for host in ("localhost", "127.0.0.1") if host not in exempt and "*" not in exempt]
    if not missing:
        return Finding("proxies", "ok", f"{', '.join(names)} set, local addresses exempt")
    detail = f"{', '.join(names)} set, no_proxy lacks {', '.join(missing)}: slime avoids them locally, tools may not"
    return Finding("proxies", "warn", detail, "export no_proxy=localhost,127.0.0.1,$no_proxy")


def check_open_files(minimum: int = 4096) -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= minimum:
        return Finding("open files", "ok", f"ulimit -n {soft}")
    return Finding("open files", "warn", f"ulimit -n {soft}: few requests at once", f"ulimit -n {min(65536, hard)}")


def check_sandbox(missing: Callable[[], list[str]] | None = None) -> Finding:
    """The sandbox for programs that a model writes (``--rm-type code``) works here."""
    from slime_cli.rewards import sandbox

    title = "sandbox of --rm-type code"
    try:
        found = (missing or sandbox.missing_here)()
    except sandbox.SandboxError as error:
        return Finding(title, "warn", str(error), "programs of answers cannot be run here: take another reward")
    if not found:
        return Finding(title, "ok", "no network, no other process, files and memory bounded")
    fix = "allow user namespaces and seccomp in the container, Landlock in the kernel (5.13 or newer)"
    return Finding(title, "warn", "; ".join(found), fix)


def examine(
    hf_checkpoint: pathlib.Path | None, run_dir: pathlib.Path, ports: Iterable[int] = (), quick: bool = False
) -> Iterator[Finding]:
    """All findings, as they come: the cheap ones first."""
    yield check_python()
    yield from check_versions()
    yield check_device()
    yield check_cores()
    yield check_memory()
    yield from check_run_dir(run_dir)
    yield check_shared_memory()
    yield from (check_port(port) for port in ports)
    yield check_proxies(dict(os.environ))
    yield check_open_files()
    if hf_checkpoint is not None:
        from slime_cli.commands.doctor_checkpoint import TEMPLATE, check_checkpoint
        from slime_cli.commands.doctor_training import check_training

        found = list(check_checkpoint(hf_checkpoint))
        yield from found
        if any(finding.name == TEMPLATE and finding.status != "fail" for finding in found):
            yield check_training(hf_checkpoint)
    if not quick:
        yield check_sandbox()
        yield from (check_import(name, statement) for name, statement in IMPORTS.items())


def exit_code(findings: Iterable[Finding]) -> int:
    """2 when anything failed; warnings pass."""
    return 2 if any(finding.status == "fail" for finding in findings) else 0


app = typer.Typer(**plain.TYPER, help="Check this machine, the installed engines and a checkpoint.")


@app.callback(invoke_without_command=True)
def doctor(
    context: typer.Context,
    hf_checkpoint: Annotated[pathlib.Path | None, typer.Option("--hf-checkpoint", help="Check this model too.")] = None,
    run_dir: Annotated[pathlib.Path, typer.Option("--run-dir", help="Where a run would write.")] = pathlib.Path("."),
    port: Annotated[list[int] | None, typer.Option("--port", help="A port that must be free; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not try to import the engines (saves a minute).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check this machine, the installed engines and a checkpoint. Exit code 2 when something must be fixed."""
    if context.invoked_subcommand is None:
        _end(list(examine(hf_checkpoint, run_dir, port or (), quick)), as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def function(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(help="generate, reward, ..., or the option: --custom-rm-path.")],
    path: Annotated[str, typer.Argument(help="package.module.function, or FILE.py:function.")],
) -> None:
    """Try a function of yours as a run would call it. Options of `slime train` may follow: they make its `args`."""
    from slime_cli.commands.doctor_function import check

    _end(list(check(kind, path, context.args)), as_json=False)


def _end(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    raise typer.Exit(exit_code(findings))


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table("check", "", "found")
    for finding in findings:
        detail = Text(finding.detail) + Text(f"\n-> {finding.fix}" if finding.fix else "", "italic")
        table.add_row(Text(finding.name), Text(finding.status, styles[finding.status]), detail)
    counts = {status: sum(finding.status == status for finding in findings) for status in styles}
    console = Console()
    console.print(table)
    console.print(Text(", ".join(f"{count} {status}" for status, count in counts.items() if count)))
    for finding in findings:
        if finding.shown:
            print(f"\n{finding.name}, token by token:", *finding.shown, sep="\n")
