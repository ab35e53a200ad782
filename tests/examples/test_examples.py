"""examples/ over genuine engines and a genuine trainer, one rollout each. Contracts, by a recorder between the run and
the router, which knows what the engines were asked and what they answered:

1. every trained run of tokens is one answer of an engine: its ids, its log-probabilities, its version, behind the very
ids that the engine was asked to continue;
2. every other token has the loss mask 0 and the log-probability 0, and is the text that a tool gave;
3. the trainer computes the same log-probabilities; every trajectory is accounted for.
"""

import itertools
import json
import pathlib

import pyarrow.parquet as pq
import pytest
import yaml

from slime_cli.manifests import layout
from slime_cli.models import tokens
from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import TINY, slime
from tests.examples.recorder import Recorder

pytestmark = pytest.mark.engine
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SUMS = "reasoning-gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=1&size=50&seed=1"
LETTERS = list("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
MARKS = {"calculator_open": [""], "calculator_close": LETTERS, "retrieval_close": LETTERS}
"""A model of random weights writes no ``<<2+3>>``: any letter ends its call."""


def phase(name: str, reward: str | None, **data: object) -> dict:
    given = {"custom_generate_function_path": f"{EXAMPLES / name}.py:generate", **data}
    given |= {"custom_rm_path": f"{EXAMPLES / name}.py:{reward}"} if reward else {}
    return {"name": name, "slime": given}


def profile(folder: pathlib.Path) -> pathlib.Path:
    (folder / "marks.yaml").write_text(yaml.safe_dump(MARKS))
    common = dict(num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_response_len=64)
    common |= dict(use_dynamic_batch_size=True, max_tokens_per_gpu=1024, custom_config_path=str(folder / "marks.yaml"))
    questions = dict(prompt_data=str(EXAMPLES / "data" / "questions.jsonl"), input_key="question", label_key="answer")
    phases = [
        phase("calculator", "reward", prompt_data=SUMS),
        phase("retrieval", "reward", **questions),
        phase("solver_and_critic", None, prompt_data=SUMS),
    ]
    path = folder / "examples.yaml"
    path.write_text(yaml.safe_dump({"slime": common, "megatron": {"lr": 1e-3}, "phases": phases}))
    return path


@pytest.fixture(scope="module")
def run(served: pathlib.Path, tmp_path_factory: pytest.TempPathFactory):
    """The run's folder, and what the engines were asked and answered."""
    folder = tmp_path_factory.mktemp("examples")
    with Recorder(served / layout.ENDPOINT) as recorder:
        endpoint = recorder.endpoint(folder / layout.ENDPOINT)
        words = ("--profile", profile(folder), "--hf-checkpoint", TINY, "--run-dir", folder / "run")
        done = slime("train", *words, "--rollout-endpoint", endpoint)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run", recorder.turns


def samples(folder: pathlib.Path) -> list[dict]:
    return pq.read_table(layout.rollout(folder, 0) / layout.SAMPLES).to_pylist()


def runs_of(row: dict) -> list[tuple[int, int, int]]:
    """(trained, begin, end) of consecutive response tokens, by their place among all tokens."""
    at = len(row["tokens"]) - row["response_length"]
    found = []
    for trained, part in itertools.groupby(row["loss_mask"]):
        length = len(list(part))
        found.append((trained, at, at + length))
        at += length
    return found


def answered(turns: list) -> dict[tuple[int, ...], tuple[list[int], list[float], str]]:
    """What was asked to be continued, with what came back -> ids, their log-probabilities and the version."""
    out = {}
    for body, answer in turns:
        for one in answer if isinstance(answer, list) else [answer]:
            scored = one["meta_info"]["output_token_logprobs"]
            ids = [token for _, token, *_ in scored]
            out[(*body["input_ids"], *ids)] = ids, [value for value, *_ in scored], one["meta_info"]["weight_version"]
    return out


@pytest.mark.parametrize("name", ["calculator", "retrieval", "solver_and_critic"])
def test_what_is_trained_is_what_the_engines_answered_and_nothing_else(run, served, name):
    folder, turns = run
    known = answered(turns)
    tokenizer = tokens.load(str(served / "model"))
    rows = samples(folder / name)
    said = 0
    for row in rows:
        first = len(row["tokens"]) - row["response_length"]
        assert any(row["loss_mask"]) and len(row["rollout_log_probs"]) == row["response_length"]
        versions = [span["version"] for span in row["spans"] for _ in range(span["length"])]
        for trained, begin, end in runs_of(row):
            log_probs = row["rollout_log_probs"][begin - first : end - first]
            if trained:
                ids, sampled, version = known[tuple(row["tokens"][:end])]
                assert ids == row["tokens"][begin:end]
                assert log_probs == pytest.approx(sampled, rel=1e-6) and max(log_probs) < 0
                assert set(versions[begin - first : end - first]) == {version}
            else:
                text = tokenizer.decode(row["tokens"][begin:end])
                assert set(log_probs) == {0.0} and set(versions[begin - first : end - first]) == {None}
                assert text in row["response"] and text.startswith((" = ", "\n<result>"))
                said += 1
    if name == "solver_and_critic":
        assert said == 0 and all(set(row["loss_mask"]) == {1} for row in rows)
    else:
        assert said >= 4, "tools were called"


def test_agents_are_siblings_and_the_critic_reads_the_ids_that_the_solver_wrote(run):
    folder, _ = run
    rows = samples(folder / "solver_and_critic")
    for _, group in itertools.groupby(rows, key=lambda row: row["index"]):
        solver, critic, revised = sorted(group, key=lambda row: row["part"])
        roles = [json.loads(row["metadata"])["role"] for row in (solver, critic, revised)]
        assert roles == ["solver", "critic", "revised"]
        wrote = solver["tokens"][-solver["response_length"] :]
        for row in (critic, revised):
            prompt = row["tokens"][: len(row["tokens"]) - row["response_length"]]
            assert any(prompt[i : i + len(wrote)] == wrote for i in range(len(prompt)))
        assert revised["tokens"][: len(critic["tokens"])] == critic["tokens"]
        assert {json.loads(row["reward"]) for row in (solver, critic, revised)} <= {0.0, 1.0}
    assert len({row["index"] for row in rows}) == 4 and len(rows) == 12


def test_the_account_balances_and_the_trainer_agrees(run):
    folder, _ = run
    found = ledgers(folder)
    assert balanced(found) and {name: part.trained for name, part in found.items()} == {
        "calculator": 4,
        "retrieval": 4,
        "solver_and_critic": 4,
    }
    assert json.loads((folder / layout.SUMMARY).read_text())["logprob_abs_diff_max"] <= 1e-4
