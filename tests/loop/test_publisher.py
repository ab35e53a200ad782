"""The publisher over scripted engines: which version each of them holds, after what, and what a resume sends again.

1. After a version was written and sent every engine holds the version, proven, and the publisher says which it is.
2. An engine that somebody else updated is noticed before anything is sent; engines that came later are not accused.
3. After a failure no version counts as held.
4. What a resume needs is never pruned.
5. A resume gives the engines what they had at the last commit, or the commit's own weights where that is gone.
"""

import contextlib
import pathlib

import pytest
import torch

from slime_cli.buffer.records import Commit
from slime_cli.errors import EngineError
from slime_cli.loop.publishing import Publisher, Timetable
from slime_cli.manifests import layout
from slime_cli.weights import publish
from slime_cli.weights.transports.disk import Disk
from tests import checkpoints
from tests.scripted_engine import LoadingEngine


class Learner:
    def __init__(self, model):
        self.model = model
        self.step = 0
        """Whose weights it has."""
        self.kept = {}

    def publish(self, folder, version, how=None):
        assert layout.step_of(version) == self.step
        weights = {"model.norm.weight": torch.full((8,), float(self.step))}
        named = iter(weights.items())
        publish.write(
            named, pathlib.Path(folder), hf_checkpoint=str(self.model), version=version, step=self.step, run="r"
        )
        return 32

    def load_published(self, folder):
        self.step = layout.step_of(pathlib.Path(folder).name)

    def keep(self, name, path=None):
        self.kept[name] = self.step


def commit(step, rollout_id):
    return Commit(step, rollout_id, layout.version_name(step), "c", 1, 0.0)


class Run:
    """One attempt: a rollout is one optimizer step; rollout n is trained into step n + 1."""

    def __init__(self, folder, model, timetable=None, engines=None, keep_old_actor=False):
        self.learner = Learner(model)
        self.engines = engines or [LoadingEngine()]
        self.committed = []
        self.saving = []
        self.said = []
        self.spans = []
        self.transport = Disk(folder, newest=2)
        self.publisher = Publisher(
            self.transport,
            self.learner,
            lambda: [engine.url for engine in self.engines],
            timetable or Timetable(total=9),
            lambda: self.committed,
            lambda: self.saving,
            keep_old_actor=keep_old_actor,
            span=self.span,
            say=self.said.append,
        )

    @contextlib.contextmanager
    def span(self, name, **args):
        self.spans.append(name)
        yield args

    def publish(self, step, **more):
        self.learner.step = step
        return self.publisher.send(self.publisher.write(step), **more)

    def held(self):
        return [engine.version for engine in self.engines]

    def folders(self):
        return [layout.step_of(path.name) for path in layout.versions(self.transport.folder)]


@pytest.fixture
def model(tmp_path):
    return checkpoints.write(tmp_path / "model")


@pytest.fixture
def run(tmp_path, model):
    return Run(tmp_path / "run", model, engines=[LoadingEngine(), LoadingEngine()])


# -- 1 -----------------------------------------------------------------------------------------------------------------


def test_every_engine_holds_what_was_published_and_proves_it(run):
    assert run.publisher.held is None and run.publisher.proofs == []
    for step in (0, 1):
        proofs = run.publish(step)
        assert [(p.url, p.version, p.kind) for p in proofs] == [
            (engine.url, layout.version_name(step), "checksum") for engine in run.engines
        ]
        assert run.held() == [layout.version_name(step)] * 2
        assert (run.publisher.held, run.publisher.held_step) == (layout.version_name(step), step)
        assert run.publisher.proofs == proofs
    assert run.spans == ["publish", "sync", "verify"] * 2


def test_writing_and_sending_are_apart_so_that_engines_stand_still_for_the_second_only(run):
    run.publish(0)
    run.learner.step = 1
    version = run.publisher.write(1)
    assert run.held() == ["v000000"] * 2 and run.publisher.held == "v000000"
    run.publisher.send(version, flush=False)
    assert run.held() == ["v000001"] * 2
    asked = [path.split("?")[0] for path, _ in run.engines[0].posted if "weights_checker" not in path]
    assert asked == ["/update_weights_from_disk", "/flush_cache", "/update_weights_from_disk"]


def test_the_learner_keeps_what_engines_sample_from_only_when_it_is_asked_to(tmp_path, model):
    for keep in (True, False):
        run = Run(tmp_path / str(keep), model, keep_old_actor=keep)
        run.publish(4)
        assert run.learner.kept == ({"old_actor": 4} if keep else {})


# -- 2, 3 --------------------------------------------------------------------------------------------------------------


def test_an_engine_that_another_process_updated_is_noticed_before_anything_is_sent(run):
    run.publish(0)
    run.engines[1].answers["/model_info"] = {"weight_version": "by-hand"}
    before = len(run.engines[0].posted)
    with pytest.raises(EngineError, match="'by-hand', which this run did not send .its last were 'v000000'"):
        run.publish(1)
    assert len(run.engines[0].posted) == before


