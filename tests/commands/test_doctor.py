"""Each finding of the doctor, made to come out well and badly."""

import json
import pathlib
import re
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bench import conversations
from slime_cli import installed
from slime_cli.commands import doctor
from slime_cli.commands.doctor_checkpoint import check_checkpoint
from slime_cli.commands.doctor_training import check_training
from tests import checkpoints
from tests.checkpoints import CHATML

FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def checkpoint(tmp_path):
    """A whole one, of two shards."""
    return checkpoints.write(tmp_path / "model")


def look(folder: pathlib.Path) -> dict[str, doctor.Finding]:
    findings = {finding.name: finding for finding in check_checkpoint(folder)}
    assert all(finding.fix for finding in findings.values() if finding.status != "ok")
    return findings


def test_a_whole_checkpoint_is_ok(checkpoint):
    assert {finding.status for finding in look(checkpoint).values()} == {"ok"}
    assert look(checkpoint.parent / "absent")["checkpoint"].status == "fail"


@pytest.mark.parametrize(
    ("name", "content", "finding", "words"),
    [
        ("config.json", None, "model config", "missing"),
        ("config.json", "{", "model config", "config.json"),
        ("config.json", "[]", "model config", "not a JSON object"),
        ("config.json", "{}", "model config", "no architectures"),
        ("tokenizer.json", None, "tokenizer", "missing"),
        ("tokenizer_config.json", "{", "chat template", "tokenizer_config.json"),
        ("chat_template.jinja", "{% if %}", "chat template", "line 1"),
        ("chat_template.jinja", "{{ nothing.there }}", "chat template", "undefined"),
        ("chat_template.jinja", "always the same", "chat template", "leaves out"),
        (checkpoints.SHARDS[1], None, "weights", f"{checkpoints.SHARDS[1]} is missing"),
        (checkpoints.SHARDS[1], "version https://git-lfs.github.com/spec/v1\n", "weights", "Git LFS pointer"),
        (checkpoints.SHARDS[1], "x" * 20, "weights", "cut off"),
        (checkpoints.SHARDS[1], "", "weights", checkpoints.SHARDS[1]),
        ("model.safetensors.index.json", "{}", "weights", "no index of tensors"),
        ("model.safetensors.index.json", '{"weight_map": {}}', "weights", "names no tensors"),
    ],
)
def test_what_is_broken_fails_and_is_named(checkpoint, name, content, finding, words):
    (checkpoint / name).unlink()
    if content is not None:
        (checkpoint / name).write_text(content)
    found = look(checkpoint)[finding]
    assert found.status == "fail" and words in found.detail


def test_a_shard_cut_off_or_with_a_tensor_too_few(checkpoint):
    whole = (checkpoint / checkpoints.SHARDS[0]).read_bytes()
    (checkpoint / checkpoints.SHARDS[0]).write_bytes(whole[:-1])
    assert f"{len(whole) - 1:,} bytes instead of {len(whole):,}" in look(checkpoint)["weights"].detail
    checkpoints.write_shard(checkpoint / checkpoints.SHARDS[0], {"model.norm.weight": (16,)})
    assert f"{checkpoints.SHARDS[0]} lacks lm_head.weight and 12 more" in look(checkpoint)["weights"].detail


def test_chat_templates_that_are_absent_or_rewrite_history_are_warned_of(checkpoint):
    (checkpoint / "chat_template.jinja").unlink()
    found = look(checkpoint)["chat template"]
    assert found.status == "warn" and "none" in found.detail and "chat_template.jinja" in found.fix
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": FORGETFUL}))
    found = look(checkpoint)["chat template"]
    assert found.status == "warn" and "message 4 (user) changes what precedes it" in found.detail


@pytest.mark.parametrize("form", ["text", "named"])
def test_chat_templates_in_the_tokenizer_s_configuration(checkpoint, form):
    (checkpoint / "chat_template.jinja").unlink()
    value = CHATML if form == "text" else [{"name": "tool", "template": ""}, {"name": "default", "template": CHATML}]
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    assert look(checkpoint)["chat template"].status == "ok"


def test_templates_that_refuse_system_messages_or_mark_the_assistant(checkpoint):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    (checkpoint / "chat_template.jinja").write_text(refusing)
    assert "takes no system message" in look(checkpoint)["chat template"].detail
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{%- endgeneration -%}")
    (checkpoint / "chat_template.jinja").write_text(marked)
    assert look(checkpoint)["chat template"].status == "ok"


def test_versions_that_differ_or_are_missing():
    found_versions = installed.TESTED | {"torch": "2.11.0+cpu", "sglang": "0.4.0", "ray": None, "megatron-bridge": None}
    found = {finding.name: finding for finding in doctor.check_versions(found_versions.get)}
    assert (found["torch"].status, found["sglang"].status, found["ray"].status) == ("ok", "warn", "fail")
    assert "pip install ray==2.60.0" in found["ray"].fix
    assert "pip install --no-deps megatron-bridge==0.6.2" in found["megatron-bridge"].fix


