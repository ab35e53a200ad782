"""The tracing benchmark swaps the tracer in every place that records spans."""

import types

from bench.step import tracing


def test_a_traced_step_records_the_spans_of_the_trainer_and_of_its_networks():
    silent = object()
    traced = object()
    policy = types.SimpleNamespace(tracer=silent)
    critic = types.SimpleNamespace(tracer=silent)
    for trainer in (types.SimpleNamespace(tracer=silent, policy=policy, critic=c) for c in (None, critic)):
        places = [place for place in (trainer, policy, trainer.critic) if place is not None]
        with tracing(trainer, traced):
            assert all(place.tracer is traced for place in places)
        assert all(place.tracer is silent for place in places)
