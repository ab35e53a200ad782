"""W&B and TensorBoard: asked for by option, over scripted libraries of the genuine ones' calls.

1. A library is imported only for its option; one that is missing is an error before anything starts.
2. Numbers of rollouts and evaluations go to each tracker under slime's names; what is no number does not.
3. A tracker that refuses to start ends the command; one that fails later is named once, and the others go on.
4. The account's key is recorded and shown nowhere.
"""

import json
import pathlib
import sys
import types
from typing import Any

import pytest

from slime_cli.errors import UsageError
from slime_cli.loop import trackers
from slime_cli.options import own, render, resume
from slime_cli.options.checks import layout
from slime_cli.options.resolve import Resolved, resolve

LINE = {"phase": "train", "rollout_id": 4, "step": 9, "reward_mean": 0.5, "train/loss": 1, "dropped": {"x": 1}}
RESULT = {"dataset": "aime", "prompts": 3, "reward_mean": 0.25, "truncated_ratio": 0.5, "reward_standard_error": None}
RESULT["pass_at"] = {"1": 0.25, "2": 0.5}


def options(words: str) -> Resolved:
    return resolve(words.split())


class Wandb(types.ModuleType):
    """As much of the library as is called."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == self.fails:
                raise RuntimeError(f"no {name}")
            self.calls.append((name, kwargs or args))
            return self if name == "init" else kwargs

        return call


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    return module


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is written, by folder."""
    written: list[Any] = []

    class EventFileWriter:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def add_event(self, event: Any) -> None:
            written.append((self.folder, event))

        def flush(self) -> None: ...

        def close(self) -> None:
            written.append((self.folder, "closed"))

    summary = types.SimpleNamespace
    proto = types.SimpleNamespace(
        event_pb2=types.SimpleNamespace(Event=types.SimpleNamespace),
        summary_pb2=types.SimpleNamespace(Summary=lambda value: value),
    )
    proto.summary_pb2.Summary.Value = lambda tag, simple_value: (tag, simple_value)
    names = "tensorboard tensorboard.compat tensorboard.compat.proto tensorboard.summary tensorboard.summary.writer"
    for name in names.split():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules["tensorboard.compat.proto"]).update(vars(proto))
    writer = summary(EventFileWriter=EventFileWriter)
    vars(sys.modules["tensorboard.summary.writer"])["event_file_writer"] = writer
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    return written


def opened(words: str, folder: pathlib.Path, said: list[str] | None = None) -> trackers.Trackers:
    resolved = options(words)
    say = (said if said is not None else []).append
    return trackers.Trackers.open(resolved.slime, folder, resume.recorded(resolved), say)


@pytest.mark.parametrize(("flag", "package"), [("--use-wandb", "wandb"), ("--use-tensorboard", "tensorboard")])
def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, flag: str, package: str):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    trackers.require(options("").slime)
    with pytest.raises(UsageError, match=f"{flag}: the package {package} is not installed") as caught:
        trackers.require(options(flag).slime)
    assert f"pip install {package}" in caught.value.fix


def test_wandb_is_told_of_rollouts_and_evaluations_and_a_resume_continues_its_run(wandb: Wandb, tmp_path: pathlib.Path):
    words = "--use-wandb --wandb-project p --wandb-group g --wandb-team t --wandb-key k --wandb-host http://h"
    tracked = opened(words, tmp_path)
    tracked.rollout(LINE)
    tracked.evaluation("train", [RESULT], 5, 10)
    tracked.close()
    calls = dict(wandb.calls[:3])
    assert calls["login"] == {"key": "k", "host": "http://h"}
    begun = calls["init"]
    assert (begun["project"], begun["entity"], begun["group"], begun["resume"]) == ("p", "t", "g", "allow")
    assert begun["name"].startswith("g_") and begun["dir"] == str(tmp_path)
    assert begun["settings"] == {"base_url": "http://h"}
    logged = [args[0] for name, args in wandb.calls if name == "log"]
    assert logged == [
        {"rollout/reward_mean": 0.5, "train/loss": 1.0, "rollout/step": 4, "train/step": 9},
        {
            "eval/aime": 0.25,
            "eval/aime-prompts": 3.0,
            "eval/aime-truncated_ratio": 0.5,
            "eval/aime-pass@1": 0.25,
            "eval/aime-pass@2": 0.5,
            "rollout/step": 5,
            "train/step": 10,
        },
    ]
    assert wandb.calls[-1][0] == "finish"
    wandb.calls.clear()
    opened(f"{words} --disable-wandb-random-suffix", tmp_path)
    again = dict(wandb.calls)["init"]
    assert again["id"] == begun["id"] and again["name"] == "g"


