"""``--use-wandb`` and ``--use-tensorboard``: the numbers of ``metrics.jsonl`` and of evaluations, elsewhere too.

:class:`slime_cli.run.Run` opens them before anything else and closes them last. Invariants: a library is imported only
where its option is given, and one that is missing or refuses to start ends the command before the run has begun; one
that fails later is named once and left alone, for the run's own files hold every number.
"""

import hashlib
import importlib.util
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from slime_cli.errors import UsageError
from slime_cli.manifests import layout
from slime_cli.options.groups import SlimeOptions

Say = Callable[[str], None]
Step = Literal["rollout", "train"]
LIBRARIES = {"use_wandb": "wandb", "use_tensorboard": "tensorboard"}
"""Option -> the package that it needs."""
AXES = ("rollout_id", "step")
"""Numbers of a line that others are shown over."""
SUFFIX = 6


class Tracker(Protocol):
    """Where numbers go."""

    name: str

    def log(self, values: Mapping[str, float], rollout: int, step: int) -> None:
        """``step``: optimizer steps so far."""
        ...

    def close(self) -> None: ...


def require(s: SlimeOptions) -> None:
    """Raises UsageError for a library that an option needs and this environment lacks."""
    for option, package in LIBRARIES.items():
        if getattr(s, option) and importlib.util.find_spec(package) is None:
            flag = f"--{option.replace('_', '-')}"
            fix = f"pip install {package}, or leave it out: metrics.jsonl has every number"
            raise UsageError(f"{flag}: the package {package} is not installed", fix)


class Trackers:
    """All that a run has; none is usual."""

    def __init__(self, trackers: list[Tracker], say: Say) -> None:
        self._trackers = trackers
        self._say = say

    @classmethod
    def open(cls, s: SlimeOptions, run_dir: pathlib.Path, config: Mapping[str, Any], say: Say) -> "Trackers":
        """``config``: the options, as ``run.json`` has them."""
        require(s)
        found: list[Tracker] = []
        if s.use_wandb:
            found.append(_started("--use-wandb", lambda: Wandb(s, run_dir, config)))
        if s.use_tensorboard:
            found.append(_started("--use-tensorboard", lambda: TensorBoard(s, run_dir)))
        return cls(found, say)

    def rollout(self, line: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        phase = "" if line["phase"] == "train" else f"{line['phase']}/"
        numbers = {name: value for name, value in line.items() if _is_number(value) and name not in AXES}
        values = {f"{phase}{_named(name)}": float(value) for name, value in numbers.items()}
        self._log(values, line["rollout_id"], line["step"])

    def evaluation(self, phase: str, results: list[dict[str, Any]], rollout: int, step: int) -> None:
        """Figures of an evaluation's sets."""
        before = "" if phase == "train" else f"{phase}/"
        values = {}
        for result in results:
            name = f"{before}eval/{result['dataset']}"
            values[name] = result["reward_mean"]
            more = {key: value for key, value in result.items() if key != "reward_mean" and _is_number(value)}
            values |= {f"{name}-{key}": float(value) for key, value in more.items()}
            values |= {f"{name}-pass@{k}": rate for k, rate in result["pass_at"].items()}
        self._log(values, rollout, step)

    def close(self) -> None:
        for tracker in self._trackers:
            self._guarded(tracker, tracker.close)
        self._trackers = []

    def _log(self, values: dict[str, float], rollout: int, step: int) -> None:
        for tracker in list(self._trackers):
            if not self._guarded(tracker, lambda tracker=tracker: tracker.log(values, rollout, step)):
                self._trackers.remove(tracker)

    def _guarded(self, tracker: Tracker, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # whatever a library or its server does: the run has its own files
            self._say(f"{tracker.name} failed and gets no more numbers, metrics.jsonl has all: {_said(error)}")
            return False
        return True


class Wandb:
    """One run there for a run directory, however often that is resumed."""

    name = "W&B"

    def __init__(self, s: SlimeOptions, run_dir: pathlib.Path, config: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._over: Step = "train" if s.wandb_always_use_train_step else "rollout"
        if s.wandb_key and s.wandb_mode in (None, "online"):
            wandb.login(key=s.wandb_key, host=s.wandb_host)
        settings = {"base_url": s.wandb_host} if s.wandb_host else {}
        run_id = s.wandb_run_id or hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]
        name = s.wandb_group
        if name and s.wandb_random_suffix:
            name = f"{name}_{run_id[:SUFFIX]}"
        self._run = wandb.init(
            project=s.wandb_project,
            entity=s.wandb_team,
            group=s.wandb_group,
            name=name or run_dir.name,
            id=run_id,
            resume="allow",
            dir=s.wandb_dir or str(run_dir),
            mode=s.wandb_mode,
            config=dict(config),
            settings=wandb.Settings(**settings),
        )
        self._run.define_metric(f"{self._over}/step")
        self._run.define_metric("*", step_metric=f"{self._over}/step")

    def log(self, values: Mapping[str, float], rollout: int, step: int) -> None:
        self._run.log({**values, "rollout/step": rollout, "train/step": step})

    def close(self) -> None:
        self._run.finish()


class TensorBoard:
    """Files of events over rollouts; without torch."""

    name = "TensorBoard"

    def __init__(self, s: SlimeOptions, run_dir: pathlib.Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer import event_file_writer  # pyright: ignore[reportMissingImports]

        folder = pathlib.Path(s.tb_project_name or run_dir / layout.TENSORBOARD) / (s.tb_experiment_name or "")
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._writer = event_file_writer.EventFileWriter(str(folder))

    def log(self, values: Mapping[str, float], rollout: int, step: int) -> None:
        found = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        event = self._event(wall_time=time.time(), step=rollout, summary=self._summary(value=found))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _started(flag: str, make: Callable[[], Tracker]) -> Tracker:
    try:
        return make()
    except Exception as error:  # no key, no server, no such project: whatever the library says
        fix = "put right what it says, or leave it out: metrics.jsonl has every number"
        raise UsageError(f"{flag} could not be started: {_said(error)}", fix) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _named(name: str) -> str:
    """As slime's charts group them: what is no number of training is one of the rollout."""
    return name if "/" in name else f"rollout/{name}"


NONE = Trackers([], lambda text: None)
"""For a run without trackers."""
