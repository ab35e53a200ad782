"""``slime doctor function``: the contract of every kind, over functions that keep it and functions that break it."""

import pathlib
import re

import pytest
from typer.testing import CliRunner

from slime_cli.commands import doctor, doctor_function, doctor_trainer_functions
from slime_cli.errors import UsageError
from slime_cli.findings import Finding
from slime_cli.hooks.table import KINDS

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "hooks.md"
COLUMNS = """{"tokens": [s.tokens for s in samples], "response_lengths": [s.response_length for s in samples],
    "rewards": [s.reward for s in samples], "loss_masks": [s.effective_mask() for s in samples]}"""
MADE = "[[dataclasses.replace(s, tokens=s.tokens + [5], response_length=1, reward=1.0) for s in g] for g in groups]"
KEPT = {
    "generate": "async def f(args, s, p): return await hooks.engine(args).generate(s, p)",
    "reward": "def f(args, sample): return sample.response == sample.label",
    "group_reward": "async def f(args, samples): return [1.0 for _ in samples]",
    "dynamic_filter": "def f(args, samples): return samples[0].reward != samples[1].reward",
    "sample_hook": "def f(args, sample, **more): sample.response += '!'",
    "rollout": f"def f(args, i, d, evaluation=False):\n    groups = d.get_samples(2)\n    return {MADE}",
    "eval_rollout": "def f(args, i, d, evaluation=False): return hooks.RolloutFnEvalOutput({'a': {'rewards': [1.0]}})",
    "data_source": """
class f:
    def __init__(self, args): self.n = 0
    def __len__(self): return 5
    def get_samples(self, n):
        self.n += 1
        return [[hooks.Sample(0, 0, prompt=f"{self.n} + 1")]]
""",
    "buffer_filter": "def f(args, i, buffer, n): return [buffer.pop(0) for _ in range(n)]",
    "rollout_sample_filter": "def f(args, data): data[0][0].remove_sample = True",
    "all_samples_process": "def f(args, all_samples, data_source): pass",
    "reward_post_process": "def f(args, samples): return [s.reward for s in samples], [0.5, -0.5]",
    "convert_samples": f"def f(args, samples): return {COLUMNS}",
    "rollout_log": "def f(rollout_id, args, samples, extra_metrics, rollout_time): return True",
    "eval_log": "def f(rollout_id, args, data, extra_metrics): return False",
    "weight_post_write": "def f(args, version_dir, rollout_engines): pass",
    "advantage": "def f(args, data): data['advantages'] = data['loss_mask'] * 1.0",
    "tis": "def f(args, *, pg_loss, loss_masks, **more): return pg_loss, loss_masks, {'mean': pg_loss.mean()}",
    "pg_loss_reducer": "def f(totals, lengths, masks, per_token):\n"
    "    import torch\n    mask = torch.cat(masks)\n    return lambda x: (x * mask).sum()",
    "data_postprocess": "def f(args, rollout_id, data): data['loss_masks'][0][0] = 0",
    "loss": "def f(args, batch, logits, sum_of_sample_mean): return logits.sum(), {}",
    "model_provider": "def f(pre_process, post_process): return None",
    "megatron_init": "def f(args): pass",
    "before_log_prob": "def f(args, model, store_prefix): pass",
    "before_train_step": "def f(args, rollout_id, step_id, model, optimizer, opt_param_scheduler): pass",
}
BROKEN = {
    "generate": ("async def f(args, s, p): return s", "returned no response token"),
    "reward": ("def f(args, sample): return 'good'", "is no reward"),
    "group_reward": ("def f(args, samples): return 1.0", "returned 1.0 for 2 samples"),
    "dynamic_filter": ("def f(args, samples): return None", "returned None"),
    "sample_hook": ("def f(args, sample, **more): return 3", "returned int"),
    "rollout": ("def f(args, i, d, evaluation): return []", "returned list"),
    "eval_rollout": ("def f(args, i, d, evaluation): return {'a': {'rewards': []}}", "no rewards of 'a'"),
    "data_source": (
        KEPT["data_source"].replace("self.n = 0", "self.n = id(self)"),
        "deals other prompts when it is made again",
    ),
    "buffer_filter": ("def f(args, i, buffer, n): return buffer", "returned 3 groups where 2"),
    "rollout_sample_filter": ("def f(args, data): data[0][0].tokens = [1]", "changed tokens"),
    "all_samples_process": ("def f(args, all_samples, d): d(3)", "asked for 3 more groups"),
    "reward_post_process": ("def f(args, samples): return [1.0, 0.0]", "returned list"),
    "convert_samples": ("def f(args, samples): return {'tokens': []}", "returned no 'response_lengths'"),
    "rollout_log": ("def f(i, args, samples, metrics, t): samples[0].reward = 9.0", "changed reward"),
    "eval_log": ("def f(i, args, data, metrics): return data['train']", "raised KeyError: 'train' at .*mine.py"),
    "weight_post_write": (
        "import os\ndef f(args, folder, engines): [os.remove(f'{folder}/{n}') for n in os.listdir(folder)]",
        "changed the version's folder",
    ),
    "advantage": ("def f(args, data): data['advantages'] = [1.0]", "'advantages' of shape"),
    "tis": ("def f(args, *, pg_loss, **more): return pg_loss", "returned Tensor"),
    "pg_loss_reducer": ("def f(a, b, c, d): return lambda x: (x * x).sum()", "not a weighted sum"),
    "data_postprocess": ("def f(args, i, data): data['rewards'].clear()", "changed 'rewards'"),
}
"""Kind -> a function that breaks its contract, and what is said. Those of trainer ranks alone are not called."""


