"""Hooks: found, callable and fitting, or a UsageError that says what to fix."""

import pathlib

import numpy as np
import pytest
import torch

from slime_cli.buffer.types import Sample, Status
from slime_cli.errors import UsageError
from slime_cli.hooks.kinds import Hook, accepted, awaited, is_async, load, may_be_async, siblings
from slime_cli.hooks.table import KINDS

MODULE = """
import functools
import neighbour
NUMBER = neighbour.NUMBER
async def generate(args, sample, sampling_params): return sample
async def generate_eval(args, sample, sampling_params, evaluation=False): return sample
def generate_sync(args, sample, sampling_params): return sample
def reward(args, sample, **kwargs): return 1.0
def reward_short(args): return 1.0
def reward_more(args, sample, extra): return 1.0
async def sample_filter(args, samples): return True
class Source:
    def __init__(self, args): self.args = args
class Callable:
    async def __call__(self, args, sample): return 1.0
instance = Callable()
partial = functools.partial(reward_more, extra=1)
def hook(args, sample, *, rollout_id=None, evaluation=False): return None
def tis(args, *, pg_loss, **kw): return pg_loss
def logged(function):
    @functools.wraps(function)
    def call(*a, **k): return function(*a, **k)
    return call
@logged
async def hidden(args, sample, sampling_params=None): return 1.0
@logged
async def loss(args, batch, logits, sum_of_sample_mean): return 1.0
def advantage(args, rollout_data): return rollout_data["nothing"]
def pg_loss_reducer(*a): return lambda losses: losses["nothing"]
"""


@pytest.fixture
def file(tmp_path: pathlib.Path) -> str:
    (tmp_path / "neighbour.py").write_text("NUMBER = 3\n")
    (tmp_path / "mine.py").write_text(MODULE)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("generate", "generate"),
        ("generate_eval", "generate"),
        ("reward", "reward"),
        ("reward", "group_reward"),
        ("instance", "reward"),
        ("partial", "reward"),
        ("Source", "data_source"),
        ("hook", "sample_hook"),
        ("reward", "sample_hook"),
        ("tis", "tis"),
        ("sample_filter", "dynamic_filter"),
        ("hidden", "generate"),
        ("hidden", "dynamic_filter"),
    ],
)
def test_fitting_hooks_load(file: str, name: str, kind: str):
    assert callable(load(f"{file}:{name}", kind))


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("generat", "generate", "did you mean 'generate'"),
        ("NUMBER", "reward", "it is int, not a function"),
        ("generate_sync", "generate", "must be an `async def`"),
        ("sample_filter", "reward_post_process", "must not be async"),
        ("reward_short", "reward", "too many positional arguments"),
        ("reward_more", "reward", "missing a required argument: 'extra'"),
        ("reward_short", "rollout", "does not accept the call"),
    ],
)
def test_unfit_hooks_are_named(file: str, name: str, kind: str, words: str):
    with pytest.raises(UsageError) as caught:
        load(f"{file}:{name}", kind)
    assert words in caught.value.message and f"{file}:{name}" in caught.value.message
    assert caught.value.fix


def test_import_paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hook_pkg_a.py").write_text("def f(args, sample): return 0.5\n")
    (tmp_path / "hook_pkg_b.py").write_text("import not_there_at_all\n")
    (tmp_path / "hook_pkg_c.py").write_text("x = 1\nraise ValueError('boom')\n")
    (tmp_path / "hook_pkg_d.py").write_text("def f(:\n")
    assert load("hook_pkg_a.f", "reward")(None, None) == 0.5
    cases = {
        "hook_pkg_none.f": "there is no module 'hook_pkg_none'",
        "hook_pkg_b.f": "importing it raised ModuleNotFoundError: No module named 'not_there_at_all'",
        "hook_pkg_c.f": f"ValueError: boom at {tmp_path / 'hook_pkg_c.py'}:2",
        f"{tmp_path / 'hook_pkg_c.py'}:f": f"ValueError: boom at {tmp_path / 'hook_pkg_c.py'}:2",
        "hook_pkg_d.f": f"at {tmp_path / 'hook_pkg_d.py'}:1",
        f"{tmp_path / 'hook_pkg_e.py'}:f": "did you mean 'hook_pkg_",
        "f": "not an import path",
    }
    for path, words in cases.items():
        with pytest.raises(UsageError) as caught:
            load(path, "reward")
        assert words in caught.value.message


