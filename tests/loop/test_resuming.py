"""What an attempt finds of those before it: a damaged checkpoint, batches that are gone, metrics that a kill left
out."""

import json
import shutil

import pytest

from slime_cli import manifests
from slime_cli.buffer.journal import Journal
from slime_cli.errors import DataError, UsageError
from slime_cli.loop import resuming
from slime_cli.loop.attempts import append_line
from slime_cli.manifests import layout
from slime_cli.options.resolve import resolve
from slime_cli.tracing.ledger import ledgers
from tests.buffer.test_journal import deal, done
from tests.loop.test_checkpoint_folders import cut, make

RL = "--hf-checkpoint h --prompt-data p --num-rollout 9 --rollout-batch-size 1 --n-samples-per-prompt 4 --rm-type math"


class Run:
    """A stage that committed rollout 0 as step 1, rollouts 1 and 2 together as steps 2 and 3, and has a batch of
    rollout 3."""

    def __init__(self, folder, more: str = "", name: str = "train", run_dir=None):
        self.folder = folder
        self.run_dir = run_dir or folder
        self.name = name
        self.told = []
        self.options = resolve(f"{RL} {more}".split())
        self.rollouts = []
        with Journal(folder / "journal.sqlite") as journal:
            for r in range(4):
                self.rollouts.append(deal(journal, r, 1, 4, r))
                journal.finish([done(i) for i in self.rollouts[r]])
                journal.batched(self.rollouts[r], r)
                self.write_batch(r)
                journal.line(r, self.line(r))
                append_line(self.run_dir / "metrics.jsonl", self.line(r))
            for step, last in ((1, 0), (3, 2)):
                checkpoint = make(folder / "checkpoints", step, weights=7)
                make(folder / "checkpoints" / "critic", step, weights=7)
                steps = [(r + 1, r, f"v{r + 1}", self.rollouts[r]) for r in range(last + 1) if r + 1 > (step == 3)]
                journal.commit(steps=steps, checkpoint=str(checkpoint))

    def line(self, rollout_id: int) -> dict:
        return {"phase": self.name, "rollout_id": rollout_id, "step": rollout_id + 1, "seconds": 1.5}

    def write_batch(self, rollout_id: int) -> None:
        folder = layout.rollout(self.folder, rollout_id)
        manifests.write_bytes(folder / "samples.parquet", b"rows")
        manifest = manifests.Rollout(
            rollout_id=rollout_id,
            groups=1,
            samples=4,
            fates={},
            weight_versions=[],
            prompt_cursor_before={},
            prompt_cursor_after={},
            files={"samples.parquet": manifests.file_hash(folder / "samples.parquet")},
        )
        manifests.write(folder / "manifest.json", manifest)

    @property
    def stage(self):
        return self.name, self.options, self.folder

    def prepare(self):
        resuming.prepare([self.stage], self.run_dir, self.told.append)
        with Journal(self.folder / "journal.sqlite") as journal:
            return journal.recover(), journal.ledger()

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


ROLLBACK = "--on-damaged-checkpoint rollback"


def newest(run: Run):
    return layout.checkpoint(run.folder / "checkpoints", 3)


def test_a_whole_run_is_left_as_it_is(tmp_path):
    run = Run(tmp_path, ROLLBACK)
    recovery, ledger = run.prepare()
    assert recovery.committed.step == 3 and ledger.balanced and not ledger.rollbacks and not run.told


@pytest.mark.parametrize(
    "spoil", [cut, lambda c: (c / "weights").unlink(), shutil.rmtree, lambda c: (c / "checkpoint.json").write_text("{")]
)
def test_a_damaged_newest_checkpoint_ends_the_run_with_the_option_that_goes_back(tmp_path, spoil):
    run = Run(tmp_path)
    spoil(newest(run))
    with pytest.raises(DataError) as error:
        run.prepare()
    assert f"train: the last commit, step 3, is in a damaged checkpoint: {newest(run)}" in error.value.message
    assert "--on-damaged-checkpoint rollback to go back to step 1" in error.value.fix
    with Journal(tmp_path / "journal.sqlite") as journal:
        assert journal.ledger().trained == 12, "nothing changed"


