import dataclasses

import pytest

from slime_cli.models import tiny
from slime_cli.rollout.chat import RenderOptions
from slime_cli.rollout.supervised import SupervisedRenderer

KEYS = {"prompt": "max_prompt", "answer": "answer", "together": "together"}
LENGTHS = {prefix + key: name for name, key in KEYS.items() for prefix in ("", "eval_")}


@pytest.fixture(scope="package")
def renderer(tmp_path_factory):
    model = tiny.make("tiny:qwen3?num_hidden_layers=1", tmp_path_factory.mktemp("chat") / "model")
    return SupervisedRenderer(str(model), RenderOptions(apply_chat_template=True))


@pytest.fixture
def render(renderer, monkeypatch):
    """``(template, **options)``: the renderer with another template; lengths by their names, those of an evaluation
    with ``eval_`` before them."""

    def change(template=None, stops=None, **options):
        if template:
            monkeypatch.setattr(renderer.tokenizer, "chat_template", template)
        if stops:
            monkeypatch.setattr(renderer, "stops", {renderer.tokenizer.convert_tokens_to_ids(t) for t in stops})
        given = {name: options.pop(name) for name in LENGTHS if name in options}
        for field, prefix in (("training", ""), ("evaluation", "eval_")):
            mine = {name: given[key] for key, name in LENGTHS.items() if key in given and key == prefix + KEYS[name]}
            options[field] = dataclasses.replace(getattr(renderer.options, field), **mine)
        options = dataclasses.replace(renderer.options, **options)
        monkeypatch.setattr(renderer, "options", options)
        monkeypatch.setattr(renderer, "apply", options.apply_chat_template)
        monkeypatch.setattr(
            renderer, "policy", options.special_tokens or ("text" if options.apply_chat_template else "refuse")
        )
        return renderer

    return change
