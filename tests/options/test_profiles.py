"""Profiles: lookup, precedence, phases, and what their errors say."""

import pytest

from slime_cli.errors import UsageError
from slime_cli.hardware.device import Device
from slime_cli.options import profiles
from slime_cli.options.checks import check
from slime_cli.options.memory import shape
from slime_cli.options.resolve import resolve


def written(folder, text, name="mine.yaml"):
    path = folder / name
    path.write_text(text)
    return str(path)


def refused(folder, text) -> str:
    with pytest.raises(UsageError) as caught:
        profiles.load(written(folder, text))
    return f"{caught.value.message} | {caught.value.fix}"


def test_every_shipped_profile_resolves():
    for names in profiles.available().values():
        for name in names:
            resolve([], [name])


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-0.6b", 596_049_920), ("qwen3-4b", 4_022_468_096)])
def test_models_have_their_public_parameter_counts(name, parameters):
    assert shape(resolve([], [name]).megatron).parameters == parameters


def test_later_profiles_then_flags_win(tmp_path):
    first = written(
        tmp_path, "megatron: {lr: 1e-4, num_layers: 2, sequence-parallel: true}\nslime: {trace: off}", "a.yaml"
    )
    second = written(
        tmp_path, "megatron: {num-layers: 3, sequence-parallel: false}\nsglang: {dtype: float32}", "b.yaml"
    )
    found = resolve(["--num-layers", "4"], [first, second])
    assert found.megatron["lr"] == 1e-4 and found.origins["megatron.lr"] == f"profile {first}"
    assert found.megatron["num_layers"] == 4 and found.origins["megatron.num_layers"] == "flag"
    assert "sequence_parallel" not in found.megatron
    assert found.slime.trace == "off" and found.sglang["dtype"] == "float32"


def test_a_flag_takes_back_what_a_profile_gives(tmp_path):
    profile = written(tmp_path, "slime: {colocate: true, disable-rewards-normalization: true}\nmegatron: {bf16: true}")
    found = resolve(["--colocate=false", "--bf16=false", "--disable-rewards-normalization=false"], [profile])
    assert found.slime.colocate is False and found.slime.rewards_normalization is True
    assert "bf16" not in found.megatron


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("megatorn: {}", "unknown section `megatorn` | did you mean megatron?"),
        ("megatron: {num-layer: 2}", "megatron.num-layer: no such option | did you mean num-layers"),
        ("megatron: {rollout-seed: 2}", "did you mean rollout-seed (in the `slime:` section)?"),
        ("megatron: {save: x}", "move it to the `slime:` section"),
        ("sglang: {tp-size: 2}", "use --rollout-num-gpus-per-engine"),
        ("sglang: {port: 2}", "is set by slime"),
        ("megatron: {bf16: 1}", "takes true (given) or false"),
        ("megatron: {num-layers: true}", "takes a whole number, got 'true'"),
        ("megatron: {num-layers: [1]}", "takes a whole number, got [1]"),
        ("megatron: [1]", "must be a map"),
        ("megatron: {lr: 1, lr: 2}", "`lr` is there twice"),
        ("megatron: {num-layers: 1, num_layers: 2}", "keep one"),
        ("phases: {}\nslime: [", "not readable as YAML"),
        ("phases: [{slime: {rollout-sed: 1}}]", "phase 1: slime.rollout-sed"),
        ("phases: [{what: 1}]", "phase 1: unknown section `what`"),
        ("phases: [{name: a/b}]", "phase 1: 'a/b' is no name of a phase"),
        ("phases: [{name: ..}]", "phase 1: '..' is no name of a phase"),
        ("phases: [{name: .lock}]", "is no name of a phase"),
        ("phases: [{name: '[red]x'}]", "is no name of a phase"),
        ('phases: [{name: "a\\0b"}]', "is no name of a phase"),
        ("phases: [{name: [a]}]", "is no name of a phase"),
        ("phases: [{name: ''}]", "is no name of a phase"),
        (f"phases: [{{name: {'a' * 64}}}]", "is no name of a phase"),
        ("phases: [{name: logs}]", "phase 1: a run directory has a logs of its own"),
        ("phases: [{name: rl}, {name: RL}]", "phase 2: another phase is called 'RL' too"),
        ("phases: [{}, {name: phase-1}]", "phase 2: another phase is called 'phase-1' too"),
    ],
)
def test_errors_name_file_key_and_nearest(tmp_path, text, said):
    message = refused(tmp_path, text)
    assert said in message and "mine.yaml" in message