def test_imports_are_tried_elsewhere_and_with_a_limit():
    assert doctor.check_import("json", "import json").status == "ok"
    gone = doctor.check_import("gone", "import not_there_at_all")
    assert gone.status == "fail" and "ModuleNotFoundError" in gone.detail and gone.fix
    assert "no end" in doctor.check_import("slow", "import time; time.sleep(60)", timeout=0.5).detail


@pytest.mark.engine
@pytest.mark.parametrize("name", doctor.IMPORTS)
def test_what_is_installed_can_be_imported(name):
    found = doctor.check_import(name, doctor.IMPORTS[name])
    assert found.status == "ok", found


def test_ports(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert doctor.check_port(port).status == "fail"
    assert doctor.check_port(port).status == "ok"
    assert doctor.check_port(99999).status == "fail"


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, "ok"),
        ({"http_proxy": ""}, "ok"),
        ({"https_proxy": "http://p:1"}, "warn"),
        ({"HTTP_PROXY": "http://p:1", "no_proxy": "localhost"}, "warn"),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "localhost, 127.0.0.1"}, "ok"),
        ({"ALL_PROXY": "http://p:1", "no_proxy": "*"}, "ok"),
    ],
)
def test_proxies(environment, status):
    assert doctor.check_proxies(environment).status == status


def test_machine_findings(tmp_path):
    assert doctor.check_memory(minimum=0).status == "ok" and doctor.check_memory(minimum=1 << 60).fix
    assert doctor.check_shared_memory(str(tmp_path), 0).status == "ok"
    assert doctor.check_shared_memory(str(tmp_path / "absent")).status == "warn"
    assert doctor.check_shared_memory(str(tmp_path), 1 << 60).fix
    assert doctor.check_open_files(0).status == "ok" and doctor.usable_cores() >= 1
    names = [finding.name for finding in doctor.check_run_dir(tmp_path / "new" / "run")]
    assert names[:2] == ["run directory", "disk"] and not (tmp_path / "new").exists()
    assert next(doctor.check_run_dir(pathlib.Path("/proc/run"))).status == "fail"


def test_the_command_prints_fixes_and_exits_2_on_failure(checkpoint, tmp_path):
    arguments = ["--quick", "--run-dir", str(tmp_path), "--hf-checkpoint", str(checkpoint)]
    fine = CliRunner().invoke(doctor.app, [*arguments, "--json"])
    statuses = {finding["name"]: finding["status"] for finding in json.loads(fine.output)}
    assert statuses["weights"] == "ok" and fine.exit_code == (2 if "fail" in statuses.values() else 0)
    (checkpoint / "config.json").unlink()
    bad = CliRunner().invoke(doctor.app, arguments)
    assert bad.exit_code == 2 and "download the checkpoint again" in re.sub(r"\W*\n\W*", " ", bad.output)


def test_commands_import_nothing_heavy():
    script = (
        "import sys, slime_cli.commands.trace, slime_cli.commands.profile, slime_cli.commands.doctor\n"
        "heavy = {'torch', 'httpx', 'rich.table', 'jinja2', 'psutil', 'sqlite3', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=pathlib.Path(__file__).parents[2])


def test_a_machine_that_cannot_isolate_programs_is_named():
    from slime_cli.rewards.sandbox import SandboxError

    def broken() -> list[str]:
        raise SandboxError("the sandbox did not start")

    assert doctor.check_sandbox(list).status == "ok"
    lacking = doctor.check_sandbox(lambda: ["files are not kept from it (Landlock): Function not implemented"])
    assert lacking.status == "warn" and "Landlock" in lacking.detail and "5.13" in lacking.fix
    assert doctor.check_sandbox(broken).status == "warn" and doctor.check_sandbox().status in ("ok", "warn")


CONTENTS = [
    ("qwen3", "3 turns of a conversation in 2 samples, shown below"),
    ("gemma-2", "2 turns of a conversation in one sample, shown below; refuses a system message: "),
    ("deepseek-r1-distill", "2 turns of a conversation in 2 samples, shown below; refuses tool calls: "),
]


@pytest.mark.parametrize(("name", "detail"), CONTENTS)
def test_what_a_template_trains_is_shown_token_by_token(tmp_path, monkeypatch, capsys, name, detail):
    """Within 80 columns, in plain characters too."""
    monkeypatch.setenv("COLUMNS", "80")
    template = next(t for t in conversations.templates() if t.name == name)
    found = check_training(conversations.checkpoint(template, tmp_path))
    assert found.status == "ok" and found.detail.startswith(detail)
    assert all(len(line) <= 80 for line in found.shown) and any(line.startswith("TRAINED") for line in found.shown)
    if name == "qwen3":
        assert found.shown[0] == "sample 1 of 2, one trajectory"
        assert "TRAINED  <think> \\n E as y . \\n </think>" in "\n".join(found.shown)
    doctor._print([found])
    printed = capsys.readouterr().out
    assert "supervised training, token by token:" in printed and found.shown[-1] in printed


def test_a_template_that_trains_nothing_is_warned_of(tmp_path):
    template = next(t for t in conversations.templates() if t.name == "smollm2")
    folder = conversations.checkpoint(template, tmp_path)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    found = check_training(folder)
    assert found.status == "warn" and "nothing that the chat template writes ends" in found.detail and found.fix
