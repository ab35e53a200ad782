"""No file of the working directory takes a library's place in a child, and users' functions there are found all the
same.
"""

import os
import pathlib
import subprocess
import sys
import types

import pytest

from slime_cli import processes
from slime_cli.buffer.types import Sample
from slime_cli.rewards.rewards import RewardPool

ROOT = str(pathlib.Path(processes.__file__).parents[1])
HOSTILE = (
    "h2",
    "json",
    "torch",
    "typing_extensions",
    "random",
    "socket",
    "types",
    "pickle",
    "asyncio",
    "multiprocessing",
    "typer",
    "httpx",
)
LIBRARIES = "import json, random, socket, types, pickle, typing_extensions, httpx"


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A working directory with scripts named like libraries; each ends the process that imports it."""
    here = tmp_path / "here"
    here.mkdir()
    for name in HOSTILE:
        (here / f"{name}.py").write_text(f"raise SystemExit('{name} of the working directory was imported')\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", ROOT)
    return here


def child(code: str, folder: pathlib.Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Runs ``code`` as a module of ``folder`` in a child that is started as slime starts its own."""
    (folder / "child_probe.py").write_text(code)
    environment = environment or processes.environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment["PYTHONPATH"], str(folder))))
    return subprocess.run(processes.python("child_probe"), env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "given", ["", os.pathsep, ".", "HERE", f"{os.pathsep}/somewhere", f"HERE{os.pathsep}/somewhere"]
)
def test_a_child_has_no_working_directory_on_its_import_path(hostile, monkeypatch, given):
    monkeypatch.setenv("PYTHONPATH", given.replace("HERE", str(hostile)))
    done = child(
        f"{LIBRARIES}, sys; from slime_cli import processes; print(processes.__file__); print(sys.path)", hostile.parent
    )
    assert done.returncode == 0, done.stderr
    found, path = done.stdout.splitlines()
    assert found == processes.__file__  # this slime, not another that is installed
    assert f"'{hostile}'" not in path and "''" not in path and ("/somewhere" in path) == ("/somewhere" in given)


def test_what_a_child_starts_by_python_m_is_safe_as_well_and_users_programs_are_as_anywhere(hostile):
    (hostile.parent / "grandchild.py").write_text(LIBRARIES)
    done = child(
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-m', 'grandchild']).returncode)",
        hostile.parent,
    )
    assert done.returncode == 0, done.stderr
    (hostile / "neighbour.py").write_text("")
    (hostile / "judge.py").write_text("import neighbour")
    for users, code in ((True, 0), (False, 1)):
        environment = processes.environment(users_functions=users)
        assert (
            subprocess.run([sys.executable, hostile / "judge.py"], env=environment, capture_output=True).returncode
            == code
        )


def test_proxies_are_off_for_local_addresses_where_any_is_set(monkeypatch):
    for name in (*processes._PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert "no_proxy" not in processes.environment()
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    monkeypatch.setenv("no_proxy", "example.org")
    found = processes.environment()
    assert found["no_proxy"] == "example.org,127.0.0.1,localhost,::1" and found["NO_PROXY"] == "127.0.0.1,localhost,::1"
    assert "https_proxy" not in processes.without_proxies(found) and "PATH" in processes.without_proxies(found)


def test_users_functions_in_the_working_directory_are_found_and_libraries_find_nothing_there(hostile):
    (hostile / "my_module.py").write_text(
        "import my_helper\ndef score(args, sample):\n    import late\n    return late.VALUE\n"
    )
    (hostile / "my_helper.py").write_text("import absent")
    (hostile / "absent.py").write_text("")
    (hostile / "late.py").write_text("VALUE = 1.0")
    (hostile.parent / "library.py").write_text(
        "try:\n    import h2\nexcept ImportError:\n    pass"
    )  # not installed; a script is here
    library = hostile / ".venv" / "lib" / "site-packages"
    library.mkdir(parents=True)
    (library / "nearer_library.py").write_text("try:\n    import h2\nexcept ImportError:\n    pass")
    code = f"""
from slime_cli.hooks import kinds as hooks
for path in ("my_module.score", "my_module.py:score"):
    score = hooks.load(path, "reward")
    assert score(None, None) == 1.0
{LIBRARIES}, library, sys
sys.path.append({str(library)!r})
import nearer_library
assert {str(hostile)!r} not in sys.path and "h2" not in sys.modules
"""
    done = child(code, hostile.parent)
    assert done.returncode == 0, done.stderr


def test_a_process_that_another_program_started_enters_the_user_s_folder_without_importing_from_it(hostile):
    code = f"""
import os, sys
from slime_cli import processes
sys.path[:0] = ["", {str(hostile)!r}]
processes.enter({str(hostile)!r})
{LIBRARIES}
assert os.getcwd() == {str(hostile)!r} and os.environ["PYTHONSAFEPATH"] == "1"
processes.enter("/no/such/folder")
assert os.getcwd() == {str(hostile)!r}
"""
    done = child(code, hostile.parent)
    assert done.returncode == 0, done.stderr


def test_the_command_line_by_python_m_imports_nothing_from_the_working_directory(hostile):
    # What Python itself imports to run a module comes before slime's first line.
    (hostile / "types.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "slime_cli", "--version"],
        env=os.environ | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.startswith("slime "), done.stderr


def test_a_working_directory_that_was_removed_is_said(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); from slime_cli.__main__ import run; raise"
        " SystemExit(run(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True
    )
    assert (
        done.returncode == 2
        and done.stderr == "error: the working directory does not exist any more\nfix: cd to one that does\n"
    )


async def test_a_reward_worker_imports_libraries_and_finds_the_user_s_module(hostile):
    (hostile / "my_reward.py").write_text(
        "import json, typing_extensions\n\ndef score(args, sample):\n    return"
        " float(len(json.dumps(sample.response)))\n"
    )
    names = ("rm_type", "rm_url", "group_rm", "reward_key")
    args = types.SimpleNamespace(
        **dict.fromkeys(names), custom_rm_path="my_reward.score", rm_timeout=20.0, rm_workers=1
    )
    async with RewardPool.from_args(args) as pool:
        assert await pool.score(Sample(0, 0, response="abc"), args) == 5.0
