"""The trace commands over run folders that are whole, unfinished, dead, of several phases, or none at all."""

import itertools
import json
import random

import msgspec
import pytest
from typer.testing import CliRunner

from slime_cli import manifests
from slime_cli.buffer.journal import Journal
from slime_cli.buffer.types import PromptRow, Sample
from slime_cli.commands.trace import app
from slime_cli.errors import DataError
from slime_cli.tracing import ledger as ledgers
from slime_cli.tracing import perfetto
from slime_cli.tracing.reading import metrics_of, spans_of
from slime_cli.tracing.spans import Tracer, TraceSpan
from slime_cli.tracing.summary import reward_line, sparkline, summarize

IDS = itertools.count(1)


def fill_journal(path, trained=4, dropped=2, flying=2):
    """A journal whose samples ended as told; returns nothing, it is closed."""
    count = trained + dropped + flying
    with Journal(path) as journal:
        rows = [(i, PromptRow(f"{i}+1=", str(i + 1), {}, "data.jsonl", i + 1), 0, [i]) for i in range(count)]
        journal.lease(rows, {"row": count}, 0)
        journal.finish([Sample(index=i, group_index=i, reward=0.5) for i in range(trained)])
        journal.batched(range(trained), 0)
        journal.commit(steps=[(0, 0, "1", range(trained))], checkpoint="c")
        journal.drop(range(trained, trained + dropped), "too_long")


def line_of(process: str, name: str, ts: float, dur: float, **more) -> TraceSpan:
    return TraceSpan(name=name, ts=ts, dur=dur, process=process, id=next(IDS), **more)