def test_engines_that_came_later_get_the_next_version_like_the_others(run):
    run.publish(0)
    run.engines = [run.engines[0], LoadingEngine()]
    run.publish(1)
    assert run.held() == ["v000001"] * 2
    run.engines.pop(0)  # one died
    run.publish(2)
    assert run.held() == ["v000002"] and len(run.publisher.proofs) == 1


def test_after_a_failure_no_version_is_held_and_the_next_attempt_brings_all_engines_there(run):
    run.publish(0)
    load = run.engines[1].answers["/update_weights_from_disk"]
    run.engines[1].answers["/update_weights_from_disk"] = {"success": False, "message": "disk gone"}
    with pytest.raises(EngineError, match="disk gone"):
        run.publish(1)
    assert run.publisher.held is None and run.held() == ["v000001", "v000000"]
    run.engines[1].answers["/update_weights_from_disk"] = load
    run.publish(1)
    assert run.publisher.held == "v000001" and run.held() == ["v000001"] * 2


def test_an_engine_that_loaded_something_else_is_no_success(run):
    def wrong(body):
        run.engines[1].answers["/model_info"] = {"weight_version": body["weight_version"]}
        run.engines[1].answers["/weights_checker"] = {"ranks": [{"checksums": {"model.norm.weight": "00"}}]}
        return {"success": True}

    run.engines[1].answers["/update_weights_from_disk"] = wrong
    with pytest.raises(EngineError, match="holds other weights than v000000"):
        run.publish(0)
    assert run.publisher.held is None


# -- 4 -----------------------------------------------------------------------------------------------------------------


def test_what_a_resume_would_send_again_is_never_pruned(tmp_path, model):
    """Published every second rollout, committed every fifth: at every moment a kill finds the version that it needs."""
    run = Run(tmp_path / "run", model, Timetable(total=20, interval=2))
    run.publish(0)
    for rollout_id in range(20):
        step = rollout_id + 1
        if step % 5 == 0:
            run.saving = [commit(step, rollout_id)]  # a checkpoint under way: either commit may be the last
        if run.publisher.due(rollout_id):
            run.publish(step)
        for commits in (run.committed, [*run.committed, *run.saving]):
            assert run.publisher.timetable.step_held(commits) in run.folders(), (rollout_id, commits)
        if step % 5 == 2:
            run.committed += run.saving
            run.saving = []
        assert len(run.folders()) <= 2 + 2
    assert run.folders()[-1] == 20


# -- 5 -----------------------------------------------------------------------------------------------------------------


def resumed(tmp_path, model, timetable, commits, **more):
    run = Run(tmp_path / "run", model, timetable, **more)
    run.committed = commits
    return run


def test_a_resume_sends_again_what_the_engines_held(tmp_path, model):
    timetable = Timetable(total=9, interval=3)
    first = Run(tmp_path / "run", model, timetable)
    for step in (0, 3):
        first.publish(step)
    run = resumed(tmp_path, model, timetable, [commit(n + 1, n) for n in range(4)], keep_old_actor=True)
    version = run.publisher.behind()
    assert version.name == "v000003"
    run.publisher.restore_old_actor(version)
    assert run.learner.kept == {"old_actor": 3}
    run.learner.step = 4  # the checkpoint is loaded
    run.publisher.send(version)
    assert run.held() == ["v000003"] and run.publisher.held_step == 3 and run.said == []
    assert run.learner.kept == {"old_actor": 3}, "what the engines sample from, not what the trainer has"


@pytest.mark.parametrize("commits", [[], [commit(n + 1, n) for n in range(3)]])
def test_a_resume_at_a_published_step_publishes_the_trainers_own_weights(tmp_path, model, commits):
    run = resumed(tmp_path, model, Timetable(total=9, interval=3), commits)
    assert run.publisher.behind() is None and run.said == []
    step = len(commits)
    run.publish(step)
    assert run.held() == [layout.version_name(step)]


def test_a_version_that_is_gone_is_said_and_the_trainers_own_takes_its_place(tmp_path, model):
    run = resumed(tmp_path, model, Timetable(total=9, interval=3), [commit(n + 1, n) for n in range(4)])
    assert run.publisher.behind() is None
    assert run.said == ["the weights of step 3 are gone, so the engines continue with those of step 4"]
    run.publish(4)
    assert run.held() == ["v000004"]


def test_a_transport_that_keeps_nothing_is_named(tmp_path, model):
    run = resumed(tmp_path, model, Timetable(total=9, interval=3), [commit(n + 1, n) for n in range(4)])
    run.transport.can_go_back = False
    run.transport.name = "nccl"
    assert run.publisher.behind() is None
    assert run.said == [
        "the weights of step 3 cannot be sent again by nccl, so the engines continue with those of step 4"
    ]
