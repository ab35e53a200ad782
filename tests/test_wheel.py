"""The wheel as a user installs it: its requirements resolve, and its commands start without the repository.

The environment is a new one that borrows the installed packages of this one, all but slime itself.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]


def run(*words: str | os.PathLike, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    apart = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "UV_CONSTRAINT")}
    return subprocess.run([*map(str, words)], cwd=cwd, env=apart, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "slime_cli", folder / "slime_cli", ignore=shutil.ignore_patterns("__pycache__"))
    built = run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", ".", cwd=folder
    )
    assert built.returncode == 0, built.stderr
    return next((folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def slime(wheel, tmp_path_factory):
    """Runs ``slime WORDS`` as installed from the wheel, in a folder that has nothing to do with the repository."""
    folder = tmp_path_factory.mktemp("user")
    made = run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    assert made.returncode == 0, made.stderr
    python = folder / "env" / "bin" / "python"
    put = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    assert put.returncode == 0, put.stderr
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    where = run(python, "-c", "import slime_cli; print(slime_cli.__file__)", cwd=folder)
    assert str(packages) in where.stdout, where
    return lambda *words: run(folder / "env" / "bin" / "slime", *words, cwd=folder)


def test_the_requirements_of_the_wheel_resolve(wheel, tmp_path):
    """As `pip install` would, from the registry's metadata; where there is no network, from what setting up fetched."""
    (tmp_path / "wanted.in").write_text(f"slime-cli @ {wheel.as_uri()}\n")
    words = [
        pathlib.Path(sys.executable).with_name("uv"),
        "pip",
        "compile",
        "--no-header",
        "--no-annotate",
        "wanted.in",
    ]
    words += ["--python", sys.executable]
    done = run(*words, cwd=tmp_path)
    if done.returncode and "No solution found" not in done.stderr:
        done = run(*words, "--offline", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "sglang==" in done.stdout and "megatron-core==" in done.stdout


def test_help_lists_the_commands(slime):
    done = slime("--help")
    assert done.returncode == 0 and "serve-rollout" in done.stdout, done.stderr


def test_doctor_names_every_engine(slime):
    done = slime("doctor", "--quick", "--json")
    assert done.returncode == 0 and '"megatron-bridge"' in done.stdout, done.stdout + done.stderr


def test_a_dry_run_finds_the_profiles_and_tables_that_ship_with_it(slime):
    done = slime("train", "--profile", "quickstart", "--dry-run")
    assert done.returncode == 0 and "tensor parallel in an engine" in done.stdout, done.stdout + done.stderr
