"""The journal against a plain dict model, against kill -9, and at its budget of 20,000 samples/s."""

import dataclasses
import multiprocessing
import os
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from slime_cli.buffer.journal import SOURCES, Journal
from slime_cli.buffer.types import Fate, PromptRow, Sample, Status, trajectories
from slime_cli.errors import DataError, UsageError


def row(n: int) -> PromptRow:
    messages = [{"role": "user", "content": f"{n}+{n}="}]
    return PromptRow(prompt=messages, label=str(2 * n), metadata={"n": n}, source="d.jsonl", row=n + 1)


def deal(journal: Journal, first: int, groups: int, n: int, rollout_id: int) -> list[int]:
    """Leases ``groups`` groups of ``n``, numbered from ``first``; returns the sample indices."""
    rows = [(g, row(g), 0, list(range(g * n, (g + 1) * n))) for g in range(first, first + groups)]
    journal.lease(rows, {"row": first + groups}, rollout_id)
    return [index for *_, indices in rows for index in indices]


def done(index: int, n: int = 4, reward: object = 1.0) -> Sample:
    return Sample(
        index=index,
        group_index=index // n,
        tokens=[1, 2, 3],
        response="x",
        response_length=1,
        reward=reward,
        rollout_log_probs=[-0.5],
        status=Status.COMPLETED,
    )


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as opened:
        yield opened


def train(journal: Journal, indices: list[int], step: int) -> None:
    journal.finish([done(i) for i in indices])
    journal.batched(indices, step)
    journal.commit(steps=[(step, step, f"v{step}", indices)], checkpoint=f"ckpt/{step}")


def test_a_sample_goes_through_and_the_ledger_balances(journal):
    indices = deal(journal, 0, 2, 4, rollout_id=7)
    journal.generated([done(0, reward=None)])
    journal.finish([done(0)])
    journal.finish([done(i) for i in indices[1:6]])
    journal.drop(indices[6:], "stale")
    journal.batched(indices[:4], 7)
    journal.commit(steps=[(0, 7, "1", indices[:2]), (1, 7, "2", indices[2:3])], checkpoint="ckpt/1")
    ledger = journal.ledger()
    assert ledger.balanced and ledger.dispatched == 8 and ledger.trained == 3 and ledger.dropped == {"stale": 2}
    assert ledger.in_flight == {"BATCHED": 1, "REWARDED": 2}
    record = journal.record(2)
    assert (record.fate, record.step, record.weight_version) == (Fate.TRAINED, 1, "2")
    assert (record.source, record.row, record.prompt) == ("d.jsonl", 1, row(0))
    assert (record.reward, record.attempts, journal.record(99)) == (1.0, 1, None)
    assert [c.samples for c in journal.commits()] == [2, 1]


def test_recovery_keeps_what_was_finished_and_returns_the_rest(journal):
    assert journal.recover().committed is None and journal.recover().cursor is None
    train(journal, deal(journal, 0, 1, 4, 0), 0)
    deal(journal, 1, 3, 4, 1)
    journal.finish([done(4, reward={"score": 0.5}), done(8), done(9), done(10), done(11)])
    journal.generated([done(5, reward=None)])
    journal.batched([8, 9, 10, 11], 1)
    recovery = journal.recover()
    last = recovery.committed
    assert (last.step, last.weight_version, last.checkpoint) == (0, "v0", "ckpt/0")
    assert recovery.replay == {1: (8, 9, 10, 11)} and recovery.cursor == {"row": 4}
    assert (recovery.next_group_index, recovery.next_sample_index) == (4, 16)
    first, second = recovery.groups
    assert (first.group_index, first.pending, first.row) == (1, (5, 6, 7), row(1))
    assert first.finished == (done(4, reward={"score": 0.5}),) and first.partial == {5: [done(5, reward=None)]}
    assert (second.group_index, second.pending, second.finished) == (3, (12, 13, 14, 15), ())
    journal.resume([5, 6], 2)
    assert [journal.record(i).attempts for i in (4, 5, 6, 7)] == [1, 2, 2, 1]
    journal.finish([done(5)])  # its generation is what the attempt before left of it
    assert journal.record(6).fate is Fate.LEASED and journal.ledger().balanced


