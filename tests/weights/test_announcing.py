"""Buckets that are announced before they are written, from a sender to scripted engines that run slime's loader.

1. Every engine gets every bit, in every sync, however many parts and dtypes a bucket has; parts are loaded while later
   ones are still written.
2. What is not as it was is sent as it is, in the same sync.
3. A writer that fails, is killed or is too slow leaves the engine alive, without those weights, and known to lack them.
"""

import logging
import os
import signal
import subprocess
import sys
import time

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from slime_cli import engine_api
from slime_cli.errors import EngineError
from slime_cli.weights import announcing, buckets, progress
from slime_cli.weights.sending import Sender
from slime_cli.weights.transport import Receiver, Sending
from slime_cli.weights.transports.memory import SPOILT, Memory
from tests.memory_engine import MemoryEngine
from tests.ranks import MemoryRank

LOADER = [engine_api.LOADER]


def weights(seed: int = 0, rows: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    return {f"model.{n}.norm.weight": torch.randn(rows + n % 3, 3).to(dtypes[n % 3]) for n in range(24)}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(announcing, "PART", 64)


@pytest.fixture
def engine():
    made = MemoryEngine(weights(), custom_weight_loader=LOADER)
    yield made
    made.end()


def how(*engines: MemoryEngine, buffer: int = 1 << 20) -> Sending:
    receivers = tuple(Receiver(engine.url, (0,), loader=True) for engine in engines)
    return Sending("ipc", receivers, 0, buffer, tuple(weights()))


def send(sender: Sender, named, sending: Sending) -> dict[str, str]:
    return sender.send(iter(named), sending, 1 << 20)


def holds(engine: MemoryEngine, wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(engine.weights[name], tensor) for name, tensor in wanted.items())


def until(true, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- 1 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("buffer", "count"), [(1 << 20, 1), (600, 3), (100, 16)])
def test_every_bit_arrives_announced_or_not(engine, buffer, count):
    sender = Sender(0, torch.device("cpu"))
    other = MemoryEngine(weights(), custom_weight_loader=LOADER)
    for seed in (1, 2, 3):
        named = weights(seed)
        assert send(sender, named.items(), how(engine, other, buffer=buffer)) == {}
        assert holds(engine, named) and holds(other, named)
    for each in (engine, other):
        assert len(each.announced) == 3 * count
        assert [announced[2] is None for announced in each.announced] == [True] * count + [False] * 2 * count
    assert count > 3 or all(len(announced[3]) > 1 for announced in engine.announced)
    other.end()


def test_a_part_is_loaded_while_the_next_ones_are_not_there_yet(engine):
    sender = Sender(0, torch.device("cpu"))
    send(sender, weights(1).items(), how(engine))
    seen = []

    def slowly():
        for number, (name, tensor) in enumerate(weights(2).items()):
            if number == 12:
                until(lambda: torch.equal(engine.weights["model.0.norm.weight"], weights(2)["model.0.norm.weight"]))
                seen.append(engine.weights["model.23.norm.weight"].clone())
            yield name, tensor

    assert send(sender, slowly(), how(engine)) == {}
    assert torch.equal(seen[0], weights(1)["model.23.norm.weight"])
    assert holds(engine, weights(2))


def test_buffers_that_were_given_back_are_announced_anew(engine):
    sender = Sender(0, torch.device("cpu"))
    for seed in (1, 2, 3):
        assert send(sender, weights(seed).items(), how(engine)) == {}
        assert holds(engine, weights(seed))
        sender.free()
    assert [announced[2] is None for announced in engine.announced] == [True, False, False]


@hypothesis.given(st.lists(st.integers(0, 500), min_size=1, max_size=40))
def test_parts_are_whole_tensors_and_all_of_them(sizes):
    places, at = [], 0
    for size in sizes:
        places.append(buckets.Place("a", torch.int8, (size,), at, at + size))
        at += size
    ends = announcing.Layout(places).ends
    assert list(ends) == sorted(set(ends)) and len(ends) <= announcing.MOST
    assert ends[0] > 0 and ends[-1] == len(places)


# -- 2 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [1 << 20, 600])
@pytest.mark.parametrize("change", ["rows", "dtype", "fewer", "more"])
def test_what_is_not_as_it_was_is_sent_as_it_is(engine, buffer, change):
    before, after = weights(1), weights(2)
    names = list(before)
    if change == "rows":
        after[names[9]] = torch.randn(7, 3)
    if change == "dtype":
        after[names[9]] = after[names[9]].to(torch.float16)
    if change == "more":
        del before[names[15]], before[names[-1]]
    if change == "fewer":
        del after[names[15]], after[names[-1]]
    sender = Sender(0, torch.device("cpu"))
    for named in (before, after, before, after, after):
        engine.hold(named)
        assert send(sender, named.items(), how(engine, buffer=buffer)) == {}
        assert holds(engine, named)
    announced = [announced[2] is not None for announced in engine.announced]
    assert announced.count(True) > announced[-1] > 0, "given up, sent, and known from then on"


def test_buckets_of_another_size_are_another_matter(engine):
    sender = Sender(0, torch.device("cpu"))
    for buffer in (600, 600, 1 << 20, 1 << 20):
        assert send(sender, weights(buffer).items(), how(engine, buffer=buffer)) == {}
        assert holds(engine, weights(buffer))
    assert [announced[2] is None for announced in engine.announced] == [True] * 3 + [False] * 3 + [True, False]


# -- 3 -----------------------------------------------------------------------------------------------------------------


def failing(named):
    for number, item in enumerate(named):
        if number == 15:
            raise RuntimeError("no such tensor")
        yield item


@pytest.mark.parametrize("buffer", [1 << 20, 600])
def test_an_export_that_raises_leaves_the_engine_incomplete_and_alive(engine, buffer, caplog):
    learner = MemoryRank(weights(1), step=1)
    transport = Memory("ipc", buffer=buffer)
    for step in (1, 2, 3):
        learner.step = step
        transport.send(transport.write(learner, step), [engine.url], flush=True)
        transport.verify(transport.write(learner, step), [engine.url])
    assert engine.announced[-1][2] is not None
    learner.step = 4
    named = weights(4)
    learner.weights = Failing(named)
    with pytest.raises(RuntimeError, match="no such tensor"):
        transport.send(transport.write(learner, 4), [engine.url], flush=True)
    until(lambda: "gave it up" in caplog.text)
    assert engine.version == f"v000004{SPOILT}"
    learner.weights = named
    transport.send(transport.write(learner, 4), [engine.url], flush=True)
    assert [proof.kind for proof in transport.verify(transport.write(learner, 4), [engine.url])] == ["checksum"]
    assert engine.version == "v000004" and holds(engine, named)


class Failing(dict):
    def items(self):
        return failing(super().items())

    def values(self):
        return dict(super().items()).values()


def test_an_engine_that_waits_too_long_is_named(engine, monkeypatch, caplog):
    monkeypatch.setattr(progress, "PATIENCE", 0.2)
    sender = Sender(0, torch.device("cpu"))
    send(sender, weights(1).items(), how(engine))

    def slowly():
        for number, item in enumerate(weights(2).items()):
            if number == 15:
                until(lambda: "did not come within" in caplog.text)
            yield item

    (reason,) = send(sender, slowly(), how(engine)).values()
    assert engine.url in reason and "did not load all" in reason
    assert send(sender, weights(3).items(), how(engine)) == {} and holds(engine, weights(3))


def test_an_engine_that_fails_keeps_no_other_from_its_weights(engine):
    other = MemoryEngine(weights(), custom_weight_loader=LOADER)
    sender = Sender(0, torch.device("cpu"))
    send(sender, weights(1).items(), how(engine, other, buffer=600))
    engine.broken_after = len(engine.buckets) + 1
    failed = send(sender, weights(2).items(), how(engine, other, buffer=600))
    assert list(failed) == [engine.url] and "answered" in failed[engine.url]
    assert holds(other, weights(2))
    other.end()


WRITER = """
import sys, time
import torch
from slime_cli.weights import announcing
from slime_cli.weights.sending import Sender
from slime_cli.weights.transport import Receiver, Sending
from tests.weights.test_announcing import weights
announcing.PART = 64
sending = Sending("ipc", (Receiver(sys.argv[1], (0,), loader=True),), 0, 1 << 20, tuple(weights()))
sender = Sender(0, torch.device("cpu"))
assert sender.send(iter(weights(1).items()), sending, 1 << 20) == {}
def stalled():
    for number, item in enumerate(weights(2).items()):
        if number == 15:
            print("stalled", flush=True)
            time.sleep(100)
        yield item
sender.send(stalled(), sending, 1 << 20)
"""


def test_a_writer_that_is_killed_between_two_parts(engine, caplog):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, engine.url], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "stalled\n"
    first = "model.0.norm.weight"
    until(lambda: torch.equal(engine.weights[first], weights(2)[first]))
    assert "announced and is not loaded" not in caplog.text
    os.kill(writer.pid, signal.SIGKILL)
    until(lambda: "has ended" in caplog.text)
    writer.wait(10)
    assert torch.equal(engine.weights["model.23.norm.weight"], weights(1)["model.23.norm.weight"])
    sender = Sender(0, torch.device("cpu"))
    assert send(sender, weights(3).items(), how(engine)) == {} and holds(engine, weights(3))


