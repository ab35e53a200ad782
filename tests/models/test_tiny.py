"""Tiny models: what is refused, torch-free."""

import json

import pytest

from slime_cli.errors import UsageError
from slime_cli.models import tiny


@pytest.mark.parametrize("query", ["hidden_size=0", "num_hidden_layers=-1", "num_key_value_heads=3"])
def test_a_shape_that_no_model_has_is_refused(query):
    with pytest.raises(UsageError, match=query.partition("=")[0]):
        tiny.config(f"tiny:qwen3?{query}")


def test_a_folder_with_another_tiny_model_is_not_taken_for_this_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("tiny:qwen3")))
    assert tiny.make("tiny:qwen3", tmp_path) == tmp_path
    for uri in ("tiny:qwen3?hidden_size=64", "tiny:qwen3_moe"):
        with pytest.raises(UsageError, match="holds a model with"):
            tiny.make(uri, tmp_path)