@pytest.fixture
def run(tmp_path):
    """A finished little run of one phase."""
    folder = tmp_path / "run"
    settings = dict(options={}, origins={}, argv=["train"], hardware={}, attempt=2, created=1e9)
    manifests.write(folder / "run.json", manifests.Run(versions={"sglang": "0.5.16", "torch": "2.11.0"}, **settings))
    fill_journal(folder / "journal.sqlite")
    lines = [
        {
            "phase": "rl",
            "rollout_id": i,
            "step": i + 1,
            "weight_version": i + 1,
            "seconds": 2.0,
            "reward_mean": i / 4,
            "unknown": [1],
        }
        for i in range(4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    (folder / "trace").mkdir()
    conductor = []
    trainer = []
    for i in range(2):
        of = dict(phase="rl", rollout=i)
        step = line_of("conductor", "step", 100.0 + 10 * i, 10.0, **of)
        conductor.append(step)
        conductor.append(line_of("conductor", "wait_for_batch", 100.0 + 10 * i, 4.0, parent=step.id, **of))
        conductor.append(line_of("conductor", "train", 104.0 + 10 * i, 5.0, parent=step.id, **of))
        train = line_of("trainer-0", "train", 104.25 + 10 * i, 4.5)
        trainer += [train, line_of("trainer-0", "forward_backward", 104.5 + 10 * i, 3.0, parent=train.id)]
    for name, spans in (("conductor", conductor), ("trainer-0", trainer)):
        (folder / "trace" / f"{name}.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, spans)) + b"\n")
    return folder


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_summary_tells_phases_rewards_time_engines_and_ledger(run):
    (run / "summary.json").write_text('{"reward_final": 0.75, "tables": [1]}')
    for arguments in ([run], ["summary", run]):
        text = invoke(*arguments).output
        assert "8 dispatched = 4 trained + 2 dropped (too_long 2) + 2 in flight" in text
        for part in ("sglang 0.5.16", "finished", "attempt 2", "0.000 -> 0.750", "reward_final"):
            assert part in text
        for part in ("wait_for_batch", "unaccounted", "forward_backward", "trainer idle 40.0 %"):
            assert part in text
    summary = summarize(run)
    (phase,) = summary.phases
    assert (phase.name, phase.rollouts, phase.steps, phase.weight_version, phase.seconds) == ("rl", 4, 4, "4", 8.0)
    assert json.loads(invoke(run, "--json").output)["phases"][0]["rewards"] == [0.0, 0.25, 0.5, 0.75]


def test_a_run_that_only_just_started_has_a_summary(tmp_path, run):
    young = tmp_path / "young"
    young.mkdir()
    (young / "run.json").write_bytes((run / "run.json").read_bytes())
    text = invoke(young).output
    assert "not finished" in text and "none dispatched yet" in text


@pytest.mark.parametrize("what", ["absent", "empty", "no run.json"])
def test_what_is_no_run_directory_is_named(tmp_path, run, what):
    folder = tmp_path / "x"
    if what != "absent":
        folder.mkdir()
    if what == "no run.json":
        (folder / "metrics.jsonl").write_text("")
    with pytest.raises(DataError) as error:
        invoke(folder)
    wanted = {"absent": "no such directory", "empty": "none of run.json", "no run.json": "run.json is missing"}[what]
    assert wanted in error.value.message and error.value.fix


def test_ledger_over_several_phases(tmp_path):
    folder = tmp_path / "run"
    fill_journal(folder / "sft" / "journal.sqlite", 4, 0, 0)
    fill_journal(folder / "rl" / "journal.sqlite", 2, 1, 3)
    text = invoke("ledger", folder).output
    assert "10 dispatched = 6 trained + 1 dropped (too_long 1) + 3 in flight (leased 3): holds" in text
    found = json.loads(invoke("ledger", folder, "--json").output)
    assert found["balanced"] and found["phases"]["rl"]["dispatched"] == 6 and found["total"]["trained"] == 6


def test_a_surplus_in_one_stage_does_not_pay_for_a_loss_in_another(tmp_path):
    import sqlite3

    folder = tmp_path / "run"
    surplus = "INSERT INTO samples(sample_index, group_index, position, fate) VALUES(99, 0, 9, 'LEASED')"
    for phase, change in (("a", "DELETE FROM samples WHERE sample_index = 7"), ("b", surplus)):
        fill_journal(folder / phase / "journal.sqlite")
        db = sqlite3.connect(folder / phase / "journal.sqlite")
        with db:
            db.execute(change)
        db.close()
    result = invoke("ledger", folder)
    assert result.exit_code == 1 and "DOES NOT HOLD" in result.output
    assert "phase a: +1 samples dispatched but nowhere" in result.output
    assert not ledgers.balanced(ledgers.ledgers(folder))


def test_ledger_without_a_journal(tmp_path, run):
    (run / "journal.sqlite").unlink()
    with pytest.raises(DataError, match=r"no journal\.sqlite"):
        invoke("ledger", run)


def test_why_tells_a_sample_s_line_and_fate(run):
    text = invoke("why", run, 5).output
    assert "data.jsonl:6" in text and "DROPPED (too_long)" in text and "5+1=" in text
    assert json.loads(invoke("why", run, 1, "--json").output)[""]["step"] == 0
    with pytest.raises(DataError, match=r"no sample 77 \(the run dispatched 8\)"):
        invoke("why", run, 77)


def test_a_repeated_rollout_counts_once_as_it_went_last(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"rollout_id": 0, "reward_mean": 1}\n{"rollout_id": 1, "rew{"rollout_id": 1, "reward_mean": 2}\n'
        '{"rollout_id": 0, "reward_mean": 3}\n'
    )
    assert metrics_of(tmp_path) == {"": [{"rollout_id": 0, "reward_mean": 3}, {"rollout_id": 1, "reward_mean": 2}]}
    (tmp_path / "metrics.jsonl").write_text('{"rollout_id": 0}\nnonsense}\n{"rollout_id": 1}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a JSON object"):
        metrics_of(tmp_path)


def test_sparklines():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1]) == "▁▁" and sparkline([None, 2.0]) == " ▁" and sparkline([]) == ""
    assert len(sparkline(list(range(1000)))) == 40
    assert reward_line([None, 0.5]) == "0.500" and reward_line([None]) == "-", "one point is not plotted"
    assert reward_line([0.25, 1.0]) == "0.250 -> 1.000  ▁█"


def nests(events):
    """In each thread, spans are inside one another or apart; starts do not go back."""
    threads = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for spans in threads.values():
        stack = []
        last = 0
        for span in spans:
            assert span["ts"] >= last >= 0 and span["dur"] >= 0
            last = span["ts"]
            while stack and stack[-1] <= span["ts"]:
                stack.pop()
            assert not stack or span["ts"] + span["dur"] <= stack[-1]
            stack.append(span["ts"] + span["dur"])
    return True


def test_the_export_is_a_well_formed_trace(run):
    assert "10 spans" in invoke("export", run).output
    document = json.loads((run / "trace.json").read_text())
    events = document["traceEvents"]
    assert nests(events) and {event["ph"] for event in events} == {"M", "X"}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "conductor", 2: "trainer-0"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= threads
    step = next(event for event in events if event["name"] == "step")
    assert (step["ts"], step["dur"], step["args"]["rollout"]) == (0, 10_000_000, 0)
    assert perfetto.events(spans_of(run)) == perfetto.events(spans_of(run)) == events


def test_genuine_nested_spans_stay_in_one_thread(tmp_path):
    tracer = Tracer(tmp_path, "conductor")
    for _ in range(50):
        with tracer.span("step"):
            with tracer.span("a"):
                with tracer.span("b"):
                    pass
            with tracer.span("c"):
                pass
    tracer.close()
    events = perfetto.events(spans_of(tmp_path))
    assert nests(events) and {event["tid"] for event in events if event["ph"] == "X"} == {1}


def test_overlapping_spans_get_tracks_of_their_own_and_ranks_sort_as_numbers():
    rng = random.Random(0)
    spans = []
    for _ in range(500):
        spans.append(line_of(f"engine-{rng.randrange(12)}", "request", 1e9 + rng.uniform(0, 5), rng.uniform(0, 2)))
    events = perfetto.events(spans)
    assert nests(events) and sum(event["ph"] == "X" for event in events) == 500
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"engine-{i}" for i in range(12)]


@pytest.mark.parametrize("seed", range(10))
def test_only_a_parent_is_drawn_around_a_span(seed):
    """Spans of random trees, most of them at the same time as others, some outliving their parents."""
    rng = random.Random(seed)
    spans = []
    for _ in range(200):
        parent = rng.choice([None, *spans[-20:]])
        ts = rng.uniform(parent.ts, parent.end) if parent else rng.uniform(0, 20)
        spans.append(line_of("conductor", "work", ts, rng.uniform(0, 4), parent=parent and parent.id))
    events = [event for event in perfetto.events(spans) if event["ph"] == "X"]
    assert nests(events) and len(events) == 200
    parents = {span.id: span.parent for span in spans}
    open_ = {}
    for event in events:
        stack = open_.setdefault(event["tid"], [])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
            stack.pop()
        assert not stack or stack[-1]["args"]["id"] == parents[event["args"]["id"]]
        stack.append(event)
    assert sum(1 for e in events if parents[e["args"]["id"]]) > 50


def test_an_export_without_spans_is_refused(tmp_path, run):
    for path in (run / "trace").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="no spans"):
        invoke("export", run)