def test_a_partial_generation_is_kept_and_continued(journal):
    deal(journal, 0, 1, 1, 0)
    half = Sample(index=0, group_index=0, tokens=[1, 2], response="h", response_length=1, status=Status.ABORTED)
    journal.release([half])
    assert journal.recover().groups[0].partial == {0: [half]}
    journal.resume([0], 1)
    assert journal.recover().groups[0].partial == {0: [half]}, "a kill in its continuation lost it"
    journal.resume([0], 1)
    journal.finish([done(0, n=1)])
    assert journal.record(0).rollout_id == 1


def test_a_group_is_as_old_as_the_lease_of_its_oldest_tokens(journal):
    rows = [(g, row(g), 0, [2 * g, 2 * g + 1]) for g in range(3)]
    journal.lease(rows, {}, 5, version=4)
    journal.finish([done(0, 2)])
    journal.release([done(2, 2)])
    assert [g.leased_at for g in journal.recover().groups] == [4, 4, None]
    journal.resume([1, 2, 3, 4, 5], 7, version=6)
    journal.generated([done(3, 2, None), done(4, 2, None)])
    assert [g.leased_at for g in journal.recover().groups] == [4, 4, 6]
    journal.resume([2], 8, version=7)
    journal.restart([2])
    assert [g.leased_at for g in journal.recover().groups] == [4, 6, 6]
    assert journal.recover().groups[1].partial == {3: [done(3, 2, None)]}
    journal.resume([3], 9, version=5)  # by older weights: a kill has lost the newer ones
    journal.resume([4], 9)  # lacks only its reward
    assert [g.leased_at for g in journal.recover().groups] == [4, 5, 6]


def fanned_out(index: int, rewards: list, n: int = 4) -> list[Sample]:
    return [dataclasses.replace(done(index, n, reward), part=part) for part, reward in enumerate(rewards)]


def test_what_is_finished_and_what_failed_beside_it_is_one_transaction(journal):
    deal(journal, 0, 1, 4, rollout_id=0)
    journal.finish([done(0)], {1: "reward_error", 2: "generation_error"})
    assert journal.ledger().dropped == {"reward_error": 1, "generation_error": 1}
    before = journal.ledger()
    with pytest.raises(ValueError, match="sample 1 can't go DROPPED -> DROPPED"):
        journal.finish([done(3)], {1: "reward_error"})
    assert journal.ledger() == before, "nothing of it happened"


def test_a_trajectory_that_fanned_out_is_counted_and_recovered_as_one(journal):
    deal(journal, 0, 1, 4, 0)
    siblings = fanned_out(1, [1.0, {"score": 0.5}, 0.0])
    journal.finish([done(0), *siblings])
    journal.generated(fanned_out(2, [None, None]))
    (group,) = journal.recover().groups
    assert group.finished == (done(0), *siblings) and group.pending == (2, 3)
    assert group.partial == {2: fanned_out(2, [None, None])}
    assert journal.record(1).reward == [1.0, {"score": 0.5}, 0.0] and journal.record(1).position == 1
    journal.drop([2, 3], "filter")
    journal.batched([0, 1], 0)
    assert journal.recover().replay == {0: (0, 1)}
    journal.commit(steps=[(0, 0, "1", [0, 1])], checkpoint="c")
    ledger = journal.ledger()
    assert ledger.balanced and (ledger.dispatched, ledger.trained, ledger.dropped) == (4, 2, {"filter": 2})
    assert [c.samples for c in journal.commits()] == [2]