def test_engines_that_cannot_open_the_counts_are_told_of_written_buckets_alone(engine, monkeypatch):
    sender = Sender(0, torch.device("cpu"))
    path = sender._known.counts.path
    monkeypatch.setattr(sender._known.counts, "path", f"/proc/{os.getpid()}/fd/99999")
    for seed in (1, 2, 3):
        assert send(sender, weights(seed).items(), how(engine)) == {} and holds(engine, weights(seed))
    monkeypatch.setattr(sender._known.counts, "path", path)
    for seed in (4, 5):
        assert send(sender, weights(seed).items(), how(engine)) == {} and holds(engine, weights(seed))
    assert [announced[2] is None for announced in engine.announced] == [True] * 4 + [False]


def test_counts_that_cannot_be_opened_any_more(engine, monkeypatch, caplog):
    sender = Sender(0, torch.device("cpu"))
    send(sender, weights(1).items(), how(engine))
    monkeypatch.setattr(sender._known.counts, "path", f"/proc/{os.getpid()}/fd/99999")
    with caplog.at_level(logging.WARNING):
        (reason,) = send(sender, weights(2).items(), how(engine)).values()
    assert "did not load all" in reason and "cannot be opened: No such file or directory" in caplog.text


def test_a_given_up_bucket_is_not_taken_for_a_later_one():
    written = progress.Written()
    written.begin(1)
    first = written.announce(3)
    written.count()
    written.give_up()
    second = written.announce(2)
    for _ in range(2):
        written.count()
    with progress.Waiting(written.path, 0, first, 3) as waiting, pytest.raises(progress.NotWritten):
        waiting.part(1)
    with progress.Waiting(written.path, 0, second, 2) as waiting:
        waiting.part(1)
        waiting.part(2)
        waiting.loaded()
    assert written.loaded(0) == 2


def test_engines_that_lost_a_bucket_end_the_sync(engine, monkeypatch):
    learner = MemoryRank(weights(1), step=1)
    transport = Memory("ipc")
    for step in (1, 2):
        learner.step = step
        transport.send(transport.write(learner, step), [engine.url], flush=True)
        transport.verify(transport.write(learner, step), [engine.url])
    monkeypatch.setattr(progress.Waiting, "loaded", lambda self: None)
    learner.step = 3
    with pytest.raises(EngineError, match="did not load all"):
        transport.send(transport.write(learner, 3), [engine.url], flush=True)
    assert engine.version == f"v000003{SPOILT}"
