"""A server process that cannot outlive its owner, and whose last words are kept.

Used for SGLang servers and the router. The child gets SIGKILL from the kernel when the thread that started it ends
(PR_SET_PDEATHSIG), so a killed owner leaves nothing running; it has a session of its own, so a Ctrl-C in the terminal
reaches the owner alone, which then stops its children in order.
"""

import collections
import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess

from slime_cli.errors import UsageError
from slime_cli.process_signals import die_with_parent

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class Server:
    """One child process writing to ``log``."""

    def __init__(self, name: str, argv: list[str], environment: dict[str, str], log: pathlib.Path):
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def last_lines(self, count: int = 12) -> str:
        """The end of what it wrote, without the noise of warnings."""
        lines = collections.deque(maxlen=count)
        for line in self.log.read_text(errors="replace").splitlines():
            if line.strip() and "Warning" not in line and "warnings.warn" not in line:
                lines.append(line[:400])
        return "\n".join(lines)

    def stop(self, patience: float = 3.0) -> None:
        """SIGTERM, then SIGKILL to its whole session. SGLang answers the first within 5 to 8 s, most of it asleep."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # workers that it left behind
        except ProcessLookupError:
            pass
        self._process.wait()


def local_environment() -> dict[str, str]:
    """This process's environment with proxies switched off for local addresses."""
    out = dict(os.environ)
    if any(out.get(name) for name in _PROXIES):
        for name in ("no_proxy", "NO_PROXY"):
            out[name] = ",".join(x for x in (out.get(name, ""), "127.0.0.1", "localhost", "::1") if x)
    return out


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on right now, of those that the kernel gives to no outgoing connection.

    An engine listens on it half a minute later or more: of the kernel's own range it was gone by then (seen on a busy machine).
    """
    for port in (*random.SystemRandom().sample(range(15000, _first_of_the_kernels()), k=100), 0):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind((host, port))
            return s.getsockname()[1]
    raise UsageError(f"no port is free on {host}", "end what listens there")


def _first_of_the_kernels() -> int:
    try:
        return max(int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), 16000)
    except (OSError, ValueError):
        return 32768


def require_free(host: str, port: int, option: str) -> None:
    """Raises UsageError when somebody listens on the port already."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise UsageError(f"{option} {port}: cannot listen on {host}:{port} ({error.strerror})", "choose another port") from None
