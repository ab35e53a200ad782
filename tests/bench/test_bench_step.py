"""The tracing benchmark swaps the tracer of the trainer, which is the only one that records a step's spans."""

import types

import pytest

from bench.step import tracing


def test_a_traced_step_has_its_own_tracer_and_gives_the_other_one_back_whatever_happens():
    silent = object()
    traced = object()
    trainer = types.SimpleNamespace(tracer=silent)
    with pytest.raises(ZeroDivisionError), tracing(trainer, traced):
        assert trainer.tracer is traced
        raise ZeroDivisionError
    assert trainer.tracer is silent
