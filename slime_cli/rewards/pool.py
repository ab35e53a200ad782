"""Worker processes that run rewards, so that a hanging, crashing or raising one costs one sample and never the run.

Parent side: :class:`WorkerPool`, used by :class:`slime_cli.rewards.rewards.RewardPool`. Child side:
:mod:`.pool_child`, a fresh interpreter (never a fork, since the owner has threads), which speaks :mod:`.pool_messages`
on its stdin and stdout.

Invariants: every submitted job gets exactly one outcome, in bounded time; results are sent one by one, so when a worker
stops answering its culprit is known (jobs that ran side by side are tried again one at a time to find it); no worker
outlives the thread that started it (PR_SET_PDEATHSIG) or the pool.
"""

import asyncio
import collections
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

from slime_cli import processes
from slime_cli.buffer.values import RewardFailure
from slime_cli.rewards.pool_messages import decode, encode

MAX_CHUNK = 64
CHUNK_SECONDS = 0.05
"""A chunk of cheap jobs is sized to take about this long, so that slow ones still spread over the workers."""
CONCURRENT_GRACE = 2.0
"""Coroutines side by side are timed by the child itself; the parent waits this much longer before it kills."""


CLOSED = RewardFailure("error", "the reward pool was closed before this sample was scored")


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A task of a worker."""

    kind: str
    """``grade`` (built-in), ``reward`` or ``group_reward`` (a user's function)."""
    path: str = ""


@dataclasses.dataclass(slots=True)
class Job:
    payload: bytes | list[bytes]
    """Pickled by the submitter, so that one sample that cannot be pickled is one failure."""
    args: Any
    future: asyncio.Future
    alone: bool = False
    """Suspected of having taken a worker down: runs in a chunk of its own."""
    again: bool = False
    """Its worker died before any job began, perhaps by another hand (out of memory): it gets one more."""


@dataclasses.dataclass(slots=True)
class Queue:
    """Waiting jobs of one Work, and what has been learnt about it."""

    jobs: collections.deque[Job] = dataclasses.field(default_factory=collections.deque)
    concurrent: bool = False
    seconds: float = CHUNK_SECONDS
    """Running mean per job; starts so that the first chunk is one job."""

    def chunk(self, workers: int) -> list[Job]:
        """The next jobs for one worker: of one ``args``, no more than its share, or a single suspect."""
        share = -(-len(self.jobs) // workers)
        limit = MAX_CHUNK if self.concurrent else int(CHUNK_SECONDS / max(self.seconds, 1e-9))
        out: list[Job] = []
        while self.jobs and len(out) < max(1, min(MAX_CHUNK, limit, share)):
            job = self.jobs[0]
            if out and (job.alone or job.args is not out[0].args):
                break
            self.jobs.popleft()
            if job.future.done():
                continue  # its caller was cancelled
            out.append(job)
            if job.alone:
                break
        return out


class Lost(Exception):
    """Internal: the worker must be replaced. ``loading``: it had not begun with the jobs."""

    def __init__(self, failure: RewardFailure, loading: bool) -> None:
        super().__init__(failure)
        self.failure = failure
        self.loading = loading


class Worker:
    """One child process, seen from the parent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None  # start() asks for both
        self.process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._buffer = bytearray()

    @classmethod
    async def start(cls) -> "Worker":
        process = await asyncio.create_subprocess_exec(
            *processes.python("slime_cli.rewards.pool_child", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the owner's; and a kill takes the function's own children along
            env={"OMP_NUM_THREADS": "1", **processes.environment(users_functions=True)},
        )
        worker = cls(process)
        worker._stdin.write(encode([entry for entry in sys.path if entry]))
        return worker

    async def run(self, message: bytes, queue: Queue, jobs: list[Job], timeout: float, start_timeout: float) -> None:
        """Sends a chunk; resolves the jobs' futures as results come. Raises Lost when the worker must be replaced."""
        self._stdin.write(message)
        left = len(jobs)
        patience = start_timeout
        last = time.perf_counter()
        loading = True
        try:
            with contextlib.suppress(ConnectionError):  # a dead child shows when reading
                await asyncio.wait_for(self._stdin.drain(), start_timeout)
            while left:
                for place, outcome in await asyncio.wait_for(self._read(), patience):
                    if place == "ready":
                        loading = False
                        queue.concurrent = outcome
                        last = time.perf_counter()
                        patience = timeout + CONCURRENT_GRACE * queue.concurrent
                        continue
                    left -= 1
                    settle(jobs[place], outcome)
                    now = time.perf_counter()
                    queue.seconds = 0.8 * queue.seconds + 0.2 * (now - last)
                    last = now
        except TimeoutError:
            what = f"its module was not loaded in {start_timeout:g} s" if loading else f"no result in {timeout:g} s"
            raise Lost(RewardFailure("timeout", what), loading) from None
        except EOFError:
            raise Lost(RewardFailure("crash", await self._how_it_died()), loading) from None

    async def _read(self) -> list[Any]:
        data = await self._stdout.read(1 << 16)
        if not data:
            raise EOFError
        self._buffer += data
        return decode(self._buffer)

    async def _how_it_died(self) -> str:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 5)
        code = self.process.returncode
        if code is None:
            return "the worker closed its pipe"
        return f"the worker died of {signal.Signals(-code).name}" if code < 0 else f"the worker exited with code {code}"

    async def kill(self) -> None:
        """SIGKILL to the worker's own process group (this child only, and what its function started)."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


def settle(job: Job, outcome: Any) -> None:
    if not job.future.done():
        job.future.set_result(outcome)


def fail(jobs: Iterable[Job], failure: RewardFailure) -> None:
    for job in jobs:
        settle(job, failure)


class WorkerPool:
    """Runs jobs on ``workers`` processes, started when first needed and replaced when lost. Lives in one event loop."""

    def __init__(self, workers: int, timeout: float, start_timeout: float) -> None:
        if workers < 1 or timeout <= 0:
            raise ValueError(f"workers={workers}, timeout={timeout}: both must be positive")
        self.workers = workers
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.replaced = 0
        """Workers lost to a timeout or a crash."""
        self._queues: dict[Work, Queue] = {}
        self._wake = asyncio.Event()
        self._slots: list[asyncio.Task] = []
        self._live: set[Worker] = set()
        self._closed = False

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._live]

    async def submit(self, work: Work, payload: bytes | list[bytes], args: Any = None) -> Any:
        """The outcome: ``(value, changed fields)`` or a RewardFailure."""
        if self._closed:
            return CLOSED
        if not self._slots:
            self._slots = [asyncio.create_task(self._slot()) for _ in range(self.workers)]
        job = Job(payload, args, asyncio.get_running_loop().create_future())
        self._queues.setdefault(work, Queue()).jobs.append(job)
        self._wake.set()
        return await job.future

    async def close(self) -> None:
        """Kills the workers; jobs still waiting end as failures."""
        self._closed = True
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._live))
        self._live.clear()
        for queue in self._queues.values():
            fail(queue.jobs, CLOSED)
            queue.jobs.clear()

    async def _take(self) -> tuple[Work, Queue, list[Job]]:
        while True:
            for work, queue in list(self._queues.items()):
                if jobs := queue.chunk(self.workers):
                    self._queues[work] = self._queues.pop(work)  # to the back: each kind of work gets its turn
                    return work, queue, jobs
            self._wake.clear()
            await self._wake.wait()

    async def _slot(self) -> None:
        worker = None
        while True:
            work, queue, jobs = await self._take()
            try:
                message = encode((work.kind, work.path, jobs[0].args, [job.payload for job in jobs], self.timeout))
            except Exception as error:
                fail(jobs, RewardFailure("error", f"args cannot be sent to a reward worker: {error!r}"))
                continue
            try:
                if worker is not None and worker.process.returncode is not None:  # died while idle
                    worker = await self._discard(worker)
                if worker is None:
                    worker = await Worker.start()
                    self._live.add(worker)
                await worker.run(message, queue, jobs, self.timeout, self.start_timeout)
            except Lost as lost:
                self._blame(queue, jobs, lost)
                worker = await self._discard(worker)
            except Exception as error:  # whatever it is, no caller may hang on it
                fail(jobs, RewardFailure("crash", f"the reward worker cannot be used: {error!r}"))
                worker = await self._discard(worker)
            except asyncio.CancelledError:
                fail(jobs, CLOSED)
                raise

    async def _discard(self, worker: Worker | None) -> None:
        if worker is not None:
            self.replaced += 1
            await worker.kill()
            self._live.discard(worker)

    def _blame(self, queue: Queue, jobs: list[Job], lost: Lost) -> None:
        """Fails the guilty job and puts the others back; when it cannot be known, each is tried alone."""
        unfinished = [job for job in jobs if not job.future.done()]
        if lost.loading:
            spared = lost.failure.kind == "crash"
            guilty = [job for job in unfinished if job.again or not spared]
            again = [job for job in unfinished if spared and not job.again]
            for job in again:
                job.again = True
        elif queue.concurrent and len(unfinished) > 1:
            guilty = []
            again = unfinished
            for job in again:
                job.alone = True
        else:
            guilty = unfinished[:1]
            again = unfinished[1:]
        fail(guilty, lost.failure)
        queue.jobs.extendleft(reversed(again))
        self._wake.set()