def test_with_the_option_the_run_goes_back_and_every_sample_is_trained_again_once(tmp_path):
    run = Run(tmp_path, ROLLBACK)
    (tmp_path / "eval").mkdir()
    for step in (0, 1, 3):
        (tmp_path / "eval" / f"{step:06d}.json").write_text("{}")
    cut(newest(run))
    recovery, ledger = run.prepare()
    assert recovery.committed.step == 1 and recovery.replay == {r: tuple(run.rollouts[r]) for r in (1, 2, 3)}
    assert (
        ledger.balanced
        and (ledger.trained, ledger.in_flight) == (4, {"BATCHED": 12})
        and "weights has 3 bytes" in ledger.rollbacks[0].reason
    )
    assert sorted(p.stem for p in (tmp_path / "eval").iterdir()) == ["000000", "000001"]
    assert [line["rollout_id"] for line in run.lines()] == [0], "the others are trained again and get their line then"
    assert "8 samples are trained again from their batches" in run.told[1] and len(run.told) == 2
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.commit(
            steps=[(r + 1, r, "v", run.rollouts[r]) for r in (1, 2, 3)],
            checkpoint=str(make(tmp_path / "checkpoints", 4)),
        )
        assert journal.ledger().balanced and journal.ledger().trained == 16 and journal.ledger().trained_twice == 0
    run.prepare()
    assert [line["rollout_id"] for line in run.lines()] == [0, 1, 2, 3]


def test_batches_that_are_gone_are_said_and_their_samples_dropped(tmp_path):
    run = Run(tmp_path, f"{ROLLBACK} --keep-rollouts 1")
    cut(newest(run))
    shutil.rmtree(layout.rollout(tmp_path, 1))
    (layout.rollout(tmp_path, 2) / "samples.parquet").write_bytes(b"row")
    recovery, ledger = run.prepare()
    assert recovery.replay == {3: tuple(run.rollouts[3])} and ledger.balanced
    assert ledger.dropped == {"batch_lost": 8} and ledger.trained == 4
    assert "the batches of rollouts 1, 2 are gone (--keep-rollouts 1 removed them)" in run.told[-1]


def test_without_any_whole_checkpoint_the_stage_begins_again_from_its_batches(tmp_path):
    run = Run(tmp_path, ROLLBACK)
    shutil.rmtree(tmp_path / "checkpoints")
    recovery, ledger = run.prepare()
    assert (
        recovery.committed is None and list(recovery.replay) == [0, 1, 2, 3] and ledger.balanced and run.lines() == []
    )
    assert "rolled back to its begin" in run.told[1]


def test_a_critic_s_damaged_checkpoint_counts_as_the_policy_s(tmp_path):
    ppo = Run(tmp_path / "ppo", "--advantage-estimator ppo")
    grpo = Run(tmp_path / "grpo")
    for run in (ppo, grpo):
        cut(layout.critic(newest(run)))
    grpo.prepare()
    with pytest.raises(DataError, match="its critic's, .*weights has 3 bytes of 7"):
        ppo.prepare()


def test_an_earlier_stage_s_checkpoint_counts_while_a_later_one_needs_it(tmp_path):
    first = Run(tmp_path / "a", name="a", run_dir=tmp_path)
    cut(newest(first))
    options = {
        "none": "",
        "reference": "--use-kl-loss --kl-loss-coef 0.1",
        "its own": "--use-kl-loss --kl-loss-coef 0.1 --load l --ref-load r",
    }
    for kind, more in options.items():
        later = Run(tmp_path / kind, more, name=kind, run_dir=tmp_path)
        if kind == "reference":
            with pytest.raises(DataError, match="a: the last commit"):
                resuming.prepare([first.stage, later.stage], tmp_path, print)
        else:
            resuming.prepare([first.stage, later.stage], tmp_path, print)
    with pytest.raises(DataError, match="a: the last commit"):
        resuming.prepare([first.stage, ("new", later.options, tmp_path / "new")], tmp_path, print)


@pytest.mark.parametrize(
    "left",
    [
        [0, 1],  # killed between the commit and the line
        [0, 1, 2, 3],  # a rollout that was not committed has a line already
        [0, 1, 1, 2, 2],  # as attempts before this repair left it
        [],
        None,
    ],
)
@pytest.mark.parametrize("torn", ["", '{"phase": "train", "rollo'])
def test_after_a_kill_every_committed_rollout_has_one_line(tmp_path, left, torn):
    run = Run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.unlink()
    if left is not None:
        for rollout_id in left:
            append_line(path, run.line(rollout_id))
        with open(path, "a") as file:
            file.write(torn)
    run.prepare()
    assert run.lines() == [run.line(r) for r in range(3)]
    before = path.stat().st_mtime_ns
    run.prepare()
    assert path.stat().st_mtime_ns == before, "what is right is not written again"


