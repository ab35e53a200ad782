"""Transformer Engine is used where it loads; a package that is there and does not is said, not used."""

import argparse
import importlib
import sys

import pytest

from slime_cli.commands import preflight
from slime_cli.errors import UsageError
from slime_cli.hardware import transformer_engine
from slime_cli.options import catalogue
from slime_cli.options.resolve import resolve

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


# -- --transformer-impl ------------------------------------------------------------------------------------------------

ASKED = ["--lr", "1", "--transformer-impl", "transformer_engine"]


@pytest.mark.parametrize(
    ("why", "given", "layers"),
    [
        (None, [], "transformer_engine"),
        (None, ASKED, "transformer_engine"),
        (None, ["--transformer-impl", "local"], "local"),
        (None, [*ASKED, "--transformer-impl", "local"], "local"),
        ("", [], "local"),
        ("it is broken", [], "local"),
        (None, ["--post-mlp-layernorm"], "local"),
        (None, ["--experimental-attention-variant", "gated_delta_net"], "local"),
    ],
)
def test_its_layers_are_used_where_it_loads_unless_local_ones_are_asked_for(monkeypatch, why, given, layers):
    monkeypatch.setattr(transformer_engine, "problem", lambda kind: why)
    assert transformer_engine.layers("cuda", given) == layers


def test_what_slime_adds_to_megatrons_options_is_of_local_layers():
    assert {option.flag for option in catalogue.ADDED["megatron"]} < set(transformer_engine.LOCAL_ONLY)


def test_a_model_whose_layers_are_local_ones_alone_cannot_have_its(monkeypatch):
    monkeypatch.setattr(transformer_engine, "problem", lambda kind: None)
    with pytest.raises(UsageError, match="--qk-layernorm-over-heads asks for among local ones alone"):
        transformer_engine.layers("cuda", [*ASKED, "--qk-layernorm-over-heads"])


@pytest.mark.parametrize(
    ("kind", "why", "said"),
    [("cuda", "", "no such package is installed"), ("cuda", "it is broken", "it is broken"), ("cpu", "", "on a CPU")],
)
def test_layers_that_are_asked_for_and_not_there_are_an_error(monkeypatch, kind, why, said):
    monkeypatch.setattr(transformer_engine, "problem", lambda kind: why)
    with pytest.raises(UsageError, match=said):
        transformer_engine.layers(kind, ASKED)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transformer_impl": "local"}, "local layers have no FP8"),
        ({"fp8_recipe": "delayed"}, "--fp8-recipe delayed"),
        ({"fp8_param_gather": True}, "--fp8-param-gather"),
    ],
)
def test_fp8_that_is_not_trained_is_refused(options, said):
    given = dict(fp8="e4m3", fp8_recipe="blockwise", transformer_impl="transformer_engine", fp8_param_gather=False)
    transformer_engine.check(argparse.Namespace(**given))
    with pytest.raises(UsageError, match=said):
        transformer_engine.check(argparse.Namespace(**given | options))


@pytest.mark.parametrize("words", ["--transformer-impl transformer_engine", "--fp8-format e4m3"])
def test_a_cpu_refuses_them_before_the_run_starts(words):
    with pytest.raises(UsageError, match="CPU"):
        preflight._machine(resolve(f"--hf-checkpoint h --loss-type sft_loss {words}".split()), {}, None)
