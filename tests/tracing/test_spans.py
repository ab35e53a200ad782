"""Spans nest in what started them, whatever runs at the same time; their names; what a trace keeps of a killed attempt.

1. A coroutine's span has the span as its parent that was open where its task was made; so has a thread's.
2. What the outer code is about, the inner code is about too.
3. The export draws no span inside one that it has nothing to do with.
4. Every name that the code gives a span is in ``tracing/names.py``.
"""

import ast
import asyncio
import json
import pathlib
import threading
import typing

import pytest

import slime_cli
from slime_cli.errors import DataError
from slime_cli.tracing import names, perfetto
from slime_cli.tracing.reading import read_spans
from slime_cli.tracing.spans import Tracer


@pytest.fixture
def tracer(tmp_path):
    made = Tracer(tmp_path, "conductor")
    yield made
    made.close()


def interleaved(tracer):
    """Two groups in flight at once, each with a sample graded in a thread; in the order in which they happen:
    generate 1, generate 2, reward 1 (in generate 1), reward 2, end of generate 1, end of generate 2."""

    async def group(number, mine, others):
        with tracer.span("generate", group=number, sample=10 * number):
            others.set()
            await mine.wait()  # both are open now
            await asyncio.to_thread(grade)
            others.set()

    def grade():
        with tracer.span("reward") as args:
            args["thread"] = threading.current_thread() is not threading.main_thread()

    async def run():
        one, two = asyncio.Event(), asyncio.Event()
        with tracer.about(phase="rl"), tracer.span("wait_for_batch", rollout=3):
            await asyncio.gather(group(1, one, two), group(2, two, one))

    asyncio.run(run())


def test_coroutines_and_threads_nest_in_what_started_them(tmp_path, tracer):
    interleaved(tracer)
    spans = read_spans(tmp_path)
    assert len({span.id for span in spans}) == 5
    (wait,) = (span for span in spans if span.name == "wait_for_batch")
    generates = {span.group: span for span in spans if span.name == "generate"}
    rewards = {span.group: span for span in spans if span.name == "reward"}
    assert wait.parent is None and {span.parent for span in generates.values()} == {wait.id}
    assert {number: span.parent for number, span in rewards.items()} == {n: generates[n].id for n in (1, 2)}
    assert all(span.args["thread"] for span in rewards.values())
    assert {number: span.sample for number, span in rewards.items()} == {1: 10, 2: 20}
    assert {(span.phase, span.rollout) for span in spans} == {("rl", 3)}
    first, second = sorted(generates.values(), key=lambda span: span.ts)
    assert first.ts <= second.ts < first.end and wait.end >= second.end, "both were in flight at once"


def test_a_task_may_outlive_the_span_that_started_it(tmp_path, tracer):
    async def run():
        async def later():
            with tracer.span("reward"):
                await leave.wait()

        leave = asyncio.Event()
        with tracer.span("step", rollout=1):
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
        with tracer.span("step", rollout=2):
            leave.set()
            await task

    asyncio.run(run())
    one, reward, two = read_spans(tmp_path)
    assert (reward.parent, reward.rollout, two.parent) == (one.id, 1, None) and reward.end > one.end


def test_a_span_ends_with_an_error_or_a_cancellation_and_leaves_nothing_behind(tmp_path, tracer):
    async def run():
        async def forever():
            with tracer.span("generate"):
                await asyncio.Event().wait()

        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ValueError), tracer.span("train"):
            raise ValueError
        with tracer.span("save"):
            pass

    asyncio.run(run())
    found = {span.name: (span.args.get("error"), span.parent) for span in read_spans(tmp_path)}
    assert found == {"generate": ("CancelledError", None), "train": ("ValueError", None), "save": (None, None)}


def test_a_generator_that_another_task_closes_does_not_raise(tmp_path, tracer):
    async def rows():
        with tracer.span("generate"):
            yield 1

    async def run():
        generator = rows()
        await asyncio.create_task(take(generator))
        await generator.aclose()

    async def take(generator):
        return await anext(generator)

    asyncio.run(run())
    assert [span.name for span in read_spans(tmp_path)] == ["generate"]


def test_threads_write_whole_lines(tmp_path, tracer):
    def work(number):
        for _ in range(200):
            with tracer.span("reward", sample=number, text="x" * 300):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = read_spans(tmp_path)
    assert len(spans) == len({span.id for span in spans}) == 1600
    assert {span.parent for span in spans} == {None}, "a thread that was not given a context starts anew"


def test_off_means_no_file_and_no_ids(tmp_path):
    tracer = Tracer(tmp_path, "conductor", enabled=False)
    with tracer.about(group=1), tracer.span("step", rollout=1, more=2) as args:
        assert args == {"more": 2}
    tracer.record("generate", 0.0, 1.0)
    tracer.close()
    assert not list(tmp_path.iterdir())


def test_what_is_recorded_afterwards_lies_in_the_present_span(tmp_path, tracer):
    with tracer.span("step", rollout=4):
        tracer.record("generate", 12.0, 3.0, tokens=5)
    recorded, step = read_spans(tmp_path)
    assert (recorded.parent, recorded.rollout, recorded.ts, recorded.args) == (step.id, 4, 12.0, {"tokens": 5})


