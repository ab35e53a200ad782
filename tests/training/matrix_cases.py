"""The rows of ``bench/layouts.py``: every model with every estimator, in layouts of four and eight ranks and in one
process; and checkpoints of one layout resumed in another. Runs in ``layout_worker.py``, beside ``layout_cases.py``."""

import dataclasses
import pathlib

import msgspec
import torch

from bench.layouts import SAVING, SINGLE, WHOLE
from checkpoint_cases import DISTRIBUTED, gap
from layout_cases import CASES, MANIFEST, SMALL, Session, global_batch
from slime_cli.manifests import layout
from slime_cli.options.estimators import ESTIMATORS
from slime_cli.training.trainer import Trainer

CHECKPOINTS = {"experts": "moe", "latent": "latent"}
"""Model of a row -> checkpoint; a dense one is the estimator's of ``layout_cases.CASES``, tied or untied."""
ROWS = {
    f"{model}_{estimator}": (
        CHECKPOINTS.get(model) or str(CASES[estimator][0]),
        dataclasses.replace(CASES[estimator][1], max_tokens=SMALL),
    )
    for model in ("dense", *CHECKPOINTS)
    for estimator in ESTIMATORS
}
"""Many packs each, so that pipelines and data-parallel ranks have several micro-batches."""


def row(session: Session, case: str) -> dict:
    """A job's case: ``MODEL_ESTIMATOR`` is two rollouts from the model; with ``@saving`` their checkpoint as well, and
    in one process two rollouts more; with ``@LAYOUT`` these two from that layout's checkpoint. ``@whole`` at the end:
    without the distributed optimizer."""
    case, *how = case.split("@")
    if not how:
        return trained(session, case)
    told = Told(session, case, WHOLE in how)
    return saving(told) if how[0] == SAVING else resumed(told, how[0])


def trained(session: Session, case: str) -> dict:
    name, settings = ROWS[case]
    trainer = session.trainer(name, settings, [])
    before = exported(session, name, trainer)
    return found(session, case, trainer, before, session.folder / f"{case}.weights", session.layout == SINGLE)


@dataclasses.dataclass(frozen=True)
class Told:
    """A job that saves or resumes."""

    session: Session
    case: str
    whole: bool

    def trainer(self, load: bool) -> Trainer:
        return self.session.trainer(*ROWS[self.case], [] if self.whole else DISTRIBUTED, load=load)

    def folder(self, saved_in: str) -> pathlib.Path:
        return self.session.folder / f"{saved_in}.{self.case}{'.whole' * self.whole}"

    def found(self, trainer: Trainer, leaves: bool = False) -> dict:
        file = self.folder(SINGLE).with_suffix(".weights_at_four")
        before = exported(self.session, ROWS[self.case][0], trainer)
        return found(self.session, self.case, trainer, before, file, leaves)


def saving(told: Told) -> dict:
    trainer = told.trainer(load=True)
    for _ in range(2):
        trainer.train(global_batch())
    root = told.folder(told.session.layout)
    root.mkdir(exist_ok=True)
    path = trainer.save(str(root), msgspec.structs.replace(MANIFEST, iteration=trainer.step))
    if told.session.layout != SINGLE:
        return {}
    out = told.found(trainer, leaves=True)
    started = told.trainer(load=False)
    started.load(str(path), weights_only=True)
    return out | {"without_moments": told.found(started)["weights_gap"]}


def resumed(told: Told, saved_in: str) -> dict:
    trainer = told.trainer(load=False)
    step = 2 * ROWS[told.case][1].num_steps_per_rollout
    assert trainer.load(str(layout.checkpoint(told.folder(saved_in), step)), weights_only=False) == step
    return told.found(trainer)


def found(
    session: Session, case: str, trainer: Trainer, before: dict[str, torch.Tensor], file: pathlib.Path, leaves: bool
) -> dict:
    """Two rollouts: metrics on the rank that reports, and on every rank how far all weights are from one process's
    (which ``leaves`` them in ``file``), and how far that moved them."""
    metrics = [trainer.train(global_batch()) for _ in range(2)]
    weights = exported(session, ROWS[case][0], trainer)
    if leaves:
        torch.save(weights, file)
    alone = torch.load(file)
    gaps = {"weights_gap": gap(weights, alone), "moved": gap(before, alone)}
    return {"metrics": metrics if metrics[0] else None} | gaps


def exported(session: Session, name: str, trainer: Trainer) -> dict[str, torch.Tensor]:
    """All weights, whole, by their names in an HF checkpoint; every rank asks at once."""
    return {key: tensor.clone() for key, tensor in session.bridge(name).export(trainer.policy.model)}