def test_two_samples_of_a_trajectory_that_are_the_same_part_are_refused(journal):
    deal(journal, 0, 1, 4, 0)
    with pytest.raises(ValueError, match=r"sample 1 is named twice: its siblings are parts \[0, 0\]"):
        journal.finish([done(0), done(1), done(1)])
    with pytest.raises(ValueError, match="sample 1: reward 'good' is no number"):
        journal.finish(fanned_out(1, [0.0, "good"]))
    assert journal.ledger().in_flight == {"LEASED": 4}


def test_nothing_is_trained_twice_and_a_refused_commit_changes_nothing(journal):
    indices = deal(journal, 0, 1, 4, 0)
    train(journal, indices, 0)
    more = deal(journal, 1, 1, 4, 1)
    journal.finish([done(i) for i in more])
    journal.batched(more, 1)
    before = journal.ledger()
    with pytest.raises(ValueError, match=r"sample 2 can't go TRAINED -> TRAINED"):
        journal.commit(steps=[(1, 1, "v1", more), (2, 1, "v2", [2])], checkpoint="c")
    with pytest.raises(ValueError, match=r"sample 5 is named twice"):
        journal.commit(steps=[(1, 1, "v1", [4, 5]), (2, 1, "v2", [5])], checkpoint="c")
    with pytest.raises(ValueError, match="committed before"):
        journal.commit(steps=[(0, 1, "v1", more)], checkpoint="c")
    assert journal.ledger() == before and before.balanced and len(journal.commits()) == 1


def test_illegal_moves_name_sample_from_and_to(journal):
    deal(journal, 0, 1, 4, 0)
    with pytest.raises(ValueError, match="sample 1 can't go LEASED -> BATCHED"):
        journal.batched([0, 1], 0)
    with pytest.raises(ValueError, match="sample 77 is not in the journal"):
        journal.finish([done(0), done(77)])
    with pytest.raises(ValueError, match="dealt before"):
        deal(journal, 0, 1, 4, 0)
    with pytest.raises(ValueError, match="sample 0: .*can't be stored"):
        journal.finish([Sample(index=0, group_index=0, metadata={"tool": object()})])
    with pytest.raises(ValueError, match="sample 1: reward 'good' is no number"):
        journal.finish([done(0), done(1, reward="good")])
    assert journal.ledger().in_flight == {"LEASED": 4}


def test_numpy_values_of_hooks_are_stored_as_plain_ones(journal):
    import numpy

    deal(journal, 0, 1, 1, 0)
    journal.finish([Sample(index=0, group_index=0, reward=numpy.float32(0.5), metadata={"scores": numpy.arange(3)})])
    (sample,) = journal.recover().groups[0].finished
    assert sample.reward == 0.5 and sample.metadata == {"scores": [0, 1, 2]}


def test_what_was_committed_is_append_only_whoever_tries(journal):
    train(journal, deal(journal, 0, 1, 1, 1), 1)
    journal.roll_back(0, "its checkpoint is lost")
    with sqlite3.connect(journal.path) as other:
        for table, column in (("trained", "step"), ("commits", "step"), ("rollbacks", "to_step")):
            for statement in (f"DELETE FROM {table}", f"UPDATE {table} SET {column} = 5"):
                with pytest.raises(sqlite3.IntegrityError, match=f"{table} is append-only"):
                    other.execute(statement)
    other.close()


def trained_thrice(journal: Journal) -> list[list[int]]:
    """Rollouts 1 to 3 of a group of four, each trained in the step of that number and committed."""
    rollouts = []
    for step in (1, 2, 3):
        rollouts.append(deal(journal, step, 1, 4, step))
        train(journal, rollouts[-1], step)
    journal.put("finished", True)
    return rollouts


