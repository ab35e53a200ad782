"""The kernel's promise that a child does not outlive its parent (Linux, PR_SET_PDEATHSIG). Every kind of child uses it.

Apart from :mod:`slime_cli.processes` because it is called between fork and exec, where nothing may be imported any
more.
"""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Called in the child: SIGKILL for this process when the thread that made it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
