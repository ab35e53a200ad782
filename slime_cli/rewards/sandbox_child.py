"""The inside of a sandbox: takes rights away from itself, runs one program, writes what came of it.

Started by :mod:`slime_cli.rewards.sandbox` as a file (``python -I -S``), so it imports the standard library alone.
Descriptor 3 holds the order, 4 takes the answers; both are memory. What this machine does not let it take away it says
in the first line of 4. Invariant: the program's first line runs after every isolation.

Layers: namespaces (user, network, IPC, mounts with a small file system of its own for the scratch folder), Landlock
(files: reads what Python needs, writes in the scratch folder), seccomp (no socket, no process, no signal to others),
limits, no capability.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

ORDER, ANSWER = 3, 4
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 1 << 18
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 2, 4, 8, 1 << 14
KNOWN_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Kinds of access to files by Landlock's version; 16 from version 5 on."""

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
CALLS = {
    "socket": (41, 198),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
}
"""Numbers of the refused system calls, on x86_64 and aarch64."""
CLONE, CLONE3, KILL, TGKILL, PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (302, 261)
CLONE_THREAD = 0x10000


def main() -> None:
    with os.fdopen(ORDER) as source:
        order: dict[str, Any] = json.load(source)
    missing = isolated(order)
    write({"missing": missing})
    sys.path += order["paths"]
    sys.argv = ["answer.py"]
    if order["mode"] == "program":
        run_program(order["answer"])
    else:
        run_tests(order)


def write(message: dict[str, Any]) -> None:
    os.write(ANSWER, (json.dumps(message) + "\n").encode())


def checked(value: int) -> int:
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return value


def isolated(order: dict[str, Any]) -> list[str]:
    """Rights that could not be removed, each with the reason."""
    missing: list[str] = []

    @contextlib.contextmanager
    def layer(what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, AttributeError) as error:
            missing.append(f"{what}: {getattr(error, 'strerror', None) or error}")

    with layer("no namespaces of its own"):
        namespaces()
        scratch_system(order["scratch"], order["files"])
    os.chdir(order["scratch"])
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    with layer("files are not kept from it (Landlock)"):
        files(order["readable"], order["scratch"])
    without_capabilities()
    limits(order)
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != order["owner"]:
        os._exit(1)
    with layer("system calls are not refused: sockets, processes, signals (seccomp)"):
        system_calls()
    return missing


def namespaces() -> None:
    user, group = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS | os.CLONE_NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def scratch_system(folder: str, size: int) -> None:
    """A file system in memory on the scratch folder: its size bounds all files together."""
    checked(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    options = f"size={size},nr_inodes=4096,mode=700".encode()
    checked(LIBC.mount(b"scratch", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options))


def files(readable: list[str], scratch: str) -> None:
    """Landlock: reads what Python needs, writes in the scratch folder."""
    version = checked(LIBC.syscall(LANDLOCK_CREATE, None, 0, 1))
    handled = (1 << KNOWN_BITS.get(version, 16)) - 1
    asked = struct.pack("QQQ", handled, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = checked(LIBC.syscall(LANDLOCK_CREATE, asked, len(asked), 0))
    allowed = [(path, EXECUTE | READ_FILE | READ_DIR) for path in readable]
    allowed += [(path, READ_FILE | WRITE_FILE) for path in DEVICES]
    for path, access in [*allowed, (scratch, handled)]:
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access & handled, descriptor)
        checked(LIBC.syscall(LANDLOCK_ADD, rules, 1, rule, 0))
        os.close(descriptor)
    checked(LIBC.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def without_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)
    checked(LIBC.capset(header, struct.pack("6I", *[0] * 6)))


def limits(order: dict[str, Any]) -> None:
    seconds = int(order["seconds"]) + 2
    for kind, most in (
        (resource.RLIMIT_AS, order["memory"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, order["file"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def system_calls() -> None:
    """A seccomp filter: what is refused fails with EPERM; clone3 with ENOSYS, after which libraries use clone."""
    if platform.machine() not in ARCHITECTURES:
        raise OSError(0, f"no list of calls for {platform.machine()}")
    architecture, column = ARCHITECTURES[platform.machine()]
    load, equal, at_least, has, result = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026
    number, first_argument = 0, 16
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (result, 0, 0, 0x80000000), (load, 0, 0, number)]
    code += [(at_least, 0, 1, 0x40000000), (result, 0, 0, refuse)]
    for numbers in CALLS.values():
        if numbers[column] is not None:
            code += [(equal, 0, 1, numbers[column]), (result, 0, 0, refuse)]
    code += [(equal, 0, 1, CLONE3[column]), (result, 0, 0, unknown)]
    for numbers, test, value in (
        (CLONE, has, CLONE_THREAD),
        (KILL, equal, os.getpid()),
        (TGKILL, equal, os.getpid()),
        (PRLIMIT, equal, 0),
    ):
        code += [(equal, 0, 4, numbers[column]), (load, 0, 0, first_argument), (test, 1, 0, value)]
        code += [(result, 0, 0, refuse), (result, 0, 0, allow)]
    code += [(result, 0, 0, allow)]
    packed = b"".join(struct.pack("HBBI", *one) for one in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("H6xQ", len(code), ctypes.addressof(buffer))
    checked(LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


def module_of(name: str, source: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    module.__file__ = "answer.py"
    sys.modules[name] = module
    return module.__dict__


def run_program(source: str) -> None:
    """Reads standard input, writes standard output, as a script."""
    os.close(ANSWER)
    space = module_of("__main__", source)
    exec(compile(source, "answer.py", "exec"), space)


def run_tests(order: dict[str, Any]) -> None:
    """Runs the answer as a module, then each test; a line of 4 for each, which begins with the order's secret word."""
    sys.set_int_max_str_digits(0)
    space = module_of("answer", order["answer"])
    exec(order["before"], space)
    exec(compile(order["answer"], "answer.py", "exec"), space)
    for place, test in enumerate(order["tests"]):
        try:
            found = {"value": called(space, order["function"], test)} if order["function"] else asserted(space, test)
            line = json.dumps({"secret": order["secret"], "test": place, **found})
        except BaseException as error:
            line = json.dumps({"secret": order["secret"], "test": place, "error": f"{type(error).__name__}: {error}"})
        os.write(ANSWER, (line + "\n").encode())


def called(space: dict[str, Any], name: str, arguments: list[Any]) -> Any:
    owner = space.get("Solution")
    function = space[name] if name in space else getattr(owner() if owner is not None else None, name)
    return function(*arguments)


def asserted(space: dict[str, Any], test: str) -> dict[str, Any]:
    """Runs a text of assertions, then the functions ``test_*`` and the unittest classes that it defines."""
    before = dict(space)
    exec(compile(test, "test.py", "exec"), space)
    made = [value for name, value in space.items() if before.get(name) is not value]
    for value in made:
        name = getattr(value, "__name__", "")
        if isinstance(value, types.FunctionType) and name.startswith("test_") and not value.__code__.co_argcount:
            value()
        elif isinstance(value, type) and any(base.__module__ == "unittest.case" for base in value.__mro__):
            suite_passes(value)
    return {"value": True}


def suite_passes(case: type) -> None:
    import unittest

    if issubclass(case, unittest.TestCase):
        outcome = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(outcome)
        problems = [*outcome.failures, *outcome.errors]
        assert outcome.testsRun and not problems, problems[0][1] if problems else "no test ran"


if __name__ == "__main__":
    main()
