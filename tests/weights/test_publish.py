"""What is written as a version: the weights, the model's other files, and a manifest that is written last."""

import torch

from slime_cli.weights import publish
from tests import checkpoints

WEIGHTS = {"model.norm.weight": torch.arange(16.0), "model.embed_tokens.weight": torch.ones(64, 16)}


def test_a_published_version_holds_no_other_weights_and_everybody_may_read_it(tmp_path):
    model = checkpoints.write(tmp_path / "model")
    for name in ("consolidated.safetensors", "adapter.bin", "model.gguf"):
        (model / name).write_text("old weights in another form")
    (model / "config.json").chmod(0o400)
    publish.write(iter(WEIGHTS.items()), tmp_path / "v1", hf_checkpoint=str(model), version="v1", step=1, run="r")
    files = {path.name: path.stat().st_mode & 0o044 for path in (tmp_path / "v1").iterdir()}
    assert files.keys() == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "manifest.json",
    }
    assert set(files.values()) == {0o044}