def test_a_rollback_hands_out_again_what_the_lost_commits_trained(journal):
    first, second, third = trained_thrice(journal)
    done_ = journal.roll_back(1, "ckpt/3: weights is missing")
    assert (done_.from_step, done_.to_step, done_.again, done_.dropped) == (3, 1, 8, 0)
    recovery = journal.recover()
    ledger = journal.ledger()
    assert recovery.committed.checkpoint == "ckpt/1" and recovery.replay == {2: tuple(second), 3: tuple(third)}
    assert ledger.balanced and (ledger.dispatched, ledger.trained, ledger.in_flight) == (12, 4, {"BATCHED": 8})
    assert (
        journal.record(third[0]).undone == (3,)
        and journal.record(first[0]).undone == ()
        and journal.get("finished") is None
    )
    journal.commit(steps=[(2, 2, "v2", second), (3, 3, "v3", third)], checkpoint="ckpt/3")
    ledger = journal.ledger()
    assert ledger.balanced and (ledger.trained, ledger.committed, ledger.trained_twice, ledger.in_flight) == (
        12,
        12,
        0,
        {},
    )
    assert ledger.rollbacks == (done_,) and [c.step for c in journal.commits()] == [1, 2, 3]
    assert (journal.record(third[0]).step, journal.record(third[0]).undone) == (3, (3,))
    with pytest.raises(ValueError, match="can't go TRAINED -> TRAINED"):
        journal.commit(steps=[(4, 4, "v4", third)], checkpoint="ckpt/4")


def test_samples_whose_batch_is_gone_are_dropped_by_a_rollback(journal):
    _, second, third = trained_thrice(journal)
    waiting = deal(journal, 9, 1, 4, 4)
    journal.finish([done(i) for i in waiting])
    journal.batched(waiting, 4)
    done_ = journal.roll_back(1, "lost", lost=[3, 4])
    assert (done_.again, done_.dropped) == (4, 8) and journal.recover().replay == {2: tuple(second)}
    ledger = journal.ledger()
    assert ledger.balanced and ledger.dropped == {"batch_lost": 8} and journal.record(third[0]).reason == "batch_lost"


def test_a_second_rollback_may_go_behind_the_first_or_to_the_begin(journal):
    rollouts = trained_thrice(journal)
    journal.roll_back(2, "lost")
    journal.commit(steps=[(3, 3, "v3", rollouts[2])], checkpoint="again/3")
    journal.roll_back(0, "all lost")
    assert journal.recover().committed is None and journal.commits() == [] and journal.ledger().balanced
    journal.commit(steps=[(n, n, "v", rollouts[n - 1]) for n in (1, 2, 3)], checkpoint="third/3")
    ledger = journal.ledger()
    assert ledger.balanced and ledger.trained == 12 and [r.to_step for r in ledger.rollbacks] == [2, 0]
    assert journal.record(rollouts[2][0]).undone == (3, 3) and journal.record(rollouts[0][0]).undone == (1,)


def test_a_rollback_that_undoes_nothing_or_to_no_commit_is_refused(journal):
    trained_thrice(journal)
    before = journal.ledger()
    for step in (3, 4, 0.5):
        with pytest.raises(ValueError, match="no rollback from step 3"):
            journal.roll_back(step, "?")
    assert journal.ledger() == before


