"""An evaluation of 64 prompts x 8 beside asynchronous training, over genuine engines. A recorder between the run and
the router knows every answer. Contracts:

1. all answers of an evaluation are of the one version that its file names, as the engine that gave them says;
2. training continues meanwhile, and the file says how many steps it took;
3. no answer of an evaluation is in a batch or in the account.
"""

import collections
import json

import pyarrow.parquet as pq

from slime_cli.manifests import layout
from slime_cli.tracing.ledger import ledgers
from tests.end_to_end.conftest import HERE, slime
from tests.examples.recorder import Recorder

HELD_OUT = "reasoning-gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=4&min_digits=3&size=64&seed=9"
LENGTH = 9
"""Tokens of an answer of the evaluation: no other request asks for so many."""


def test_an_evaluation_beside_training_is_of_one_version_and_is_never_trained(served, tmp_path):
    run = tmp_path / "run"
    evaluates = ("--eval-prompt-data", "held-out", HELD_OUT, "--n-samples-per-eval-prompt", 8, "--eval-interval", 2)
    evaluates += ("--eval-max-response-len", LENGTH, "--skip-eval-before-train")
    with Recorder(served / layout.ENDPOINT) as recorder:
        endpoint = recorder.endpoint(tmp_path / layout.ENDPOINT)
        words = ("--profile", HERE / "rl.yaml", "--num-rollout", 6, "--run-dir", run, "--rollout-endpoint", endpoint)
        late = ("--schedule", "async", "--max-staleness", 2, "--update-weights-interval", 2)
        done = slime("train", *words, *late, *evaluates)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    answers: collections.Counter[str] = collections.Counter()
    asked = set()
    for body, answer in recorder.turns:
        if body["sampling_params"]["max_new_tokens"] == LENGTH:
            asked.add(tuple(body["input_ids"]))
            for one in answer if isinstance(answer, list) else [answer]:
                answers[one["meta_info"]["weight_version"]] += 1
    found = [json.loads(path.read_text()) for path in layout.evaluations(run)]
    assert [one["step"] for one in found] == [4, 8, 12], "after rollouts 1 and 3, and at the end"
    assert answers == {one["weight_version"]: 512 for one in found} == {f"v{step:06d}": 512 for step in (4, 8, 12)}
    for one in found:
        (result,) = one["results"]
        assert (result["prompts"], result["trajectories"]) == (64, 512) and len(result["pass_at"]) == 4
        assert layout.step_of(one["weight_version"]) == one["step"]
    assert [one["lag"] for one in found][-1] == 0 and max(one["lag"] for one in found) >= 2, "training went on"
    assert "steps behind training" in done.stdout

    prompts = set()
    for folder in layout.rollouts(run):
        for row in pq.read_table(folder / layout.SAMPLES).to_pylist():
            prompts.add(tuple(row["tokens"][: len(row["tokens"]) - row["response_length"]]))
    assert len(asked) == 64 and prompts and not prompts & asked
    (part,) = ledgers(run).values()
    assert part.balanced and part.trained == 6 * 32 and part.dispatched < 512, part
