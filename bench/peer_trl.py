"""Seconds of a rollout of TRL's GRPOTrainer on a run's work: generation, log-probabilities, optimizer steps.

Runs in a process of its own (``python -m bench.peer_trl JOB.json``), with TRL on the path and torch's threads as it
finds them, and prints one JSON object. The job: ``model`` (an HF folder), ``rollouts``, ``temperature``, ``tokens`` (of
an answer, at most), ``prompts`` and ``samples`` (prompts a rollout, answers to each), ``steps`` (optimizer steps a
rollout), ``lr`` and ``rows`` ([prompt, answer] in turn). On a GPU also ``gpu`` (bfloat16 there), ``last_number`` (it is
what an answer is judged by) and ``continuous_batching`` (transformers' own, in place of its plain generation).
"""

import importlib
import json
import pathlib
import re
import sys
import tempfile
import time
from typing import Any


def main(path: str) -> None:
    job = json.loads(pathlib.Path(path).read_text())
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    trl: Any = importlib.import_module("trl")
    rewards: list[float] = []
    gpu, last_number = job.get("gpu", False), job.get("last_number", False)

    def reward(completions: list[str], answer: list[str], **unused: Any) -> list[float]:
        said = [_last_number(text) if last_number else text.strip() for text in completions]
        found = [float(text == wanted) for text, wanted in zip(said, answer, strict=True)]
        rewards.append(sum(found) / len(found))
        return found

    ends = [time.perf_counter()]

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
            if state.global_step % job["steps"] == 0:
                ends.append(time.perf_counter())

    samples = job["prompts"] * job["samples"]
    with tempfile.TemporaryDirectory() as folder:
        options = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=not gpu,
            bf16=gpu,
            use_transformers_continuous_batching=job.get("continuous_batching", False),
            per_device_train_batch_size=samples // job["steps"],
            steps_per_generation=job["steps"],
            num_generations=job["samples"],
            max_steps=job["rollouts"] * job["steps"],
            max_completion_length=job["tokens"],
            temperature=job["temperature"],
            top_k=0,
            beta=0.0,
            learning_rate=job["lr"],
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=1,
        )
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16 if gpu else torch.float32),
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
            reward_funcs=reward,
            args=options,
            train_dataset=Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in job["rows"]]),
            callbacks=[Clock()],
        )
        ends[0] = time.perf_counter()
        trainer.train()
    print(
        json.dumps(
            {
                "seconds": [after - before for before, after in zip(ends, ends[1:])],
                "reward": rewards,
                "threads": torch.get_num_threads(),
                "trl": trl.__version__,
                "transformers": transformers.__version__,
            }
        )
    )


def _last_number(text: str) -> str:
    return (re.findall(r"-?\d+", text) or [""])[-1]


if __name__ == "__main__":
    main(sys.argv[1])
