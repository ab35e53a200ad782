"""On-policy distillation from a genuine engine."""

import random

from transformers import AutoTokenizer

from slime_cli import manifests
from slime_cli.buffer.types import Sample
from slime_cli.rollout import turns
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.teacher import Teacher


async def test_a_teacher_of_the_same_weights_says_what_the_rollout_said(served):
    """Through the router as through the engine; the vocabulary's last id and a prompt of one token included."""
    endpoint = manifests.read(served / "endpoint.json", manifests.Endpoint)
    tokenizer = AutoTokenizer.from_pretrained(served / "model", local_files_only=True)
    client = RouterClient(endpoint.router_url, 16)
    rng = random.Random(0)
    prompts = [[rng.randrange(6, 320) for _ in range(n)] for n in (1, 3, 20)] + [[7, 319]]
    samples = []
    for prompt in prompts:
        params = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "n": 4}
        answers = await client.generate({"input_ids": prompt, "sampling_params": params, "return_logprob": True})
        for answer in answers:
            sample = Sample(len(samples), 0)
            turns.append(turns.Asking(client, prompt, params), sample, [answer])
            samples.append(sample)
    ending = Sample(len(samples), 0, tokens=[9, 8, 319, 5], response_length=2, rollout_log_probs=[0.0, 0.0])
    for given in (str(served / "endpoint.json"), f"{endpoint.engines[0].url}/generate"):
        teacher = Teacher(given, 60.0)
        await teacher.check(tokenizer, 320)
        failed = {}
        assert (
            await teacher.teach([*samples, ending], failed) == [*samples, ending] and not failed and not teacher.retries
        )
        await teacher.close()
        worst = max(abs(a - b) for s in samples for a, b in zip(s.teacher_log_probs, s.rollout_log_probs, strict=True))
        assert worst <= 1e-4, worst
        assert len(ending.teacher_log_probs) == 2
    assert sum(len(s.teacher_log_probs) for s in samples) == 16 * 24
    await client.close()
