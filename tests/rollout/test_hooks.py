"""Hooks: found, callable and fitting, or a UsageError that says what to mend."""

import pytest

from slime_cli.buffer.types import Sample
from slime_cli.errors import UsageError
from slime_cli.rollout.hooks import KINDS, accepted, is_async, load, siblings

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
"""


@pytest.fixture
def file(tmp_path):
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
    ],
)
def test_fitting_hooks_load(file, name, kind):
    assert callable(load(f"{file}:{name}", kind))


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("generat", "generate", "did you mean 'generate'"),
        ("NUMBER", "reward", "it is int, not a function"),
        ("generate_sync", "generate", "must be an `async def`"),
        ("sample_filter", "dynamic_filter", "must not be async"),
        ("reward_short", "reward", "too many positional arguments"),
        ("reward_more", "reward", "missing a required argument: 'extra'"),
        ("reward_short", "rollout", "does not accept the call"),
    ],
)
def test_unfit_hooks_are_named(file, name, kind, words):
    with pytest.raises(UsageError) as caught:
        load(f"{file}:{name}", kind)
    assert words in caught.value.message and f"{file}:{name}" in caught.value.message
    assert caught.value.fix


def test_import_paths(tmp_path, monkeypatch):
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


def test_optional_keywords_go_only_where_they_are_taken(file):
    assert accepted(load(f"{file}:generate", "generate"), evaluation=True) == {}
    assert accepted(load(f"{file}:generate_eval", "generate"), evaluation=True) == {"evaluation": True}
    assert accepted(load(f"{file}:reward", "reward"), anything=1) == {"anything": 1}


def test_async_is_seen_through_objects_and_partials(file):
    assert is_async(load(f"{file}:instance", "reward")) and not is_async(load(f"{file}:partial", "reward"))


def test_what_a_generate_function_may_return():
    leased = Sample(index=7, group_index=3, rollout_id=2)
    odd = Sample(index=99, group_index=99, tokens=[1, 2], response_length=1, part=5)
    assert siblings("m.f", leased, leased) == [leased] and siblings("m.f", leased, []) == []
    first, second = siblings("m.f", leased, [odd, odd])
    assert [(s.index, s.group_index, s.rollout_id, s.part, s.tokens) for s in (first, second)] == [(7, 3, 2, 0, [1, 2]), (7, 3, 2, 1, [1, 2])]
    assert first is not second and odd.index == 99


@pytest.mark.parametrize(
    ("result", "said"),
    [(None, "returned NoneType"), ([[Sample(0, 0)]], "a list that holds list"), ([Sample(0, 0), "text"], "a list that holds str"),
     ((Sample(0, 0),), "returned tuple")],
)  # fmt: skip
def test_what_a_generate_function_may_not_return_is_named(result, said):
    with pytest.raises(UsageError, match=f"generate hook 'pkg.mod.agent': it .*{said}") as caught:
        siblings("pkg.mod.agent", Sample(0, 0), result)
    assert "flat list" in caught.value.fix


def test_a_sample_that_does_not_fit_itself_is_named():
    with pytest.raises(ValueError, match="sample 7: loss_mask has 2 entries for 1 response tokens"):
        siblings("m.f", Sample(7, 0), [Sample(0, 0, tokens=[1, 2], response_length=1, loss_mask=[1, 1])])


def test_an_unknown_kind_is_a_programming_error(file):
    with pytest.raises(ValueError, match="did you mean 'reward'"):
        load(f"{file}:reward", "rewards")
    assert str(KINDS["generate"]) == "async f(args, sample, sampling_params, evaluation=)"