def test_phases_are_named_in_any_alphabet_or_by_their_place(tmp_path):
    text = "phases: [{name: ~}, {name: été run 1}, {name: 3}, {name: 預熱_v1.5}]"
    names = [phase["name"] for phase in profiles.load(written(tmp_path, text)).phases]
    assert names == ["phase-1", "été run 1", "3", "預熱_v1.5"] and {*map(type, names)} == {str}


@pytest.mark.parametrize(("kind", "lr", "ranks"), [("cpu", 2e-4, 2), ("cuda", 1e-4, 1)])
def test_what_is_for_a_cpu_holds_on_a_machine_without_a_gpu(monkeypatch, tmp_path, kind, lr, ranks):
    monkeypatch.setattr(profiles.hardware, "find", lambda: Device(kind, 2, kind))
    text = "megatron: {lr: 1e-4}\ncpu: {slime: {actor_num_gpus_per_node: 2}, megatron: {lr: 2e-4}}"
    found = resolve([], [written(tmp_path, text)])
    assert (found.megatron["lr"], found.slime.actor_num_gpus_per_node) == (lr, ranks)
    assert resolve(["--lr", "3e-4"], [written(tmp_path, text)]).megatron["lr"] == 3e-4


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_for_a_cpu_is_checked_on_every_machine(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(profiles.hardware, "find", lambda: Device(kind, 2, kind))
    assert "mine.yaml: cpu: megatron.num-layer: no such option" in refused(tmp_path, "cpu: {megatron: {num-layer: 2}}")
    assert "mine.yaml: cpu: unknown section `phases`" in refused(tmp_path, "cpu: {phases: []}")


def test_unknown_profile_lists_the_known():
    with pytest.raises(UsageError) as caught:
        profiles.load("qwen3-4bb")
    assert "did you mean qwen3-4b?" in caught.value.fix and "qwen3-0.6b" in caught.value.fix


STAGED = """
slime: {loss-type: sft_loss, prompt-data: p, hf-checkpoint: h, num-rollout: 5, rollout-batch-size: 8, trace: on}
megatron: {lr: 1e-3}
phases:
- name: warm
- name: rl
  slime: {loss-type: policy_loss, n_samples_per_prompt: 4, rm-type: math, num-rollout: 9}
  megatron: {lr: 1e-5}
  sglang: {dtype: float32}
"""


def test_phases_lie_over_the_top_level_and_beneath_flags(tmp_path):
    found = resolve(["--num-rollout", "2"], [written(tmp_path, STAGED)])
    warm = found.for_phase(0)
    rl = found.for_phase(1)
    assert [phase["name"] for phase in found.phases] == ["warm", "rl"]
    assert warm.slime.loss_type == "sft_loss" and warm.megatron["lr"] == 1e-3
    assert rl.slime.loss_type == "policy_loss" and rl.megatron["lr"] == 1e-5
    assert rl.origins["megatron.lr"] == "phase rl" and rl.sglang["dtype"] == "float32"
    assert warm.slime.num_rollout == rl.slime.num_rollout == 2
    assert (warm.megatron["global_batch_size"], rl.megatron["global_batch_size"]) == (8, 32)
    assert (warm.slime.rollout_num_gpus, rl.slime.rollout_num_gpus) == (0, 1)
    assert check(found) == []


def test_checks_name_the_phase(tmp_path):
    with pytest.raises(UsageError, match="phase rl: .*rollout-temperature"):
        check(resolve(["--rollout-temperature", "0"], [written(tmp_path, STAGED.replace("- name: warm\n", ""))]))


def test_an_endpoint_takes_a_profiles_colocation_back_in_every_phase(tmp_path):
    profile = written(
        tmp_path, "slime: {colocate: true}\nphases:\n  - {name: a}\n  - {name: b, slime: {colocate: true}}"
    )
    found = resolve(["--rollout-endpoint", "e.json"], [profile])
    assert found.slime.colocate is False
    assert [found.for_phase(i).slime.colocate for i in range(2)] == [False, False]
    assert resolve([], [profile]).for_phase(1).slime.colocate is True
