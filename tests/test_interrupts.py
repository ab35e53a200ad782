"""How a process ends that is interrupted.

1. The first signal cancels the main coroutine of an event loop; its cleaning up is not disturbed by others, and the
   code is 5.
2. Where the loop is blocked, the second one is raised there, and cleaning up follows all the same.
3. A failure that follows from the interruption does not hide it; threads that never end are not waited for.
4. The one after ENOUGH ends the process.
5. A library that sets handlers of its own does not keep them.
"""

import signal
import subprocess
import sys

import pytest

from slime_cli import interrupts
from slime_cli.errors import Interrupted

HEAD = """
import asyncio, signal, sys, threading, time
from slime_cli import event_loop, interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit an ignored Ctrl-C
interrupts.listen()

async def main():
    try:
        await work()
    finally:
        for _ in range(int(sys.argv[2])):
            signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.01)
        print("stopped", flush=True)

def later(*delays):
    def send():
        for delay in delays:
            time.sleep(delay)
            signal.pthread_kill(threading.main_thread().ident, getattr(signal, sys.argv[1]))
    threading.Thread(target=send, daemon=True).start()
"""
TAIL = """
try:
    event_loop.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
    interrupts.leave(5)
print("not interrupted")
"""
WAITS = """
async def work():
    later(0)
    await asyncio.sleep(60)
"""
BLOCKS = """
async def work():
    later(0, 0.1)
    time.sleep(60)
"""
A_TASK_BLOCKS = """
async def blocking():
    later(0, 0.1)
    time.sleep(60)

async def work():
    await asyncio.gather(asyncio.sleep(60), blocking())
"""
FAILS = """
async def work():
    later(0)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise RuntimeError("an engine is gone") from None
"""
A_THREAD_NEVER_ENDS = """
async def work():
    later(0)
    await asyncio.to_thread(time.sleep, 600)
"""


def ended(work: str, number: str = "SIGINT", more: int = 0) -> subprocess.CompletedProcess[str]:
    code = HEAD + work + TAIL
    return subprocess.run(
        [sys.executable, "-c", code, number, str(more)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("more", [0, 2])
def test_what_was_started_is_stopped_in_order(number: str, more: int):
    done = ended(WAITS, number, more)
    assert (done.returncode, done.stdout) == (Interrupted.exit_code, "stopped\ninterrupted\n"), done.stderr
    assert done.stderr == "interrupted: stopping what was started\n"


@pytest.mark.parametrize("work", [BLOCKS, A_TASK_BLOCKS, FAILS, A_THREAD_NEVER_ENDS])
def test_whatever_is_being_done(work: str):
    done = ended(work)
    assert (done.returncode, done.stdout) == (Interrupted.exit_code, "stopped\ninterrupted\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_who_insists_is_heard_while_things_are_stopped():
    done = ended(WAITS, more=interrupts.ENOUGH)
    assert (done.returncode, done.stdout) == (Interrupted.exit_code, "")
    assert "did not end by itself" in done.stderr


def test_handlers_of_a_library_are_not_kept():
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.kept():
        signal.signal(signal.SIGTERM, lambda *_: None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_stopping_is_not_disturbed():
    code = (
        "import signal; from slime_cli import interrupts\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler); interrupts.listen()\n"
        "with interrupts.undisturbed(): signal.raise_signal(signal.SIGTERM)\n"
        "print('stopped')\ntry: signal.raise_signal(signal.SIGTERM)\nexcept KeyboardInterrupt: print('raised')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "stopped\nraised\n"), done.stderr