OLD = """
CREATE TABLE groups(group_index INTEGER PRIMARY KEY, source TEXT NOT NULL, row INTEGER NOT NULL,
    epoch INTEGER NOT NULL, prompt BLOB NOT NULL);
CREATE TABLE samples(sample_index INTEGER PRIMARY KEY, group_index INTEGER NOT NULL REFERENCES groups,
    position INTEGER NOT NULL, fate TEXT NOT NULL, reason TEXT, rollout_id INTEGER, step INTEGER, weight_version TEXT,
    attempts INTEGER NOT NULL DEFAULT 1, reward, payload BLOB);
CREATE TABLE commits(step INTEGER PRIMARY KEY, rollout_id INTEGER NOT NULL, weight_version TEXT NOT NULL,
    checkpoint TEXT NOT NULL, samples INTEGER NOT NULL, time REAL NOT NULL);
CREATE TABLE trained(sample_index INTEGER PRIMARY KEY, step INTEGER NOT NULL);
CREATE TRIGGER trained_never_changes BEFORE UPDATE ON trained BEGIN SELECT RAISE(ABORT, 'trained is append-only'); END;
CREATE TRIGGER trained_never_shrinks BEFORE DELETE ON trained BEGIN SELECT RAISE(ABORT, 'trained is append-only'); END;
CREATE TABLE state(key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO groups VALUES(0, 'd.jsonl', 1, 0,
    x'85a670726f6d7074a171a56c6162656cc0a86d6574616461746180a6736f75726365a7642e6a736f6e6ca3726f7701');
INSERT INTO samples VALUES(0, 0, 0, 'TRAINED', NULL, 0, 1, 'v1', 1, 0.5, NULL);
INSERT INTO samples VALUES(1, 0, 1, 'BATCHED', NULL, 1, NULL, NULL, 1, 0.5, NULL);
INSERT INTO commits VALUES(1, 0, 'v1', 'ckpt/1', 1, 1e9);
INSERT INTO trained VALUES(0, 1);
INSERT INTO state VALUES('dispatched', '2');
PRAGMA user_version = 1;
"""
"""A journal of version 1."""


def test_an_older_journal_is_read_as_it_is_and_brought_up_by_a_writer(tmp_path):
    path = tmp_path / "journal.sqlite"
    db = sqlite3.connect(path)
    db.executescript(OLD)
    db.close()
    before = path.read_bytes()
    with Journal.open_readonly(path) as reader:
        assert reader.ledger().balanced and reader.record(0).step == 1 and reader.lines() == {}
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.put("key", 1)
    assert path.read_bytes() == before
    for _ in range(2):
        with Journal(path) as journal:
            assert (
                journal.ledger().balanced
                and journal.recover().replay == {1: (1,)}
                and journal.commits()[0].checkpoint == "ckpt/1"
            )
    with Journal(path) as journal:
        journal.commit(steps=[(2, 1, "v2", [1])], checkpoint="ckpt/2")
        journal.roll_back(1, "lost")
        assert journal.ledger().balanced and journal.recover().committed.step == 1


def test_lines_of_metrics_are_kept_by_rollout(journal):
    import numpy

    journal.line(1, {"step": 1, "seconds": 0.0})
    journal.line(0, {"step": numpy.int64(0)})
    journal.line(1, {"step": 1, "seconds": 2.5})
    assert journal.lines() == {0: {"step": 0}, 1: {"step": 1, "seconds": 2.5}}


def test_a_tampered_journal_does_not_balance(journal):
    train(journal, deal(journal, 0, 1, 4, 0), 0)
    with sqlite3.connect(journal.path) as other:
        other.execute("DELETE FROM samples WHERE sample_index = 3")
    other.close()
    assert not journal.ledger().balanced


def test_readers_see_a_live_and_a_closed_run_and_cannot_write(tmp_path):
    path = tmp_path / "a run? #1" / "journal.sqlite"
    with pytest.raises(DataError, match="no such journal"):
        Journal.open_readonly(path)
    with Journal(path) as journal, Journal.open_readonly(path) as reader:
        deal(journal, 0, 1, 4, 0)
        assert reader.ledger().in_flight == {"LEASED": 4}
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.put("key", 1)
    with Journal.open_readonly(path) as reader:
        assert reader.ledger().dispatched == 4


def test_foreign_files_and_newer_journals_are_refused(tmp_path):
    (tmp_path / "j").write_text("not a database, but long enough to be looked at" * 50)
    with pytest.raises(DataError, match="not a journal"):
        Journal.open_readonly(tmp_path / "j")
    with sqlite3.connect(tmp_path / "new") as db:
        db.execute("PRAGMA user_version = 99")
        db.execute("CREATE TABLE t(x)")
    db.close()
    with pytest.raises(DataError, match="version 99"):
        Journal.open_readonly(tmp_path / "new")


