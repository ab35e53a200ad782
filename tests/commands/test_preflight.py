"""``--dry-run`` and the run itself refuse the same things, before anything is started or written."""

import json
import subprocess
import sys

import pytest

from bench.scripts import SCRIPTS
from slime_cli import manifests
from slime_cli.commands import preflight, train
from slime_cli.errors import DataError, EngineError, SlimeError, UsageError
from slime_cli.hardware import device as hardware
from slime_cli.loop import attempts as folders
from slime_cli.options.resolve import resolve
from tests.options.test_slime_scripts import PASS

MODEL = "tiny:qwen3?num_hidden_layers=2"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A sound command line, in a folder of its own that holds its data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(hardware, "find", lambda: hardware.Device("cpu", 2, "cpu"))
    row = json.dumps({"input": "1+1=", "label": "2"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 4)
    (tmp_path / "mine.py").write_text("def reward(args, sample):\n    return 1.0\n\nplain = reward\n")
    (tmp_path / "roles.yaml").write_text("megatron:\n- {role: critic, lr: 1:30}\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    return (
        f"--hf-checkpoint {MODEL} --prompt-data rows.jsonl --label-key label --num-rollout 2 --run-dir out "
        "--rollout-batch-size 2 --n-samples-per-prompt 2 --rm-type exact --rollout-max-response-len 8"
    ).split()


def refused(words: list[str]) -> tuple[type[SlimeError], str]:
    with pytest.raises(SlimeError) as caught:
        train.run(words)
    return type(caught.value), f"{caught.value.message} | {caught.value.fix}"


def test_a_sound_command_line_passes_with_its_memory(words, capsys, tmp_path):
    assert train.run([*words, "--dry-run"]) == 0
    assert "billion parameters" in capsys.readouterr().out and not (tmp_path / "out").exists()


REFUSED = [
    ("--rm-type exat", UsageError, "unknown rm_type 'exat' (did you mean 'exact'?)"),
    ("--custom-rm-path mine.py:rewrd", UsageError, "has no 'rewrd' (did you mean 'reward'?)"),
    ("--rm-type boxed_maht", UsageError, "did you mean 'math'?"),
    ("--custom-rm-path broken.py:f", UsageError, "broken.py:1"),
    ("--custom-generate-function-path mine.py:plain", UsageError, "does not accept the call"),
    ("--num-layers 5", UsageError, f"--num-layers makes num_layers 5, {MODEL} makes it 2"),
    ("--hidden-size 64", UsageError, "--hidden-size makes hidden_size 64"),
    ("--hf-checkpoint tiny:quen3", UsageError, "no tiny model 'quen3'"),
    ("--use-opd --opd-teacher-url ftp://h/generate", UsageError, "not an address"),
    ("--label-key lable", DataError, "lable"),
    ("--advantage-estimator ppo --megatron-config-path roles.yaml", UsageError, "takes a number, got '1:30'"),
    ("--rollout-max-response-len 600", UsageError, "more than the model's 512 positions"),
    ("--use-top-p-replay --rollout-top-k 1000 --rollout-top-p 0.9", UsageError, "with a vocabulary of 320"),
    ("--use-rollout-routing-replay", UsageError, "is not a mixture of experts"),
]


@pytest.mark.parametrize(("more", "kind", "said"), REFUSED)
def test_the_dry_run_refuses_what_the_run_refuses(words, more, kind, said, tmp_path):
    dry = refused([*words, *more.split(), "--dry-run"])
    real = refused([*words, *more.split()])
    assert dry == real and dry[0] is kind and said in dry[1]
    assert not (tmp_path / "out").exists()


NOT_HERE = [
    ("--custom-rm-path none.py:f", UsageError, "there is no file"),
    ("--custom-rm-path nowhere.of.mine", UsageError, "there is no module 'nowhere'"),
    ("--dynamic-sampling-filter-path none.py:f", UsageError, "there is no file"),
    ("--hf-checkpoint nowhere", DataError, "nowhere: checkpoint: no such folder"),
    ("--load nowhere", DataError, "nowhere: no complete checkpoint there"),
    ("--ref-load nowhere", DataError, "nowhere: no complete checkpoint there"),
    ("--use-opd --opd-teacher-load nowhere", DataError, "nowhere: no complete checkpoint there"),
    ("--use-opd --opd-teacher-url nowhere.json", DataError, "nowhere.json"),
    ("--prompt-data nowhere.jsonl", DataError, "nowhere.jsonl"),
    ("--eval-interval 1 --eval-prompt-data nowhere.jsonl", DataError, "nowhere.jsonl"),
    ("--rollout-endpoint nowhere.json", DataError, "nowhere.json"),
    ("--advantage-estimator ppo --megatron-config-path nowhere.yaml", UsageError, "nowhere.yaml: cannot be read"),
]


@pytest.mark.parametrize(("more", "kind", "said"), NOT_HERE)
def test_what_is_not_on_this_machine_is_a_warning_of_the_dry_run(words, more, kind, said, capsys, tmp_path):
    assert train.run([*words, *more.split(), "--dry-run"]) == 0
    flag = [word for word in more.split() if word.startswith("--")][-1]
    value = more.split()[-1]
    assert f"warning not on this machine: {flag} {value}" in " ".join(capsys.readouterr().out.split())
    found, text = refused([*words, *more.split()])
    assert found is kind and said in text and not (tmp_path / "out").exists()


def test_a_launch_script_of_slime_is_looked_at_far_from_its_cluster(monkeypatch, tmp_path, capsys):
    """Those that pass as they are, whole, where nothing of what they name exists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "find", lambda: hardware.Device("cpu", 2, "cpu"))
    for name in PASS:
        assert train.run([*SCRIPTS[name], "--dry-run"]) == 0, name
        assert "not on this machine: --hf-checkpoint" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_all_that_is_refused_is_said_at_once_after_the_tables(words, capsys):
    more = "--prompt-data nowhere.jsonl --rm-type exat --ref-load nothing --num-layers 5".split()
    kind, said = refused([*words, *more])
    assert said.startswith("4 things that the run needs cannot be used:") and kind is UsageError
    for part in ("--num-layers makes", "nothing: no complete", "nowhere.jsonl", "'exat'"):
        assert part in said
    kind, said = refused([*words, *more, "--dry-run"])
    assert said.startswith("2 things that the run needs cannot be used:") and kind is UsageError
    assert "trainer ranks" in capsys.readouterr().out


def test_the_number_of_epochs_beside_rollouts_is_a_warning(words, capsys):
    assert train.run([*words, "--num-epoch", "2", "--dry-run"]) == 0
    assert "--num-epoch has no effect beside --num-rollout" in " ".join(capsys.readouterr().out.split())


def test_what_only_this_machine_cannot_do_is_a_warning_of_the_dry_run(words, capsys):
    for more in (["--hf-checkpoint", "tiny:qwen3_moe"], ["--optimizer-cpu-offload"]):
        assert train.run([*words, *more, "--dry-run"]) == 0
        assert "not on this machine: " in capsys.readouterr().out
        assert refused([*words, *more])[0] is UsageError


def test_prompts_that_are_made_are_left_to_the_run(words, capsys):
    assert train.run([*words, "--prompt-data", "reasoning-gym:nothing", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Left to the run, before it starts anything: how rows render, the prompts of reasoning-gym:nothing" in said


def test_a_run_directory_with_other_options_is_refused_at_once(words, tmp_path):
    folders.claim(resolve(words), tmp_path / "out")
    assert train.run([*words, "--dry-run"]) == 0
    for more in (["--dry-run"], []):
        kind, said = refused([*words, "--lr", "1", "--rm-type", "exat", *more])
        assert kind is UsageError and "holds a run with other options" in said and "lr was 1e-06, now 1.0" in said


def test_an_endpoint_that_does_not_answer_is_refused(words, tmp_path):
    endpoint = manifests.Endpoint(
        router_url="http://127.0.0.1:9",
        engines=[],
        model="m",
        engine_name="sglang",
        engine_version="0",
        owner_pid=1,
        owner_host="h",
        created=0.0,
    )
    manifests.write(tmp_path / "endpoint.json", endpoint)
    for more in (["--dry-run"], []):
        kind, said = refused([*words, "--rollout-endpoint", "endpoint.json", *more])
        assert kind is EngineError and "does not answer" in said
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").write_text("{}")  # finished: its result is shown without the endpoint
    assert train.run([*words, "--rollout-endpoint", "endpoint.json", "--dry-run"]) == 0


def test_every_stage_is_looked_at(words, tmp_path, capsys):
    (tmp_path / "staged.yaml").write_text(
        "phases:\n- {name: warm, slime: {loss_type: sft_loss, prompt_data: rows.jsonl}}\n"
        "- {name: rl, slime: {prompt_data: gone.jsonl}}\n"
    )
    at = words.index("--prompt-data")
    staged = [*words[:at], *words[at + 2 :], "--profile", "staged.yaml"]
    kind, said = refused(staged)
    assert kind is DataError and "gone.jsonl" in said
    assert train.run([*staged, "--dry-run"]) == 0 and "gone.jsonl" in capsys.readouterr().out


def test_every_option_for_a_function_is_looked_at():
    from slime_cli.options import own

    of_rewards = {"custom_rm_path"}
    paths = {option.dest for option in own.OPTIONS if option.dest.endswith("_path") and option.takes_value}
    assert paths - of_rewards - {"megatron_config_path", "custom_config_path"} == preflight.HOOKS.keys()


def test_a_dry_run_imports_no_engine_and_no_library_of_arrays(words):
    code = (
        "import sys; from slime_cli.commands import train; train.run(sys.argv[1:]);"
        "heavy = ('torch', 'transformers', 'megatron', 'sglang', 'ray', 'pyarrow', 'httpx', 'numpy');"
        "print('HEAVY', [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words, "--dry-run"], capture_output=True, text=True)
    assert done.stdout.endswith("HEAVY []\n"), done.stdout + done.stderr


@pytest.mark.parametrize("option", ["--run-dir", "--save", "--save-hf"])
def test_a_file_in_the_way_of_a_folder_is_refused_before_one_is_made(words, option, tmp_path, capsys):
    said = f"{option} {tmp_path / 'mine.py'}: cannot write there: a file is there"
    assert said in refused([*words, option, str(tmp_path / "mine.py")])[1]
    assert train.run([*words, option, str(tmp_path / "mine.py"), "--dry-run"]) == 0
    assert f"not on this machine: {said}" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "out").exists()