def test_optional_keywords_go_only_where_they_are_taken(file: str):
    assert accepted(load(f"{file}:generate", "generate"), evaluation=True) == {}
    assert accepted(load(f"{file}:generate_eval", "generate"), evaluation=True) == {"evaluation": True}
    assert accepted(load(f"{file}:reward", "reward"), anything=1) == {"anything": 1}


def test_async_is_seen_through_objects_and_partials(file: str):
    assert is_async(load(f"{file}:instance", "reward")) and not is_async(load(f"{file}:partial", "reward"))


def test_what_a_generate_function_may_return():
    leased = Sample(index=7, group_index=3, rollout_id=2)
    odd = Sample(index=99, group_index=99, tokens=[1, 2], response_length=1, part=5)
    assert siblings("m.f", leased, leased) == [leased] and siblings("m.f", leased, []) == []
    first, second = siblings("m.f", leased, [odd, odd])
    assert [(s.index, s.group_index, s.rollout_id, s.part, s.tokens) for s in (first, second)] == [
        (7, 3, 2, 0, [1, 2]),
        (7, 3, 2, 1, [1, 2]),
    ]
    assert first is not second and odd.index == 99


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned NoneType"),
        ([[Sample(0, 0)]], "a list that holds list"),
        ([Sample(0, 0), "text"], "a list that holds str"),
        ((Sample(0, 0),), "returned tuple"),
    ],
)
def test_what_a_generate_function_may_not_return_is_named(result: object, said: str):
    with pytest.raises(UsageError, match=f"generate hook 'pkg.mod.agent': it .*{said}") as caught:
        siblings("generate hook 'pkg.mod.agent': it", Sample(0, 0), result)
    assert "flat list" in caught.value.fix


def test_arrays_flags_and_names_become_plain_values():
    odd = Sample(
        0,
        0,
        tokens=np.array([1, 2, 3]),
        response_length=np.int64(2),
        loss_mask=[True, np.float32(0)],
        remove_sample=1,
        status="truncated",
        rollout_log_probs=[np.float32(-1), torch.tensor(-2.0)],
        weight_versions=[3],
    )
    (made,) = siblings("f", Sample(7, 0), odd)
    want = Sample(
        7,
        0,
        tokens=[1, 2, 3],
        response_length=2,
        loss_mask=[1, 0],
        remove_sample=True,
        status=Status.TRUNCATED,
        rollout_log_probs=[-1.0, -2.0],
        weight_versions=["3"],
    )
    assert made == want and made.status is Status.TRUNCATED
    assert {*map(type, [*made.tokens, *made.loss_mask, made.response_length])} == {int}
    made.check(4)


def test_an_unknown_kind_is_a_programming_error(file: str):
    with pytest.raises(ValueError, match="did you mean 'reward'"):
        load(f"{file}:reward", "rewards")
    assert str(KINDS["generate"]) == "async f(args, sample, sampling_params, evaluation=)"


async def test_a_coroutine_function_behind_a_plain_wrapper_is_seen_and_awaited(file: str):
    hidden = load(f"{file}:hidden", "reward")
    assert not is_async(hidden) and may_be_async(hidden)
    assert await awaited(hidden(None, None)) == 1.0 and await awaited(2.0) == 2.0


def test_what_a_function_of_the_trainer_raises_names_its_line_and_a_coroutine_is_refused(file: str):
    line = MODULE.split("\n").index('def advantage(args, rollout_data): return rollout_data["nothing"]') + 1
    with pytest.raises(
        UsageError, match=f"advantage hook '{file}:advantage' raised KeyError: 'nothing' at {file}:{line}$"
    ):
        Hook.load(f"{file}:advantage", "advantage")(None, {})
    reducer = Hook.load(f"{file}:pg_loss_reducer", "pg_loss_reducer")(1, 2, 3, 4)
    with pytest.raises(UsageError, match=f"raised KeyError: 'nothing' at {file}:{line + 1}$"):
        reducer({})
    with pytest.raises(UsageError, match="loss hook .* must not be async"):
        Hook.load(f"{file}:loss", "loss")(None, None, None, None)


