"""A server process that cannot outlive its owner, and whose last words are kept.

Used for SGLang servers and the router. The child gets SIGKILL from the kernel when the thread that started it ends
(PR_SET_PDEATHSIG), so a killed owner leaves nothing running; it has a session of its own, so a Ctrl-C in the terminal
reaches the owner alone, which then stops its children in order.
"""

import collections
import os
import pathlib
import signal
import subprocess

from slime_cli.processes import die_with_parent


class Server:
    """One child process writing to ``log``."""

    def __init__(self, name: str, argv: list[str], environment: dict[str, str], log: pathlib.Path):
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

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
        """SIGTERM, then SIGKILL to its whole session after ``patience`` seconds; without patience, at once."""
        if patience and self._process.poll() is None:
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