def test_stages_keep_their_lines_in_one_file(tmp_path):
    runs = [Run(tmp_path / name, name=name, run_dir=tmp_path) for name in ("sft", "rl")]
    (tmp_path / "metrics.jsonl").unlink()
    resuming.prepare([run.stage for run in runs], tmp_path, print)
    assert [(line["phase"], line["rollout_id"]) for line in runs[0].lines()] == [
        (s, r) for s in ("sft", "rl") for r in range(3)
    ]


def test_a_journal_without_lines_keeps_those_of_the_file(tmp_path):
    import sqlite3

    run = Run(tmp_path)
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    with db:
        db.execute("DELETE FROM lines WHERE rollout_id < 2")
    db.close()
    run.prepare()
    assert run.lines() == [run.line(r) for r in range(3)]


def starts(folder, more: str):
    options = resolve(f"{RL} {more}".split())
    resuming.check_starts([("train", options, folder)], folder)
    return resuming.start(options.slime, print)


def test_ref_load_is_the_start_while_load_holds_no_checkpoint(tmp_path):
    load = tmp_path / "load"
    ref = make(tmp_path / "ref", 0, weights=7)
    words = f"--load {load} --ref-load {tmp_path / 'ref'}"
    assert starts(tmp_path, words) == starts(tmp_path, f"--ref-load {tmp_path / 'ref'}") == str(ref)
    four = make(load, 4, weights=7)
    assert starts(tmp_path, words) == starts(tmp_path, f"--load {load}") == str(four)
    cut(four)
    with pytest.raises(DataError, match="weights has 3 bytes"):  # damaged or not: it is not passed over without a word
        starts(tmp_path, words)
    assert starts(tmp_path, "") is None


def test_ckpt_step_is_that_of_load_and_of_nothing_else(tmp_path):
    load = tmp_path / "load"
    two = make(load, 2, weights=7)
    make(load, 4, weights=7)
    assert starts(tmp_path, f"--load {load} --ckpt-step 2") == str(two)
    with pytest.raises(DataError) as error:
        starts(tmp_path, f"--load {load} --ckpt-step 3")
    assert "--ckpt-step 3" in error.value.message and "step 2, 4" in error.value.fix
    make(tmp_path / "ref", 0, weights=7)
    with pytest.raises(DataError, match="--ckpt-step 2"):
        starts(tmp_path, f"--load {tmp_path / 'none'} --ref-load {tmp_path / 'ref'} --ckpt-step 2")


def test_another_run_s_save_is_refused_before_the_run_is_claimed(tmp_path):
    run = Run(tmp_path / "a", f"--save {tmp_path / 'c'}")
    make(tmp_path / "c", 3, weights=7)
    resuming.check_starts([run.stage], run.run_dir)
    with pytest.raises(UsageError, match="another run already, up to iteration 3"):
        resuming.check_starts([("train", run.options, tmp_path / "b")], tmp_path / "b")


def test_a_run_that_has_committed_does_not_ask_for_what_it_started_from(tmp_path):
    run = Run(tmp_path, f"--load {tmp_path / 'gone'}")
    resuming.check_starts([run.stage], tmp_path)
    with pytest.raises(DataError, match="no complete checkpoint there"):
        resuming.check_starts([("train", run.options, tmp_path / "new")], tmp_path / "new")


@pytest.mark.parametrize(
    "more", ["--use-opd --opd-teacher-load {}", "--load {0}/a --use-kl-loss --kl-loss-coef 0.1 --ref-load {0}"]
)
def test_a_reference_and_a_teacher_are_looked_for_too(tmp_path, more):
    make(tmp_path / "x" / "a", 2, weights=7)
    with pytest.raises(DataError, match="no complete checkpoint there"):
        starts(tmp_path, more.format(tmp_path / "x"))


@pytest.mark.parametrize("how", ["half of it", "garbage inside", "zeros"])
def test_a_damaged_journal_is_named(tmp_path, how):
    run = Run(tmp_path)
    path = tmp_path / "journal.sqlite"
    content = path.read_bytes()
    half = len(content) // 2
    spoilt = {
        "half of it": content[:half],
        "garbage inside": content[:4096] + b"x" * (half - 4096) + content[half:],
        "zeros": bytes(len(content)),
    }
    path.write_bytes(spoilt[how])
    for read in (run.prepare, lambda: ledgers(tmp_path)):
        with pytest.raises(DataError, match=f"{path}: (damaged|not a journal)"):
            read()