# -- files of several folders
# -------------------------------------------------------------------------------------------------


def folders(tmp_path: pathlib.Path, **files: str) -> list[str]:
    """Each file in folder a and in folder b, ``HERE`` standing for the folder's name; a double underscore makes a
    folder."""
    for name, text in files.items():
        for folder in ("a", "b"):
            path = tmp_path / folder / (name.replace("__", "/").replace("/INIT", "/__init__") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("HERE", repr(folder)))
    return [str(tmp_path / folder / "reward.py:score") for folder in ("a", "b")]


IMPORTS = {
    "import helpers": "helpers.NAME",
    "import helpers as other": "other.NAME",
    "from helpers import NAME": "NAME",
    "from .helpers import NAME": "NAME",
    "import parts.inner": "parts.inner.NAME",
    "import parts.inner as i": "i.NAME",
    "from parts import inner": "inner.NAME",
    "import deep": "deep.NAME",
    "import bare.leaf": "bare.leaf.NAME",
    "from parts.inner import *": "NAME",
}
"""Statement -> what to look at. The last is none that a function may hold."""


@pytest.mark.parametrize(
    ("statement", "late"), [*((s, False) for s in IMPORTS), *((s, True) for s in list(IMPORTS)[:-1])]
)
def test_files_of_two_folders_each_get_their_own_neighbours(tmp_path: pathlib.Path, statement: str, late: bool):
    value = IMPORTS[statement]
    head = "" if late else statement
    body = f"    {statement}\n" if late else ""
    a, b = folders(
        tmp_path,
        helpers="NAME = HERE",
        parts__INIT="",
        parts__inner="from helpers import NAME",
        bare__leaf="NAME = HERE",
        deep="def _():\n    import helpers\n    return helpers.NAME\nNAME = _()",
        reward=f"{head}\ndef score(args, sample):\n{body}    return {value}\n",
    )
    first = load(a, "reward")
    second = load(b, "reward")
    assert (first(None, None), second(None, None), load(a, "reward")(None, None)) == ("a", "b", "a")


def test_a_neighbour_shadows_neither_python_nor_a_library_nor_slime(tmp_path: pathlib.Path):
    a, _ = folders(
        tmp_path,
        json="raise SystemExit(HERE)",
        numpy="raise SystemExit(HERE)",
        slime_cli__INIT="raise SystemExit(HERE)",
        reward=(
            "import json, numpy, slime_cli.errors\ndef score(args, sample): return numpy.__version__ + json.__file__ +"
            " slime_cli.errors.__file__\n"
        ),
    )
    assert str(tmp_path) not in load(a, "reward")(None, None)


def test_what_everybody_can_import_from_the_same_file_is_imported_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    a, b = folders(tmp_path, shared="NAME = HERE", reward="import shared\ndef score(args, sample): return shared\n")
    monkeypatch.syspath_prepend(tmp_path / "a")
    first = load(a, "reward")(None, None)
    second = load(b, "reward")(None, None)
    assert first.__name__ == "shared" and first.NAME == "a" and second.NAME == "b"


def test_a_file_that_fails_to_load_can_be_fixed_and_loaded_again(tmp_path: pathlib.Path):
    a, _ = folders(tmp_path, reward="import helpers\nraise ValueError(helpers.NAME)", helpers="NAME = HERE")
    with pytest.raises(UsageError, match=f"ValueError: a at {tmp_path}/a/reward.py:2"):
        load(a, "reward")
    (tmp_path / "a" / "reward.py").write_text(
        "def score(args, sample): return 'fixed, and longer than it was before'\n"
    )
    assert load(a, "reward")(None, None).startswith("fixed")