def test_values_that_json_does_not_know_are_written_as_text(tmp_path, tracer):
    with tracer.span("step", path=pathlib.Path("a"), missing=float("nan")):
        pass
    (span,) = read_spans(tmp_path)
    assert span.args == {"path": "a", "missing": None}


def test_the_next_attempt_s_ids_are_its_own_and_its_first_line_is_whole(tmp_path):
    for _ in range(3):
        tracer = Tracer(tmp_path, "conductor")
        with tracer.span("step"), tracer.span("train"):
            pass
        tracer.close()
        with open(tmp_path / "trace" / "conductor.jsonl", "a") as file:
            file.write('{"name": "half a l')  # killed
    spans = read_spans(tmp_path)
    assert [span.name for span in spans] == ["step", "train"] * 3 and len({span.id for span in spans}) == 6
    assert [span.parent for span in spans] == [None, spans[0].id, None, spans[2].id, None, spans[4].id]


def test_a_line_that_is_no_span_is_named(tmp_path, tracer):
    (tmp_path / "trace" / "conductor.jsonl").write_text('{"name": 3}\n')
    with pytest.raises(DataError, match=r"conductor\.jsonl:1: not a span"):
        read_spans(tmp_path)


def test_an_older_trace_gets_its_parents_from_its_depths(tmp_path):
    (tmp_path / "trace").mkdir()
    path = tmp_path / "trace" / "conductor.jsonl"

    def line(name, ts, dur, depth, **args):
        return json.dumps({"name": name, "ts": ts, "dur": dur, "process": "conductor", "depth": depth, "args": args})

    lines = [
        line("commit", 1.5, 0.2, 2),  # of an attempt that was killed in its step: the step has no line
        line("save", 11.0, 1.0, 2),
        line("train", 10.0, 3.0, 1),
        line("sync", 13.0, 1.0, 1, tensors=2),
        line("step", 10.0, 5.0, 0, stage="rl", rollout_id=1),
        line("eval", 15.0, 1.0, 0),
    ]
    path.write_text("\n".join(lines) + "\n")
    tracer = Tracer(tmp_path, "conductor")  # the next attempt is by this slime
    with tracer.span("step"):
        pass
    tracer.close()
    spans = read_spans(tmp_path)
    parents = {span.id: span.name for span in spans}
    assert [(span.name, parents.get(span.parent)) for span in spans] == [
        ("commit", None),
        ("step", None),
        ("train", "step"),
        ("save", "train"),
        ("sync", "step"),
        ("eval", None),
        ("step", None),
    ]
    assert [(span.phase, span.rollout) for span in spans[1:5]] == [("rl", 1)] * 4 and spans[4].args == {"tensors": 2}
    assert len(parents) == 7


def tracks(spans):
    """Name and group -> (track, names that the viewer draws it in, outermost first)."""
    events = [event for event in perfetto.events(spans) if event["ph"] == "X"]
    drawn = {}
    for event in events:
        around = [
            other
            for other in events
            if other is not event
            and (other["pid"], other["tid"]) == (event["pid"], event["tid"])
            and other["ts"] <= event["ts"]
            and other["ts"] + other["dur"] >= event["ts"] + event["dur"]
        ]
        around.sort(key=lambda other: -other["dur"])
        key = (event["name"], event["args"].get("group"))
        drawn[key] = (event["tid"], [(other["name"], other["args"].get("group")) for other in around])
    return drawn


def test_the_export_draws_concurrent_spans_on_tracks_of_their_own(tmp_path, tracer):
    interleaved(tracer)
    drawn = tracks(read_spans(tmp_path))
    assert drawn[("wait_for_batch", None)] == (1, [])
    inside = [drawn[("generate", group)] for group in (1, 2)]
    assert sorted(track for track, _ in inside) == [2, 3], "beside the loop's"
    for group in (1, 2):
        track, around = drawn[("reward", group)]
        assert track == drawn[("generate", group)][0] and around[-1] == ("generate", group)
    for _, around in inside:
        assert around == []


def test_the_loop_keeps_its_track_beside_what_works_at_the_same_time(tmp_path, tracer):
    async def run():
        async def generate(group):
            with tracer.span("generate", group=group):
                await asyncio.sleep(0.002)
            with tracer.span("reward", group=group):
                await asyncio.sleep(0.002)

        tasks = [asyncio.create_task(generate(group)) for group in range(3)]
        for rollout in range(3):
            await asyncio.sleep(0.001)
            with tracer.span("step", rollout=rollout), tracer.span("train"):
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)

    asyncio.run(run())
    drawn = tracks(read_spans(tmp_path))
    assert [drawn[("generate", group)] for group in range(3)] == [(2, []), (3, []), (4, [])]
    assert [drawn[("reward", group)] for group in range(3)] == [(2, []), (3, []), (4, [])], "a group keeps its track"
    assert drawn[("step", None)] == (1, []) and drawn[("train", None)] == (1, [("step", None)])


def test_every_name_of_a_span_is_listed():
    root = pathlib.Path(slime_cli.__file__).parent
    known = set(typing.get_args(names.SpanName))
    found = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
            if named and getattr(node.func, "attr", None) == "span" and isinstance(node.args[0].value, str):
                found[node.args[0].value] = f"{path.relative_to(root)}:{node.lineno}"
    found.pop("bare", None)  # re.Match.span of a grader
    assert len(found) > 15
    assert {name: where for name, where in found.items() if name not in known} == {}