def test_a_second_writer_is_refused(journal):
    script = f"from slime_cli.buffer.journal import Journal; Journal({str(journal.path)!r})"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert child.returncode != 0 and UsageError.__name__ in child.stderr and "another process" in child.stderr


WAYS = {
    "generated": Fate.GENERATED,
    "finish": Fate.REWARDED,
    "release": Fate.PENDING,
    "resume": Fate.LEASED,
    "drop": Fate.DROPPED,
    "batched": Fate.BATCHED,
    "commit": Fate.TRAINED,
}
"""Method -> the fate it leads to."""


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_agree_with_a_dict(tmp_path, seed):
    """Random legal and illegal calls, reopened and recovered at random; the model is a dict of fates."""
    rng = random.Random(seed)
    model = {}
    dealt = 0
    step = 1
    trained: dict[int, int] = {}
    dropped: dict[str, int] = {}
    journal = Journal(tmp_path / "j.sqlite")
    for _ in range(250):
        action = rng.choice([*WAYS, "lease", "recover", "reopen", "roll_back"])
        some = rng.sample(sorted(model), min(len(model), rng.randint(0, 5)))
        if rng.random() < 0.7:  # mostly what could be legal, or the walk would refuse nearly all
            legal = [i for i in sorted(model) if action in WAYS and model[i] in SOURCES[WAYS[action]]]
            some = rng.sample(legal, min(len(legal), rng.randint(0, 5)))
        samples = [done(i) for i in some]
        calls = {
            "generated": lambda: journal.generated(samples),
            "finish": lambda: journal.finish(samples),
            "release": lambda: journal.release(samples),
            "resume": lambda: journal.resume(some, step),
            "drop": lambda: journal.drop(some, "filter"),
            "batched": lambda: journal.batched(some, step),
            "commit": lambda: journal.commit(steps=[(step, step, "v", some)], checkpoint="c"),
        }
        if action == "lease":
            new = deal(journal, dealt, rng.randint(1, 3), 4, step)
            dealt += len(new) // 4
            model.update(dict.fromkeys(new, Fate.LEASED))
        elif action == "recover":
            recovery = journal.recover()
            model = {i: Fate.PENDING if f in (Fate.LEASED, Fate.GENERATED) else f for i, f in model.items()}
            pending = sorted(i for g in recovery.groups for i in g.pending)
            assert pending == sorted(i for i in model if model[i] is Fate.PENDING)
            finished = sorted(s.index for g in recovery.groups for s in g.finished)
            assert finished == sorted(i for i in model if model[i] is Fate.REWARDED)
            replayed = sorted(i for ids in recovery.replay.values() for i in ids)
            assert replayed == sorted(i for i in model if model[i] is Fate.BATCHED)
            assert recovery.next_group_index == dealt and (recovery.cursor or {"row": 0}) == {"row": dealt}
        elif action == "roll_back":
            to = rng.choice([0, *[c.step for c in journal.commits()][-3:]])
            if any(s > to for s in trained.values()):
                lost = {i for i in trained if trained[i] > to}
                assert journal.roll_back(to, "lost").again == len(lost)
                model.update(dict.fromkeys(lost, Fate.BATCHED))
                trained = {i: s for i, s in trained.items() if s <= to}
        elif action == "reopen":
            journal.close()
            journal = Journal(tmp_path / "j.sqlite")
        else:
            to = WAYS[action]
            call = calls[action]
            if all(model[i] in SOURCES[to] for i in some):
                call()
                model.update(dict.fromkeys(some, to))
                trained |= dict.fromkeys(some, step) if action == "commit" else {}
                step += action == "commit"
                dropped["filter"] = dropped.get("filter", 0) + (len(some) if action == "drop" else 0)
            else:
                with pytest.raises(ValueError, match=r"can't go"):
                    call()
        ledger = journal.ledger()
        assert ledger.balanced and ledger.dispatched == len(model)
        assert ledger.trained == sum(f is Fate.TRAINED for f in model.values())
        assert sum(ledger.dropped.values()) == dropped.get("filter", 0)
    journal.close()