@pytest.mark.parametrize(("more", "over"), [("", "rollout/step"), ("--wandb-always-use-train-step", "train/step")])
def test_numbers_are_over_rollouts_or_optimizer_steps(wandb: Wandb, tmp_path: pathlib.Path, more: str, over: str):
    opened(f"--use-wandb {more}", tmp_path)
    assert wandb.calls[-1] == ("define_metric", {"step_metric": over})
    assert "login" not in dict(wandb.calls), "the machine's own"


def test_phases_are_told_from_one_another(wandb: Wandb, tmp_path: pathlib.Path):
    tracked = opened("--use-wandb", tmp_path)
    tracked.rollout(LINE | {"phase": "grpo"})
    tracked.evaluation("grpo", [RESULT], 5, 10)
    named = {key for name, args in wandb.calls if name == "log" for key in args[0]}
    assert {"grpo/rollout/reward_mean", "grpo/train/loss", "grpo/eval/aime"} < named


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("", "RUN/tensorboard"),
        ("--tb-experiment-name e", "RUN/tensorboard/e"),
        ("--tb-project-name DIR/tb --tb-experiment-name e", "DIR/tb/e"),
    ],
)
def test_tensorboard_gets_events_over_rollouts(tensorboard: list[Any], tmp_path: pathlib.Path, words: str, folder: str):
    tracked = opened(f"--use-tensorboard {words.replace('DIR', str(tmp_path))}", tmp_path / "run")
    tracked.rollout(LINE)
    tracked.close()
    (where, event), closed = tensorboard
    assert where == folder.replace("RUN", str(tmp_path / "run")).replace("DIR", str(tmp_path))
    assert event.step == 4 and ("rollout/reward_mean", 0.5) in event.summary and closed == (where, "closed")


def test_one_that_does_not_start_ends_the_command(wandb: Wandb, tmp_path: pathlib.Path):
    wandb.fails = "init"
    with pytest.raises(UsageError, match="--use-wandb could not be started: RuntimeError: no init"):
        opened("--use-wandb", tmp_path)


def test_one_that_fails_later_is_named_once_and_the_other_goes_on(
    wandb: Wandb, tensorboard: list[Any], tmp_path: pathlib.Path
):
    said: list[str] = []
    tracked = opened("--use-wandb --use-tensorboard", tmp_path, said)
    wandb.fails = "log"
    for _ in range(3):
        tracked.rollout(LINE)
    assert len(tensorboard) == 3 and len(said) == 1
    assert said[0] == "W&B failed and gets no more numbers, metrics.jsonl has all: RuntimeError: no log"


def test_the_key_is_written_nowhere():
    resolved = resolve(["--wandb-key", "geheim", "--wandb-key=geheim2", "--use-wandb"])
    assert resolved.slime.wandb_key == "geheim2"
    assert "geheim" not in json.dumps([resume.recorded(resolved), resolved.argv, resolved.warnings])
    assert resolved.argv == ("--wandb-key", own.HIDDEN, f"--wandb-key={own.HIDDEN}", "--use-wandb")
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as shown:
        console.print(render.render(resolved, layout(resolved), None, True))
    assert "geheim" not in shown.get() and own.HIDDEN in shown.get()
