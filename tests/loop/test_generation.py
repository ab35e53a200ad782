"""An evaluation set is answered as it says: by the phase's own generator where it says nothing, else with its stop, its
lengths, its function and its chat template; engines, rewards and counts of failures are shared.
"""

import types

import pytest

from slime_cli.buffer.types import PromptRow
from slime_cli.loop import generation
from slime_cli.models import tiny
from slime_cli.options.evaluations import evaluation_sets
from slime_cli.options.resolve import args_namespace, resolve
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.chat import Renderer, RenderOptions
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.generate import Generator

FILE = """
datasets:
  - {name: plain, path: a, apply_chat_template: false, stop: ["</answer>"], stop_token_ids: [5], max_context_len: 9}
  - {name: own, path: b.jsonl, custom_generate_function_path: FOLDER/f.py:generate, reward_key: score}
  - {name: as-the-phase, path: c.jsonl}
"""
FUNCTION = """
async def generate(args, sample, sampling_params):
    return sample
"""
ROW = PromptRow("2 + 2?", "4", {}, "a.jsonl", 1)


@pytest.fixture(scope="module")
def phase(tmp_path_factory):
    """Its options, what it has opened, and what it generates with."""
    folder = tmp_path_factory.mktemp("phase")
    model = str(tiny.make("tiny:qwen3?num_hidden_layers=1", folder / "model"))
    (folder / "f.py").write_text(FUNCTION)
    (folder / "eval.yaml").write_text(FILE.replace("FOLDER", str(folder)))
    words = f"--hf-checkpoint {model} --eval-config {folder}/eval.yaml --apply-chat-template --rollout-stop END"
    resolved = resolve([*words.split(), "--rollout-max-response-len", "7"])
    s = resolved.slime
    args = args_namespace(resolved)
    renderer = Renderer(model, RenderOptions.of(s, 512))
    opened = types.SimpleNamespace(renderer=renderer, boundary=Boundary.of(renderer.tokenizer, model, 400, args))
    generator = Generator(args, RouterClient("http://127.0.0.1:9", 8), None, boundary=opened.boundary)
    made = types.SimpleNamespace(args=args, generator=generator)
    return s, opened, made


def test_a_set_that_says_nothing_is_answered_by_the_phase_s_own_generator(phase):
    s, opened, made = phase
    generator, render = generation.answering(made, opened, evaluation_sets(s)[2])
    assert generator is made.generator and render(ROW).text.startswith("<|user|>")


def test_a_set_has_its_own_stop_lengths_and_template(phase):
    s, opened, made = phase
    generator, render = generation.answering(made, opened, evaluation_sets(s)[0])
    params = generator.sampling_params()
    assert (params["stop"], params["stop_token_ids"]) == (["</answer>"], [5])
    assert generator.boundary.stops[0] == "</answer>" and made.generator.boundary.stops == ("END",)
    assert generator.args.eval_max_context_len == 9
    assert (generator.client, generator.failures) == (made.generator.client, made.generator.failures)
    assert render(ROW).text == "2 + 2?"
    assert render(PromptRow("x" * 40, None, {}, "a.jsonl", 2)) is None, "longer than the set's own bound"
    assert made.generator.sampling_params()["stop"] == ["END"], "the phase's stay as they are"


def test_a_set_has_its_own_function_and_reward_key(phase):
    s, opened, made = phase
    generator, _ = generation.answering(made, opened, evaluation_sets(s)[1])
    assert generator.custom is not None and made.generator.custom is None
    assert generator.args.eval_reward_key == "score" and made.args.eval_reward_key is None