def work_until_killed(path: str, acknowledged: str) -> None:
    """A conductor in small: recovers, finishes and trains for ever; notes each commit that returned."""
    with Journal(path) as journal, open(acknowledged, "a", buffering=1) as notes:
        recovery = journal.recover()
        step = recovery.committed.step + 1 if recovery.committed else 0
        group = recovery.next_group_index
        waiting = [i for ids in recovery.replay.values() for i in ids]
        finished = trajectories(s for g in recovery.groups for s in g.finished)
        assert all([s.part for s in siblings] == list(range(1 + i % 3)) for i, siblings in finished.items()), (
            "siblings came apart"
        )
        ready = list(finished)
        open_now = [i for g in recovery.groups for i in g.pending]
        journal.resume(open_now, step)
        while True:
            open_now += deal(journal, group, 4, 4, step)
            group += 4
            journal.generated([done(i) for i in open_now[:3]])
            journal.finish([s for i in open_now[:-1] for s in fanned_out(i, [1.0] * (1 + i % 3))])
            journal.drop([open_now[-1]], "filter")
            ready += open_now[:-1]
            journal.batched(ready, step)
            waiting += ready
            journal.commit(steps=[(step, step, str(step), waiting)], checkpoint=str(step))
            notes.write(f"{step} {len(waiting)}\n")
            step = step + 1
            waiting = []
            ready = []
            open_now = []


@pytest.mark.slow
def test_killed_anywhere_nothing_is_lost_or_trained_twice(tmp_path):
    path = str(tmp_path / "journal.sqlite")
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()
    context = multiprocessing.get_context("fork")
    rng = random.Random(0)
    for _ in range(25):
        child = context.Process(target=work_until_killed, args=(path, str(acknowledged)))
        child.start()
        time.sleep(rng.uniform(0.002, 0.12))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL, "the child ended by itself"
        if pathlib.Path(path).exists():
            with Journal(path) as journal:
                ledger = journal.ledger()
                recovery = journal.recover()
                lines = acknowledged.read_text().splitlines()
                noted = {int(line.split()[0]) for line in lines if len(line.split()) == 2}
                assert ledger.balanced and ledger.trained_twice == 0
                assert noted <= {c.step for c in journal.commits()}, "a commit that returned is gone"
                # Every row the cursor passed is in the journal, and none is there twice.
                assert (recovery.cursor or {"row": 0})["row"] == recovery.next_group_index
                assert ledger.dispatched == 4 * recovery.next_group_index
    assert noted, "no child lived long enough to commit: the test tested nothing"


def throughput(path: pathlib.Path, batches: int = 20, groups: int = 128, n: int = 8) -> tuple[float, float]:
    """Samples/s through lease, finish, batched and commit in rollouts of groups x n: by the wall, by CPU time."""
    with Journal(path) as journal:
        wall = time.perf_counter()
        cpu = time.process_time()
        for step in range(batches):
            indices = deal(journal, step * groups, groups, n, step)
            journal.finish([done(i, n) for i in indices])
            journal.batched(indices, step)
            journal.commit(steps=[(step, step, str(step), indices)], checkpoint="c")
        samples = batches * groups * n
        return samples / (time.perf_counter() - wall), samples / (time.process_time() - cpu)


def test_throughput_budget(tmp_path):
    """The budget holds in CPU time, so that a busy machine does not fail it; ``make bench`` has the wall's."""
    wall, cpu = zip(*(throughput(tmp_path / f"{attempt}.sqlite") for attempt in range(3)), strict=True)
    print(f"journal: {max(wall):,.0f} samples/s, {max(cpu):,.0f} per CPU second")
    assert max(cpu) >= 20_000
