"""summary.json from the results of phases: what is added up, and whose engines are told of."""

import io
import json
import types

import pytest
from rich.console import Console

from slime_cli import manifests
from slime_cli.manifests.proof import SHOWN, Proof
from slime_cli.tracing import report
from slime_cli.tracing.report import PhaseResult
from tests.tracing.test_trace import fill_journal, run  # noqa: F401 (a fixture)


def evaluation(step: int, reward: float):
    return {"step": step, "results": [{"dataset": "sums", "reward_mean": reward, "prompts": 16}]}


WARM_UP = PhaseResult(name="sft", policy=False, steps=8, seconds=10.04)
RL = PhaseResult(
    name="grpo",
    policy=True,
    steps=6,
    seconds=20.0,
    weight_version="v000006",
    evaluations=[evaluation(0, 0.25), evaluation(3, 0.5), evaluation(6, 0.875)],
    proofs=[Proof("http://e:1", "v000006", "checksum", 30), Proof("http://e:2", "v000006", "agreement", 30)],
)


def endpoint() -> manifests.Endpoint:
    facts = dict(model="m", owner_pid=1, owner_host="h", created=0.0)
    return manifests.Endpoint(router_url="http://r", engines=[], engine_name="sglang", engine_version="0.5", **facts)


def test_steps_and_seconds_are_all_phases_and_the_rest_is_the_policy_s(run):  # noqa: F811
    with open(run / "metrics.jsonl", "w") as file:
        for rollout_id, worst in enumerate([2e-6, 5e-6, 1e-6]):
            line = {"rollout_id": rollout_id, "train/train_rollout_logprob_abs_diff_max": worst}
            file.write(json.dumps(line) + "\n")
    summary = report.summarize(run, [WARM_UP, RL], endpoint())
    assert json.loads((run / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert (summary["steps"], summary["steps_by_phase"], summary["seconds"]) == (14, {"sft": 8, "grpo": 6}, 30.0)
    assert (summary["reward_before"], summary["reward_after"], summary["eval_prompts"]) == (0.25, 0.875, 16)
    assert summary["logprob_abs_diff_max"] == 5e-6 and summary["weight_version"] == "v000006"
    assert summary["rollout"] == {"name": "sglang", "version": "0.5"}
    assert summary["engines_verified"] == "agreement", "one of two engines was compared with the other only"
    assert [proof["engine"] for proof in summary["verification"]] == ["http://e:1", "http://e:2"]
    assert summary["ledger"]["balanced"] and summary["ledger"]["total"]["trained"] == 4


def test_a_supervised_run_has_neither_rewards_nor_engines(tmp_path):
    fill_journal(tmp_path / "journal.sqlite")
    summary = report.summarize(tmp_path, [WARM_UP], None)
    absent = ("reward_before", "reward_after", "rollout", "logprob_abs_diff_max", "weight_version", "engines_verified")
    assert {summary[name] for name in absent} == {None} and "verification" not in summary
    assert summary["steps"] == 8


@pytest.mark.parametrize(("kind", "verdict"), [("checksum", True), ("agreement", "agreement"), ("version", None)])
def test_the_screen_says_what_was_shown_of_each_engine(tmp_path, monkeypatch, kind, verdict):
    monkeypatch.setattr(report, "metric_lines", lambda run_dir: [])
    monkeypatch.setattr(
        report,
        "ledgers",
        types.SimpleNamespace(ledgers=lambda d: {}, total=lambda d: 0, sentence=lambda *a: "", balanced=lambda d: True),
    )
    out = io.StringIO()
    summary = {
        "engines_verified": verdict,
        "verification": [{"engine": "http://e:1", "version": "v1", "kind": kind, "tensors": 2}],
    }
    report.show(Console(file=out, width=200), tmp_path, summary)
    assert SHOWN[kind] in out.getvalue() and "http://e:1" in out.getvalue()
