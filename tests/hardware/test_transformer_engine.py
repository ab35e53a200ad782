"""Transformer Engine is used where it loads; a package that is there and does not is said, not used."""

import importlib
import sys

import pytest

from slime_cli.hardware import transformer_engine

BROKEN = {
    "OSError: libcublas.so.13: cannot open shared object file": (
        "raise OSError('libcublas.so.13: cannot open shared object file')"
    ),
    "ImportError: undefined symbol: _ZN3c10": "raise ImportError('undefined symbol: _ZN3c10')",
    "RuntimeError: built for torch 2.9": "raise RuntimeError('built for torch 2.9\\nmore of it')",
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a package of that name on the import path, whose part for torch has the given text."""
    for name in [name for name in sys.modules if name.partition(".")[0] == transformer_engine.NAME]:
        monkeypatch.delitem(sys.modules, name)

    def put(text: str) -> None:
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").write_text("")
        (tmp_path / "transformer_engine" / "pytorch.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    yield put
    transformer_engine.forget()


def test_one_that_loads_is_used_on_a_gpu_and_not_on_a_cpu(install):
    install("VALUE = 1")
    assert transformer_engine.problem.__wrapped__("cuda") is None
    assert transformer_engine.problem.__wrapped__("cpu") == ""


@pytest.mark.parametrize(("said", "text"), BROKEN.items(), ids=list(BROKEN))
def test_one_that_does_not_load_is_said_and_leaves_nothing_behind(install, said, text):
    install(text)
    found = transformer_engine.problem.__wrapped__("cuda")
    assert "is installed and does not load" in found and found.endswith(said) and "\n" not in found
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]


def test_none_is_no_problem_worth_a_word(install):
    assert transformer_engine.problem.__wrapped__("cuda") == ""
