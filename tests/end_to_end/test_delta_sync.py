"""Weights as deltas through genuine engines: a run that is killed and resumed, then versions by hand, and engines that
were spoilt on purpose.

1. Every engine is proven at every version, before and after a kill, and what it computes is what the trainer computes.
2. Requests that no engine can follow are refused, and leave it alive and provable.
3. Weights that are spoilt in the engine are found by the proof, and the next push restores them bit for bit.
"""

import json

import httpx
import pytest

from slime_cli import manifests
from slime_cli.weights import applying
from slime_cli.weights.folder import opened
from tests.end_to_end.conftest import TINY, slime, start
from tests.end_to_end.test_resume import _kill_when, _lines

PROMPTS = (
    "reasoning-gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=1&allow_parentheses=false"
    "&allow_negation=false&size=400&seed=2"
)
WORDS = f"""--hf-checkpoint {TINY} --prompt-data {PROMPTS} --apply-chat-template --rm-type reasoning-gym --num-rollout 6
    --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 --rollout-max-prompt-len 32
    --use-dynamic-batch-size --max-tokens-per-gpu 512 --lr 1e-3 --min-lr 1e-3 --save-interval 2
    --update-weight-mode delta --update-weight-delta-encoding overwrite --update-weights-interval 1""".split()


@pytest.fixture(scope="module")
def run(served, tmp_path_factory):
    """Killed after the second commit, and finished."""
    folder = tmp_path_factory.mktemp("delta")
    words = ("train", *WORDS, "--run-dir", folder / "run", "--rollout-endpoint", served / "endpoint.json")
    _kill_when(start(*words, log=folder / "out.log"), lambda: _lines(folder / "run" / "metrics.jsonl") >= 3)
    done = slime(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run"


def ask(endpoint, path, body):
    url = endpoint.engines[0].url
    return httpx.Client(trust_env=False, timeout=60).post(url + path, json=body)


@pytest.mark.timeout(900)
def test_killed_and_resumed_every_version_is_proven(run):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["engines_verified"] is True
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout_id"] for line in lines] == list(range(6))
    assert max(line["train/train_rollout_logprob_abs_diff_max"] for line in lines) <= 1e-4
    last = opened(run / "weights" / "v000006")
    assert last.manifest.encoding == "overwrite" and len(applying.chain(last)) > 1
    assert last.manifest.patches and all(not tensor.file for tensor in last.manifest.tensors.values())


@pytest.mark.timeout(900)
def test_by_hand_a_delta_is_pushed_refused_requests_harm_nothing_and_spoilt_weights_are_restored(run, served):
    path = served / "endpoint.json"
    endpoint = manifests.read(path, manifests.Endpoint)
    words = ("sync", "push", "--load", run / "weights" / "v000006", "--rollout-endpoint", path)
    done = slime(*words, "--weight-version", "by-delta")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified at by-delta" in done.stdout and "checksum" in done.stdout
    for body in ({"model_path": "/nowhere"}, {"model_path": str(run / "weights" / "v000006")}, {}, {"model_path": 3}):
        answer = ask(endpoint, "/update_weights_from_disk", body)
        assert answer.status_code != 200 or not answer.json()["success"], answer.text
    body = {"input_ids": [10, 11], "sampling_params": {"max_new_tokens": 1}}
    assert ask(endpoint, "/generate", body).status_code == 200, "the engine is alive"
    again = slime(*words, "--weight-version", "by-delta")
    assert again.returncode == 0 and "verified at by-delta" in again.stdout, again.stdout + again.stderr

    assert ask(endpoint, "/weights_checker", {"action": "reset_tensors"}).status_code == 200
    spoilt = slime("sync", "verify", "--rollout-endpoint", path)
    assert spoilt.returncode == 4 and "holds other weights than by-delta" in spoilt.stderr, spoilt.stdout
    done = slime(*words, "--weight-version", "by-delta")
    assert done.returncode == 0 and "engine(s) load by-delta" in done.stdout, done.stdout + done.stderr
    done = slime("sync", "verify", "--rollout-endpoint", path)
    assert done.returncode == 0 and "every tensor's checksum equals the published one" in done.stdout, done.stderr