def found(tmp_path: pathlib.Path, kind: str, code: str, *words: str) -> list[Finding]:
    file = tmp_path / "mine.py"
    file.write_text(f"import dataclasses\nfrom slime_cli import hooks\n{code}\n")
    return list(doctor_function.check(kind, f"{file}:f", words))


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_keeps_its_contract(kind: str, tmp_path: pathlib.Path):
    findings = found(tmp_path, kind, KEPT[kind])
    assert len(findings) > 1 and {finding.status for finding in findings} == {"ok"}, findings


@pytest.mark.parametrize("kind", BROKEN)
def test_a_function_that_breaks_it_is_told_what_and_where(kind: str, tmp_path: pathlib.Path):
    code, said = BROKEN[kind]
    last = found(tmp_path, kind, code)[-1]
    assert last.status == "fail" and re.search(said, last.detail), last
    assert last.fix


def test_every_kind_has_a_contract():
    assert doctor_function.CONTRACTS.keys() == KINDS.keys() == KEPT.keys()
    called_later = doctor_trainer_functions.of_trainer
    assert BROKEN.keys() == {k for k, c in doctor_function.CONTRACTS.items() if c is not called_later}


GENERATES = {
    "s.tokens += [5]; s.response_length += 1; s.loss_mask = [1] * s.response_length; s.rollout_log_probs += [-1.0]; "
    "s.spans = []": "trains token 5 at place",
    "s.rollout_log_probs[1] -= 0.5": "gives token .* the log-probability",
    "s.loss_mask.pop()": "loss_mask has",
    "s.status = 'failed'": "ended as failed",
    "s.tokens = s.tokens[-s.response_length:]": "no prompt token",
    "s.append([5] * 99, log_probs=None, version=None, trained=False)": "response tokens of 64",
    "del s.tokens[0]": "trains token",
    "raise KeyError('lost')": r"raised KeyError: 'lost' at .*mine.py:5",
    "return []": "returned no sample",
    "return [[s]]": "a list that holds list",
}


@pytest.mark.parametrize("line", GENERATES)
def test_what_is_wrong_with_a_generate_function(line: str, tmp_path: pathlib.Path):
    code = f"async def f(args, s, p):\n    await hooks.engine(args).generate(s, p); {line}\n    return s"
    code = code.replace("; raise", "\n    raise")
    last = found(tmp_path, "generate", code)[-1]
    assert last.status == "fail" and re.search(GENERATES[line], last.detail), last


def test_the_example_of_the_page_keeps_its_contract(tmp_path: pathlib.Path):
    file = tmp_path / "calculator.py"
    file.write_text(re.search(r"```python\n(# calculator\.py.*?)```", PAGE.read_text(), re.DOTALL)[1])
    said = [finding.detail for finding in doctor_function.check("generate", f"{file}:generate", ())]
    assert any("each trained token is one that the engine sampled" in detail for detail in said)
    assert any("it says ABORTED" in detail for detail in said) and any("2+3 = 5 2+3" in detail for detail in said)


def test_the_command(tmp_path: pathlib.Path):
    file = tmp_path / "mine.py"
    file.write_text("def f(args, sample): return {'score': args.rm_timeout}\n")
    runner = CliRunner()
    words = ["function", "--", "--custom-rm-path", f"{file}:f"]
    done = runner.invoke(doctor.app, words)
    assert done.exit_code == 2 and "--reward-key" in done.output
    done = runner.invoke(doctor.app, [*words, "--reward-key", "score", "--rm-timeout", "7"])
    assert done.exit_code == 0 and "7.0" in done.output, done.output
    with pytest.raises(UsageError, match="did you mean 'reward'"):
        list(doctor_function.check("rewards", f"{file}:f", ()))
    with pytest.raises(UsageError, match="--no-such-option"):
        list(doctor_function.check("reward", f"{file}:f", ["--no-such-option"]))
