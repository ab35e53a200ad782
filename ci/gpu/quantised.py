"""Engines of quantised weights: versions go in, in the checkpoint's format, and come out as a fresh engine has them.

``python -m ci.gpu.quantised FOLDER [--formats NAME ...] [--runs NAME ...]`` (a new folder; 5 minutes or so on an H200,
by how many start at once) makes two random models of one shape, A and B, dense and a mixture of experts, and for each
format (:data:`FORMATS`) converts both with ``slime convert`` and starts ``slime serve-rollout`` of A, all at once.
``slime sync push`` sends each engine B, A again and B again; after each, log-probabilities of fixed prompts are asked.
It prints a JSON line a format: ``back`` is the largest difference between A's first answers, those of a fresh engine,
and those after A came back, ``again`` the same between both times of B (both are 0 where nothing is lost), ``moved``
the mean difference between A and B. Beside them ``slime train`` runs on the checkpoints of ``--runs``, colocated:
``gap`` is the mean difference of log-probabilities between trainer and engine, rollout by rollout. It ends with exit
code 1 when ``back`` or ``again`` is above the bound, nothing moved, or a run failed.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx

from ci.gpu import common

DENSE = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
)
DENSE["max_position_embeddings"] = 4096
EXPERTS = DENSE | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512)
FORMATS = {
    "fp8-block": ("qwen3", "hf-to-fp8"),
    "fp8-channel": ("qwen3", "hf-to-fp8 --strategy channel"),
    "fp8-tensor": ("qwen3", "hf-to-fp8 --strategy tensor"),
    "int4": ("qwen3", "hf-to-int4"),
    "int4-zeros": ("qwen3", "hf-to-int4 --group-size 128 --asymmetric"),
    "moe-fp8-block": ("qwen3_moe", "hf-to-fp8"),
    "moe-fp8-channel": ("qwen3_moe", "hf-to-fp8 --strategy channel"),
    "moe-int4": ("qwen3_moe", "hf-to-int4"),
}
"""Kind of the model, and the words of ``slime convert`` that make its checkpoint."""
BOUND = 2e-2
"""Nats: what other batches of the same kernels make of bfloat16."""
PROMPTS = [[random.Random(seed).randrange(3, 250) for _ in range(48)] for seed in range(8)]
ENGINE = ["--sglang-mem-fraction-static", "0.4", "--sglang-max-total-tokens", "8192", "--sglang-cuda-graph-max-bs", "8"]
"""The fraction is of what is free at an engine's start, and others start meanwhile; the tokens are what it takes."""
RUN = "--num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 64 --lr 1e-6".split()
RUN += ["--entropy-coef", "0.01"]  # a random model earns no reward
ENVIRONMENT = os.environ | {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
"""DeepGEMM, where it is installed, would compile for minutes what these prompts don't need."""
PATIENCE = 400.0
"""Seconds from the check's start within which every engine must be there: what it waits for then is shown."""
STARTED = time.monotonic()


@dataclasses.dataclass
class Engine:
    """``slime serve-rollout`` of a checkpoint, which may still be starting."""

    run: pathlib.Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, model: pathlib.Path, run: pathlib.Path) -> "Engine":
        words = ["serve-rollout", "--hf-checkpoint", str(model), "--run-dir", str(run), *ENGINE]
        with open(run.with_suffix(".log"), "wb") as log:
            return cls(run, subprocess.Popen(common.slime(*words), stdout=log, stderr=log, env=ENVIRONMENT))

    @property
    def endpoint(self) -> pathlib.Path:
        return self.run / "endpoint.json"

    def url(self) -> str:
        """Waits for it."""
        while not self.endpoint.exists():
            if self.process.poll() is not None or time.monotonic() > STARTED + PATIENCE:
                raise RuntimeError(f"not there after {time.monotonic() - STARTED:.0f} s")
            time.sleep(0.5)
        return json.loads(self.endpoint.read_text())["engines"][0]["url"]

    def push(self, model: pathlib.Path, name: str) -> list[str]:
        """The checkpoint into the engine; what the command said of the proof."""
        words = ["sync", "push", "--load", str(model), "--rollout-endpoint", str(self.endpoint)]
        done = subprocess.run(common.slime(*words, "--weight-version", name), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{done.stdout[-800:]}{done.stderr[-800:]}")
        return [line for line in done.stdout.splitlines() if "verified" in line]

    def logs(self) -> list[str]:
        """The last lines of the command and of its engine."""
        paths = [self.run.with_suffix(".log"), *sorted(self.run.glob("logs/engine-*.log"))]
        return [line[:300] for path in paths for line in path.read_text(errors="replace").splitlines()[-15:]]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


def log_probs(url: str) -> list[float]:
    """Log-probabilities of every token of the prompts, one request at a time, without a prefix cache."""
    found = []
    for prompt in PROMPTS:
        httpx.post(f"{url}/flush_cache", timeout=60, trust_env=False)
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = httpx.post(f"{url}/generate", json=body, timeout=300, trust_env=False).raise_for_status().json()
        meta = answer["meta_info"]
        found += [entry[0] for entry in [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]]
    return found


def _most(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _mean(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def models(folder: pathlib.Path, kinds: Sequence[str]) -> None:
    """``KIND-a`` and ``KIND-b`` in bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    from slime_cli.models import tiny

    for kind in dict.fromkeys(kinds):
        shape = EXPERTS if kind == "qwen3_moe" else DENSE
        more = shape | dict(initializer_range=0.05)
        made = tiny.make(f"tiny:{kind}?" + "&".join(f"{k}={v}" for k, v in more.items()), folder / f"{kind}-a")
        other = folder / f"{kind}-b"
        other.mkdir()
        for path in pathlib.Path(made).iterdir():
            if path.suffix != ".safetensors":
                (other / path.name).write_bytes(path.read_bytes())
                continue
            a = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
            torch.manual_seed(7)
            b = {name: (t.float() + 0.03 * torch.randn(t.shape)).to(torch.bfloat16) for name, t in a.items()}
            save_file(a, path, metadata={"format": "pt"})
            save_file(b, other / path.name, metadata={"format": "pt"})


@functools.cache
def converted(folder: pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
    kind, words = FORMATS[name]
    out = []
    for which in "ab":
        save = folder / f"{name}-{which}"
        command = ["convert", *words.split(), "--hf-checkpoint", str(folder / f"{kind}-{which}"), "--save", str(save)]
        done = subprocess.run(common.slime(*command), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
        out.append(save)
    return out[0], out[1]


def check(name: str, folder: pathlib.Path) -> bool:
    """One format from conversion to answers."""
    engines: list[Engine] = []
    try:
        a, b = converted(folder, name)
        started = time.monotonic()
        engines.append(engine := Engine.start(a, folder / f"serve-{name}"))
        url = engine.url()
        ready = time.monotonic() - started
        answers = [log_probs(url)]
        proofs, seconds = [], []
        for version, model in (("B", b), ("A", a), ("B2", b)):
            started = time.monotonic()
            proofs += engine.push(model, version)
            seconds.append(time.monotonic() - started)
            answers.append(log_probs(url))
        found = {
            "back": _most(answers[0], answers[2]),
            "again": _most(answers[1], answers[3]),
            "moved": _mean(answers[0], answers[1]),
        }
        held = max(found["back"], found["again"]) <= BOUND < found["moved"]
        common.say("format", name=name, held=held, **found, ready_s=ready, push_s=max(seconds), proofs=proofs[:1])
        return held
    except Exception as error:  # one format's failure must not hide the others' figures
        said = f"{type(error).__name__}: {error}"[-2000:]
        common.say("format", name=name, held=False, error=said, logs=[engine.logs() for engine in engines])
        return False
    finally:
        for engine in engines:
            engine.stop()


def run(name: str, folder: pathlib.Path) -> bool:
    """``slime train`` on a checkpoint of the format; its weights change at every step."""
    model, _ = converted(folder, name)
    path = folder / f"run-{name}"
    words = ["--profile", "gpu-synthetic", "--hf-checkpoint", str(model), *RUN]
    if common.train(path, *words):
        return False
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    verified = json.loads((path / "summary.json").read_text())["engines_verified"]
    gaps = [line["train/train_rollout_logprob_abs_diff"] for line in lines]
    common.say("run", name=name, gap=gaps, engines_verified=verified, sync_s=common.spans(path, "sync"))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=[*FORMATS])
    parser.add_argument("--runs", nargs="*", default=["fp8-block", "int4"], choices=[*FORMATS])
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    models(folder, [FORMATS[name][0] for name in (*args.formats, *args.runs)])
    for name in dict.fromkeys((*args.formats, *args.runs)):
        converted(folder, name)
    common.say("machine", name=common.machine())
    jobs = [(check, name) for name in args.formats] + [(run, name) for name in args.runs]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        held = list(pool.map(lambda job: job[0](job[1], folder), jobs))
    common.say("result", held=all(held))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
