"""Programs that a model wrote, each run once in a process of its own that may do almost nothing.

Called by the ``code`` graders inside reward workers. A program has no network, starts no process, signals nobody, reads
what Python needs and writes in a scratch folder that is gone afterwards; time, memory and files are bounded. How is in
:mod:`slime_cli.rewards.sandbox_child`, and what a machine does not offer is said once by the grader.

Invariants: :func:`run` returns in bounded time, whatever the program does; its process has ended then. Its time is what
it ran or slept, without what it waited for a processor, so that a busy machine judges as an idle one does.
"""

import dataclasses
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import Any

CHILD = pathlib.Path(__file__).with_name("sandbox_child.py")
MEMORY = 1 << 30
FILE = 16 << 20
"""The largest file, and the longest output."""
FILES = 64 << 20
"""All files together, where the machine lets a sandbox have a file system of its own."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
START_POLL = 0.01
INHERITED = ("LD_LIBRARY_PATH",)


class SandboxError(Exception):
    """The program could not be judged here; it is not its fault."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """The result of a program."""

    ended: str
    """``exit``, ``signal`` or ``time``."""
    code: int
    output: str
    error: str
    seconds: float
    """Its own."""
    lines: list[dict[str, Any]]
    """Results of tests, in order; what lacks the order's secret word is not among them."""
    missing: list[str]
    """Isolation that this machine does not offer, each with the reason."""


def run(
    answer: str,
    *,
    stdin: str = "",
    tests: list[Any] | None = None,
    function: str = "",
    before: str = "",
    seconds: float,
    until: float,
    memory: int = MEMORY,
) -> Ran:
    """Runs ``answer`` as a script on ``stdin``; with ``tests`` as a module, and then each of them.

    ``function``: its name, where tests are lists of arguments; without, they are texts of assertions. ``seconds`` are
    the program's own; ``until``: the time of the monotonic clock at which to give up, with a SandboxError.
    """
    secret = secrets.token_hex(16)
    scratch = tempfile.mkdtemp(prefix="slime-code-")
    order = {
        "answer": answer,
        "mode": "program" if tests is None else "tests",
        "tests": tests,
        "function": function,
        "before": before,
        "secret": secret,
        "seconds": seconds,
        "memory": memory,
        "file": FILE,
        "files": FILES,
        "scratch": scratch,
        "readable": readable(),
        "paths": [sysconfig.get_path("purelib")],
        "owner": os.getpid(),
    }
    held = [memory_file(text) for text in (stdin, "", "", json.dumps(order), "")]
    try:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _START, *map(str, held), str(CHILD)],
            stdin=held[0],
            stdout=held[1],
            stderr=held[2],
            pass_fds=held[3:],
            start_new_session=True,
            cwd="/",
            env=ENVIRONMENT | {name: os.environ[name] for name in INHERITED if name in os.environ},
        ) as process:
            ended, own = watched(process, held[4], seconds, until)
        return outcome(process.returncode, ended, own, held, secret)
    finally:
        for descriptor in held:
            os.close(descriptor)
        shutil.rmtree(scratch, ignore_errors=True)


_START = """
import os, sys
*held, child = sys.argv[1:]
order, answer = os.dup(int(held[3])), os.dup(int(held[4]))
os.dup2(order, 3), os.dup2(answer, 4)
os.closerange(5, 256)
sys.argv = [child]
exec(compile(open(child).read(), child, "exec"))
"""
"""Brings the two descriptors to their numbers."""


def readable() -> list[str]:
    """Folders and files that Python and its libraries need."""
    found = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", sys.base_prefix, sys.prefix]
    return [os.path.realpath(path) for path in dict.fromkeys(found) if os.path.isdir(path)]


def memory_file(text: str) -> int:
    descriptor = os.memfd_create("slime-code")
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def watched(process: subprocess.Popen[bytes], answers: int, seconds: float, until: float) -> tuple[bool, float]:
    """Waits; kills the program when its own time is over. Whether it ended by itself, and its own time."""
    begin: float | None = None
    before = 0.0
    own = 0.0
    try:
        while own < seconds:
            if time.monotonic() >= until:
                raise SandboxError("this machine is too busy to run the tests in time: raise --rm-timeout")
            if begin is None and os.fstat(answers).st_size:  # it is isolated now, and the program begins
                begin = time.monotonic()
                before = waited_for_processor(process.pid)
            try:
                process.wait(START_POLL if begin is None else max(0.01, min(seconds - own, until - time.monotonic())))
                return True, own if begin is None else time.monotonic() - begin
            except subprocess.TimeoutExpired:
                if begin is not None:
                    own = time.monotonic() - begin - (waited_for_processor(process.pid) - before)
        return False, own
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def waited_for_processor(pid: int) -> float:
    """Seconds in which it could have run and did not; 0 where the kernel does not count them."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def outcome(code: int, by_itself: bool, own: float, held: list[int], secret: str) -> Ran:
    output, error, answers = (read_all(held[place]) for place in (1, 2, 4))
    lines = [message for line in answers.splitlines() if (message := parsed(line)) is not None]
    missing = lines[0]["missing"] if lines and "missing" in lines[0] else None
    if missing is None and by_itself:
        raise SandboxError(f"the sandbox did not start (exit code {code}): {error.strip()[-300:]}")
    ended = "time" if not by_itself else "signal" if code < 0 else "exit"
    tests = [line for line in lines if line.get("secret") == secret]
    return Ran(ended, code, output, error, own, tests, missing or [])


def parsed(line: str) -> dict[str, Any] | None:
    """The program may write there too, anything."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_all(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, min(size, FILE), 0).decode("utf-8", "replace")


def missing_here() -> list[str]:
    """Protections that sandboxes of this machine lack, each with the reason: for ``slime doctor``."""
    return run("pass", seconds=10.0, until=time.monotonic() + 60).missing
