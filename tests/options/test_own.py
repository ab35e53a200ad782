"""slime's own options: the table's invariants."""

import pytest

from slime_cli.app import own_help
from slime_cli.errors import UsageError
from slime_cli.options import catalogue, own
from slime_cli.options.managed import MANAGED
from slime_cli.options.not_yet import NOT_WIRED
from slime_cli.options.resolve import resolve
from slime_cli.options.unread import UNREAD


def test_names_shared_with_megatron_are_the_declared_ones():
    shared = set(own.by_flag()) & set(catalogue.load("megatron").by_flag)
    assert shared == set(own.OWN_OVER_MEGATRON)


def test_no_native_flag_is_hidden_by_a_prefix_or_an_own_name():
    bare = catalogue.load("megatron").by_flag
    assert not [flag for flag in bare if flag.startswith(("--sglang-", "--router-"))]
    for section in ("sglang", "router"):
        spelt = {catalogue.PREFIXES[section] + flag[2:] for flag in catalogue.load(section).by_flag}
        assert not spelt & set(own.by_flag())


def test_dests_and_flags_are_unique_and_every_option_has_a_help():
    assert len({option.dest for option in own.OPTIONS}) == len(own.OPTIONS) == len(own.by_flag())
    assert all(option.help.endswith(".") for option in own.OPTIONS)
    assert all(option.default in (*option.choices, None) for option in own.OPTIONS if option.choices)


def test_what_an_option_needs_is_there():
    for option in own.OPTIONS:
        for need in option.needs:
            found = [own.by_dest()[dest] for dest in need.options]
            assert option not in found and not set(need.values) - set(found[0].choices or ()), option.flag


def test_help_says_what_an_option_needs():
    said = " ".join(own_help("train").split())
    assert "Weight of that divergence. [0.0, with --use-kl-loss]" in said
    assert "[with --loss-type sft_loss]" in said


def test_managed_and_changed_native_options_exist():
    absent = {("megatron", "rank"), ("megatron", "world_size")}  # of other Megatron versions
    for section, dests in MANAGED.items():
        known = catalogue.load(section).by_dest
        assert {(section, dest) for dest in dests if dest not in known} <= absent
    assert UNREAD.keys() <= catalogue.load("megatron").by_dest.keys() and not UNREAD.keys() & MANAGED["megatron"].keys()
    for section, values in own.NATIVE_DEFAULTS.items():
        assert set(values) <= set(catalogue.load(section).by_dest)


def test_engines_sample_as_asked_whatever_the_model_recommends():
    """A chat completion of a generate function's own has no temperature, cut or penalty from generation_config.json."""
    resolved = resolve(["--hf-checkpoint", "m"], [], "serve-rollout")
    assert "--sampling-defaults openai" in " ".join(resolved.sglang_argv())
    with pytest.raises(UsageError, match="preferred-sampling-params"):
        resolve(["--sglang-preferred-sampling-params", '{"repetition_penalty": 1.1}'], [], "serve-rollout")


def test_serve_rollout_reads_own_options_only():
    assert own.SERVE_ROLLOUT <= set(own.by_dest())


@pytest.mark.parametrize("flag", NOT_WIRED)
def test_an_option_that_nothing_reads_yet_is_refused_wherever_it_is_given(flag, tmp_path):
    option = own.by_flag()[flag]
    value = ["3"] if option.type == "int" else [option.choices[0]] if option.choices else []
    with pytest.raises(UsageError, match=f"{flag} has no effect yet"):
        resolve([flag, *value])
    (tmp_path / "mine.yaml").write_text(f"slime: {{{option.dest}: {(value or ['true'])[0]}}}")
    with pytest.raises(UsageError, match=f"{option.dest} has no effect yet"):
        resolve([], [str(tmp_path / "mine.yaml")])
