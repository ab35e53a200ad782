"""How a process ends that is interrupted.

1. The first signal cancels the main coroutine of an event loop; its cleaning up is not disturbed by others, and the
   code is 5.
2. Where the loop is blocked, the second one is raised there, and cleaning up follows all the same.
3. A failure that follows from the interruption does not hide it; threads that never end, and tasks that do not listen,
   are not waited for.
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
import asyncio, contextlib, contextvars, signal, sys, threading, time
from slime_cli import event_loop, interrupts
for number in interrupts.SIGNALS:
    signal.signal(number, signal.SIG_DFL)  # tests that run in the background inherit ignored ones
interrupts.listen()
variable = contextvars.ContextVar("variable")

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
A_TASK_NEVER_LISTENS = """
event_loop.PATIENCE = 0.1

@contextlib.asynccontextmanager
async def call():
    token = variable.set(1)
    try:
        yield
    finally:
        variable.reset(token)

async def deaf():
    async with call():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

async def work():
    global task
    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    if len(sys.argv) == 4:
        raise KeyError("x")
    later(0)
    await asyncio.sleep(60)
"""
A_THREAD_NEVER_ENDS = """
async def work():
    later(0)
    await asyncio.to_thread(time.sleep, 600)
"""


def ended(work: str, number: str = "SIGINT", more: int = 0, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + work + TAIL, number, str(more), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("more", [0, 2])
def test_what_was_started_is_stopped_in_order(number: str, more: int):
    done = ended(WAITS, number, more)
    assert (done.returncode, done.stdout) == (Interrupted.exit_code, "stopped\ninterrupted\n"), done.stderr
    assert done.stderr == "interrupted: stopping what was started\n"


@pytest.mark.parametrize("work", [BLOCKS, A_TASK_BLOCKS, A_TASK_NEVER_LISTENS, FAILS, A_THREAD_NEVER_ENDS])
def test_whatever_is_being_done(work: str):
    done = ended(work)
    assert (done.returncode, done.stdout) == (Interrupted.exit_code, "stopped\ninterrupted\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_task_that_does_not_listen_does_not_keep_a_failure_from_ending_the_process():
    done = ended(A_TASK_NEVER_LISTENS, "SIGINT", 0, "fails")
    assert done.returncode == 1 and done.stdout == "stopped\n", done.stdout
    assert "KeyError: 'x'" in done.stderr and "Task was destroyed" not in done.stderr, done.stderr


A_THREAD_IS_LEFT = """
event_loop.PATIENCE = 0.1

async def work():
    asyncio.ensure_future(asyncio.to_thread(time.sleep, 600))
    await asyncio.sleep(0.01)
    raise KeyboardInterrupt
"""


def test_a_thread_that_never_ends_does_not_keep_a_failure_from_ending_the_process():
    done = ended(A_THREAD_IS_LEFT)
    assert (done.returncode, done.stdout, done.stderr) == (5, "stopped\ninterrupted\n", "")


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
        "signal.signal(signal.SIGTERM, signal.SIG_DFL); interrupts.listen()\n"
        "with interrupts.undisturbed(): signal.raise_signal(signal.SIGTERM)\n"
        "print('stopped')\ntry: signal.raise_signal(signal.SIGTERM)\nexcept KeyboardInterrupt: print('raised')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "stopped\nraised\n"), done.stderr
