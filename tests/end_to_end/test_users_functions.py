"""Functions of a user's own over genuine engines: what fails ends the run with the user's line, and a fixed one resumes
it."""

import json

import pyarrow.parquet as pq

from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import TINY, slime

PROMPTS = "reasoning-gym:basic_arithmetic?operators=+&min_terms=2&max_terms=2&max_digits=1&size=50&seed=1"
MINE = """
import functools
import httpx
from transformers import AutoTokenizer

SAID = " Calculate"


@functools.cache
def tokenizer(args_checkpoint):
    return AutoTokenizer.from_pretrained(args_checkpoint)


async def two_turns(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.response, sample.loss_mask, sample.rollout_log_probs = "", [], []
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for turn in range(2):
            body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
            answer = (await client.post(url, json=body)).raise_for_status().json()
            add(sample, answer["output_ids"], 1, [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
            sample.response += answer["text"]
            sample.weight_versions.append(answer["meta_info"]["weight_version"])
            if turn == 0:
                said = tokenizer(args.hf_checkpoint)(SAID)["input_ids"]
                add(sample, said, 0, [0.0] * len(said))
                sample.response += SAID
    return sample


def add(sample, ids, trained, log_probs):
    sample.tokens, sample.response_length = sample.tokens + ids, sample.response_length + len(ids)
    sample.loss_mask += [trained] * len(ids)
    sample.rollout_log_probs += log_probs


def reward(args, sample):
    return float(len(sample.label) / BROKEN)
"""


def test_a_reward_that_always_raises_ends_the_run_and_the_same_command_resumes_it_once_it_is_fixed(served, tmp_path):
    mine = tmp_path / "mine.py"
    run = tmp_path / "run"
    mine.write_text(MINE)
    words = (
        *("train", "--hf-checkpoint", TINY, "--run-dir", run, "--rollout-endpoint", served / "endpoint.json"),
        *(
            "--prompt-data",
            PROMPTS,
            "--apply-chat-template",
            "--rollout-max-response-len",
            4,
            "--num-rollout",
            1,
            "--rollout-batch-size",
            2,
        ),
        *(
            "--n-samples-per-prompt",
            2,
            "--custom-generate-function-path",
            f"{mine}:two_turns",
            "--custom-rm-path",
            f"{mine}:reward",
        ),
        *("--max-groups-without-progress", 3, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 256, "--lr", "1e-3"),
    )
    done = slime(*words)
    line = MINE.split("\n").index("    return float(len(sample.label) / BROKEN)") + 1
    assert done.returncode == 3, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"NameError: name 'BROKEN' is not defined at {mine}:{line}" in done.stdout
    assert f'File "{mine}", line {line}, in reward\n    return float(len(sample.label) / BROKEN)' in done.stdout
    assert done.stdout.count("Traceback") == 1 and "Traceback" not in done.stderr
    assert "not one of 3 groups in a row was of use; lost by reason: reward_error" in done.stderr
    (part,) = ledgers(run).values()
    assert balanced({"train": part}) and part.dropped["reward_error"] in (6, 8) and not part.trained

    mine.write_text(MINE.replace("BROKEN", "2"))
    done = slime(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (part,) = ledgers(run).values()
    assert balanced({"train": part}) and part.trained == 4
    rows = pq.read_table(run / "rollouts" / "000000" / "samples.parquet").to_pylist()
    assert len(rows) == 4 and all(
        0 < sum(row["loss_mask"]) < len(row["loss_mask"]) and " Calculate" in row["response"] for row in rows
    )
    assert json.loads((run / "summary.json").read_text())["logprob_abs_diff_max"] <= 1e-4, (
        "both turns are what the trainer thinks"
    )
