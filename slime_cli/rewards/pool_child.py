"""The inside of a reward worker (``python -m slime_cli.rewards.pool_child OWNER_PID``, started by :mod:`.pool`): reads
chunks of jobs, runs them, sends each outcome. What user code prints goes to stderr.

An outcome is ``(value, changed)`` with plain Python values only, or a RewardFailure. ``changed`` holds the sample
fields that a user's function modified, so that its owner can carry them over. Imports no torch unless the function
does.
"""

import asyncio
import contextlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from slime_cli.buffer.values import NotPlain, RewardFailure, plain
from slime_cli.errors import SlimeError
from slime_cli.hooks import raised
from slime_cli.processes import die_with
from slime_cli.rewards.graders import limits
from slime_cli.rewards.pool_messages import LENGTH, encode

IMMUTABLE = ("index", "group_index", "part")


def child_main() -> None:
    """Serves until stdin ends. The protocol's pipes are moved away from fds 0 and 1, which user code may use."""
    die_with_owner(int(sys.argv[1]))
    source = os.fdopen(os.dup(0), "rb")
    target = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    sys.path += [entry for entry in receive(source) if entry not in sys.path]
    with asyncio.Runner() as runner:  # one loop for the process's life: users keep clients between calls
        while (message := receive(source)) is not None:
            serve(runner, target, *message)
    os._exit(0)


def die_with_owner(owner: int) -> None:
    """SIGKILL when the thread that started this process ends; and first in line when memory runs out."""
    die_with(owner)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def receive(source: Any) -> Any:
    header = source.read(LENGTH.size)
    return pickle.loads(source.read(LENGTH.unpack(header)[0])) if len(header) == LENGTH.size else None


def send(target: int, message: Any) -> None:
    data = memoryview(encode(message))
    while data:
        data = data[os.write(target, data) :]


def serve(
    runner: asyncio.Runner, target: int, kind: str, path: str, args: Any, payloads: list[Any], timeout: float
) -> None:
    """Loads what the chunk needs, says so (from then on time counts), runs it."""
    limits.set_patience(timeout)
    try:
        run, concurrent = load_work(runner, kind, path, args, payloads)
    except BaseException as error:
        send(target, ("ready", False))
        for place in range(len(payloads)):
            send(target, (place, failure_of(error)))
        return
    send(target, ("ready", concurrent))
    if not concurrent:
        for place, payload in enumerate(payloads):
            send(target, (place, guarded(run, payload)))
        return

    async def one(place: int, payload: Any) -> None:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                outcome = await run(payload)
        except BaseException as error:
            late = isinstance(error, TimeoutError) and limit.expired()  # and not a TimeoutError of the function's own
            outcome = RewardFailure("timeout", f"no result in {timeout:g} s") if late else failure_of(error)
        send(target, (place, outcome))

    async def everything() -> None:
        await asyncio.gather(*(one(place, payload) for place, payload in enumerate(payloads)))

    runner.run(everything())


def load_work(
    runner: asyncio.Runner, kind: str, path: str, args: Any, payloads: list[Any]
) -> tuple[Callable[[Any], Any], bool]:
    """The function for one payload, and whether it is a coroutine function, of which several wait side by side."""
    if kind == "grade":
        from slime_cli.rewards import graders

        for payload in payloads:
            with contextlib.suppress(Exception):  # it shows again, as this sample's failure, when it is graded
                graders.prepare(*pickle.loads(payload))
        return (lambda payload: (plain(graders.grade(*pickle.loads(payload))), {})), False
    from slime_cli.hooks import kinds as hooks

    function = hooks.load(path, kind)

    async def run(payload: Any) -> Any:
        given, before = begin(payload)
        return finish(given, before, await hooks.awaited(function(args, given)))

    def run_alone(payload: Any) -> Any:
        given, before = begin(payload)
        value = function(args, given)
        return finish(given, before, runner.run(hooks.awaited(value)) if inspect.isawaitable(value) else value)

    return (run, True) if hooks.may_be_async(function) else (run_alone, False)


def begin(payload: Any) -> tuple[Any, Any]:
    """Samples (one or a group) as the function gets them, and their untouched fields."""
    from slime_cli.buffer.types import Sample

    def build(data: bytes) -> Any:
        return Sample.from_dict(pickle.loads(data))

    return ([build(data) for data in payload] if isinstance(payload, list) else build(payload)), payload


def finish(given: Any, before: Any, value: Any) -> tuple[Any, Any]:
    """Checks that the value is plain, and finds the fields that were changed."""
    value = plain(value)
    if isinstance(given, list):
        return value, [changes(sample, data) for sample, data in zip(given, before, strict=True)]
    return value, changes(given, before)


def changes(sample: Any, before: bytes) -> dict[str, Any]:
    """Fields that differ from ``before``."""
    after = sample.to_dict()
    original = pickle.loads(before)
    return {
        name: plain(value) for name, value in after.items() if name not in IMMUTABLE and not same(value, original[name])
    }


def same(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except Exception:  # arrays, whose equality is no single truth
        return False


def guarded(run: Callable[[Any], Any], payload: Any) -> Any:
    """Runs one job; whatever it raises, SystemExit included, is its failure."""
    try:
        return run(payload)
    except BaseException as error:
        return failure_of(error)


def failure_of(error: BaseException) -> RewardFailure:
    """With the innermost place in the user's code, and the traceback from there on."""
    from slime_cli.rewards.graders import GraderError

    if isinstance(error, NotPlain):
        return RewardFailure("bad_value", str(error))
    if isinstance(error, SlimeError | GraderError):
        return RewardFailure("error", str(error))
    return RewardFailure("error", raised.sentence(error), raised.trace(error))


if __name__ == "__main__":
    child_main()
