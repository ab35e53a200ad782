"""The stages by hand, each its own process, over one pair of genuine engines."""

import json

import httpx
import pyarrow.parquet as pq

from slime_cli import manifests
from tests.end_to_end.conftest import SMALL, slime


def test_a_run_accounts_for_every_sample_and_proves_its_weights(trained):
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["trainer"]["name"] == "megatron-core" and summary["rollout"]["name"] == "sglang"
    assert summary["steps_by_phase"] == {"sft": 8, "grpo": 10}
    assert summary["weight_version"] == "v000010" and summary["engines_verified"] is True
    assert {v["kind"] for v in summary["verification"]} == {"checksum"}
    assert summary["logprob_abs_diff_max"] <= 1e-4
    ledger = slime("trace", "ledger", trained, "--json")
    assert ledger.returncode == 0, ledger.stdout
    rows = pq.read_table(trained / "grpo" / "rollouts" / "000004" / "samples.parquet").to_pylist()
    assert len(rows) == 32 and all(len(r["rollout_log_probs"]) == r["response_length"] for r in rows)
    manifest = manifests.read(trained / "grpo" / "rollouts" / "000004" / "manifest.json", manifests.Rollout)
    assert manifest.weight_versions == ["v000008"] and manifest.fates == {"batched": 32}


def test_the_same_command_again_shows_the_result_and_other_options_are_refused(trained, served):
    words = ("train", "--profile", SMALL, "--run-dir", trained, "--rollout-endpoint", served / "endpoint.json")
    again = slime(*words)
    assert again.returncode == 0 and "finished" in again.stdout
    other = slime(*words, "--eps-clip", "0.3")
    assert other.returncode == 2 and "--eps-clip was 0.2, now 0.3" in other.stderr


def test_trace_and_profile_read_the_run(trained, tmp_path):
    summary = slime("trace", trained)
    assert summary.returncode == 0 and "grpo" in summary.stdout and "conductor" not in summary.stderr
    out = tmp_path / "trace.json"
    assert slime("trace", "export", trained, "-o", out).returncode == 0
    assert len(json.loads(out.read_text())["traceEvents"]) > 50
    budget = slime("profile", "step", trained, "--json")
    assert budget.returncode == 0, budget.stderr
    assert sum(p["permille"] for p in json.loads(budget.stdout)["parts"]) == 1000
    why = slime("trace", "why", trained, "3", "--phase", "grpo")
    assert why.returncode == 0 and "TRAINED" in why.stdout


def test_sync_puts_a_checkpoint_into_running_engines_and_proves_it(trained, served):
    checkpoint = sorted((trained / "grpo" / "checkpoints").glob("iter_*"))[-1]
    done = slime(
        "sync", "--load", checkpoint, "--rollout-endpoint", served / "endpoint.json", "--weight-version", "by-hand"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified at by-hand" in done.stdout and "checksum" in done.stdout
    endpoint = manifests.read(served / "endpoint.json", manifests.Endpoint)
    body = {"input_ids": [10, 11], "sampling_params": {"max_new_tokens": 1}}
    answer = httpx.Client(trust_env=False, timeout=60).post(endpoint.router_url + "/generate", json=body).json()
    assert answer["meta_info"]["weight_version"] == "by-hand"


def test_engines_write_a_profile_through_the_router(served, tmp_path):
    done = slime("profile", "engines", served / "endpoint.json", "-o", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob("*.trace.json*"))
