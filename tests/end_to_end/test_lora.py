"""A LoRA run end to end: it learns, its engines have its adapters under their names and agree with its trainer, its
checkpoints are small and become HF models.

The reward is the share of an answer's tokens in one half of the vocabulary, which a policy learns in a few steps.
"""

import json
import pathlib
import re

import pytest

from slime_cli import manifests
from slime_cli.tracing.ledger import balanced, ledgers
from tests.end_to_end.conftest import HERE, slime

MINE = """
async def reward(args, sample):
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token < 160 for token in answer) / max(len(answer), 1)
"""
ROLLOUTS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run directory and working directory of a run that was interrupted by its own end and made longer."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "mine.py").write_text(MINE)
    words = (
        *("train", "--profile", HERE / "rl.yaml", "--run-dir", folder / "run", "--custom-rm-path", "mine.reward"),
        *("--lora-rank", "8", "--lr", "5e-3", "--min-lr", "5e-3", "--save-interval", "4"),
        *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--num-steps-per-rollout", "1"),
        *("--rollout-max-response-len", "16", "--use-kl-loss", "--kl-loss-coef", "0.001"),
        *("--kl-loss-type", "low_var_kl"),
    )
    for rollouts in (4, ROLLOUTS):
        done = slime(*words, "--num-rollout", str(rollouts), cwd=folder)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def lines(run: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_and_trainer_and_engines_agree(trained):
    found = lines(trained / "run")
    assert len(found) == ROLLOUTS
    first, last = (sum(line["reward_mean"] for line in part) / 3 for part in (found[:3], found[-3:]))
    assert last > first + 0.1
    assert found[0]["train/kl_loss"] < 1e-6 < found[-1]["train/kl_loss"]  # it leaves the reference, which is the base
    assert max(line["train/train_rollout_logprob_abs_diff_max"] for line in found) < 1e-4
    assert balanced(ledgers(trained / "run"))


def test_every_answer_was_of_the_version_before_its_step(trained):
    for line in lines(trained / "run"):
        manifest = trained / "run" / "rollouts" / f"{line['rollout_id']:06d}" / "manifest.json"
        versions = manifests.read(manifest, manifests.Rollout).weight_versions
        assert versions == [f"v{line['rollout_id']:06d}"]


def test_engines_had_one_adapter_at_a_time_and_proved_it(trained):
    run = trained / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["engines_verified"] == "log_probs"
    names = re.compile(r"LoRA adapter (loading|unloading) completes: .*?lora_name=(v\d{6}-\w{8})")
    log = (run / "logs" / "engine-0.log").read_text()
    loaded = set()
    for attempt in log.split("server_args=ServerArgs(")[1:]:
        held: list[str] = []
        for kind, name in names.findall(attempt):
            held.append(name) if kind == "loading" else held.remove(name)
            assert len(held) <= 2
            loaded |= {*held}
        assert len(held) == 1
    assert {name[:7] for name in loaded} == {f"v{step:06d}" for step in range(ROLLOUTS + 1)}
    newest = max((run / "weights").glob("v*"))
    assert {path.name for path in newest.iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors", "manifest.json", "probe.json")
    }


def test_a_checkpoint_has_the_adapter_alone_and_names_its_base(trained):
    checkpoint = max((trained / "run" / "checkpoints").glob("iter_*"))
    found = manifests.read(checkpoint / "checkpoint.json", manifests.Checkpoint)
    assert found.adapter == manifests.Adapter(
        rank=8, alpha=32, dropout=0.0, modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )
    weights = trained / "run" / "model" / "model.safetensors"
    assert found.source_hashes["model.safetensors"] == manifests.file_hash(weights)


def test_it_becomes_a_merged_model(trained):
    from safetensors.torch import load_file

    run = trained / "run"
    done = slime("convert", "dist-to-hf", "--load", run / "checkpoints", "--save", trained / "merged")
    assert done.returncode == 0, done.stderr
    merged = load_file(trained / "merged" / "model.safetensors")
    base = load_file(run / "model" / "model.safetensors")
    assert merged.keys() == base.keys()
    moved = {name for name in base if (merged[name] != base[name]).any()}
    assert moved == {name for name in base if name.endswith("_proj.weight")}


def test_it_becomes_an_adapter_in_pefts_format_that_is_what_was_merged(trained):
    from safetensors.torch import load_file

    run = trained / "run"
    words = ("convert", "dist-to-hf", "--load", run / "checkpoints", "--save", trained / "adapter", "--adapter-only")
    done = slime(*words)
    assert done.returncode == 0, done.stderr
    config = json.loads((trained / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (8, 32, 7)
    adapter = load_file(trained / "adapter" / "adapter_model.safetensors")
    merged = load_file(trained / "merged" / "model.safetensors")
    base = load_file(run / "model" / "model.safetensors")
    for name in base:
        at = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith("_proj.weight"):
            added = adapter[f"{at}.lora_B.weight"] @ adapter[f"{at}.lora_A.weight"] * config["lora_alpha"] / config["r"]
            assert (base[name] + added - merged[name]).abs().max() < 1e-5
    assert len(adapter) == 2 * 7 * 2
    published = load_file(max((run / "weights").glob("v*")) / "adapter_model.safetensors")
    assert all((published[name] == adapter[name]).all() for name in {*published, *adapter})


def test_a_checkpoint_of_another_base_is_refused(trained):
    other = slime(
        *("train", "--profile", HERE / "rl.yaml", "--run-dir", trained / "other", "--custom-rm-path", "mine.reward"),
        *("--hf-checkpoint", "tiny:qwen3?num_hidden_layers=2&hidden_size=64&intermediate_size=128&head_dim=16&seed=5"),
        *("--lora-rank", "8", "--load", trained / "run" / "checkpoints", "--num-rollout", "1"),
        cwd=trained,
    )
    assert other.returncode == 3, other.stdout[-2000:] + other.stderr[-2000:]
    assert "is not that base" in other.stderr


def test_engines_without_lora_are_refused_and_take_merged_weights(trained, served):
    words = (
        *("train", "--profile", HERE / "rl.yaml", "--run-dir", trained / "merging", "--custom-rm-path", "mine.reward"),
        *("--lora-rank", "8", "--rollout-endpoint", served / "endpoint.json", "--num-rollout", "2"),
    )
    refused = slime(*words, cwd=trained)
    assert refused.returncode == 2 and "serves no LoRA adapters" in refused.stderr, refused.stderr
    assert "--sglang-enable-lora --sglang-max-lora-rank 8" in refused.stderr
    done = slime(*words, "--lora-sync", "merged", "--update-weight-transport", "ipc", cwd=trained)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((trained / "merging" / "summary.json").read_text())["engines_verified"] is True
    assert max(line["train/train_rollout_logprob_abs_diff_max"] for line in lines(trained / "merging")) < 1e-4
