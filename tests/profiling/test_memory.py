"""Memory by phase: which spans count for what, and what is predicted with and without offload."""

import json

import pytest

from slime_cli.options import memory_phases
from slime_cli.options.resolve import resolve
from slime_cli.profiling import memory
from slime_cli.tracing.spans import TraceSpan

GIB = 2**30


def span(name, ts, dur, process="trainer-0", phase=None, **args):
    return TraceSpan(name=name, ts=ts, dur=dur, process=process, id=int(ts * 10), phase=phase, args=args)


def test_each_span_counts_for_its_phase_in_the_steps_of_the_runs_phase():
    spans = [
        span("wait_for_engines", 0, 1, "conductor", engines=[{"weights": 5, "kv_cache": 7}, {"weights": 4}]),
        span("step", 2, 10, "conductor", "sft"),
        span("forward_backward", 3, 1, peak_bytes=900),
        span("step", 20, 10, "conductor", "grpo"),
        span("log_probs", 21, 1, peak_bytes=30),
        span("ref_log_probs", 22, 1, peak_bytes=40),
        span("forward_backward", 23, 1, peak_bytes=50),
        span("forward_backward", 23, 1, "trainer-1", peak_bytes=60),
        span("optimizer", 24, 1, peak_bytes=55),
        span("export", 25, 1, peak_bytes=20),
        span("offload", 26, 1, parts=["gradients", "optimizer"], held_bytes=70),
        span("offload", 27, 1, parts=["weights"], held_bytes=3),
        span("export", 40, 1, peak_bytes=1000),  # after the last step
    ]
    assert memory.measured(spans, "grpo") == {
        "generate": {"engine": 12, "trainer": 3},
        "log_probs": {"trainer": 40},
        "train": {"trainer": 60},
        "publish": {"trainer": 20},
    }
    assert memory.measured(spans, "sft") == {"generate": {"engine": 12}, "train": {"trainer": 900}}
    assert memory.measured([], "grpo") == {}


MODEL = """--num-layers 28 --hidden-size 1024 --num-attention-heads 16 --num-query-groups 8 --kv-channels 128
    --ffn-hidden-size 3072 --vocab-size 151936 --swiglu --bf16""".split()
RUN = """--hf-checkpoint m --prompt-data p --rollout-batch-size 4 --num-rollout 1 --rollout-max-response-len 8
    --use-dynamic-batch-size --max-tokens-per-gpu 16384 --colocate --sglang-mem-fraction-static 0.5""".split()


def plan(*more, device_bytes=100 * GIB):
    found = memory_phases.predicted(resolve([*RUN, *MODEL, *more]), device_bytes=device_bytes)
    assert found is not None
    return found


def test_without_offload_both_sides_are_there_always():
    found = plan()
    for sides in found.values():
        assert {"weights", "gradients", "optimizer"} <= sides["trainer"].keys()
        assert sum(sides["engine"].values()) == pytest.approx(50 * GIB, rel=0.01)
    assert found["train"]["trainer"]["activations"] > 20 * found["log_probs"]["trainer"]["activations"]


def test_with_offload_one_side_at_a_time_and_both_sides_weights_in_between():
    found = plan("--offload")
    assert found["generate"]["trainer"] == {} and set(found["generate"]["engine"]) == {"weights", "kv_cache"}
    assert found["train"]["engine"] == {} == found["log_probs"]["engine"]
    assert set(found["publish"]["trainer"]) == {"weights"} == set(found["publish"]["engine"])


def test_activations_of_a_dense_layer():
    """Counted by hand: 3 h; queries, keys and values, twice, and attention's output; 3 f. In bfloat16."""
    tokens, h, q, kv, f = 16384, 1024, 16 * 128, 8 * 128, 3072
    by_hand = tokens * 2 * (3 * h + 3 * q + 3 * kv + 3 * f)
    found = plan()["train"]["trainer"]["activations"]
    assert found == pytest.approx(28 * by_hand, rel=0.01)
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    assert plan(*full)["train"]["trainer"]["activations"] == pytest.approx(28 * tokens * h * 2 + by_hand, rel=0.01)


def test_an_engine_without_a_share_of_its_own_says_no_cache():
    argv = [word for word in [*RUN, *MODEL] if word not in ("--sglang-mem-fraction-static", "0.5")]
    found = memory_phases.predicted(resolve(argv), device_bytes=100 * GIB)
    assert found is not None and set(found["generate"]["engine"]) == {"weights"}


def test_a_plan_is_shown_beside_what_was_measured():
    predicted = json.loads(json.dumps(plan("--offload")))
    text = str(list(memory.table("t", predicted, {"train": {"trainer": 3 * GIB}}).columns[3].cells))
    assert "3.00 GiB" in text
    assert memory.as_json(predicted, {"train": {"trainer": 7}})["train"]["trainer"]["measured"] == 7
