"""Optimizer state of one dict as that of a chain of two, and the other way round; genuine ones are in
``test_matrix.py``."""

import types

import pytest

pytestmark = pytest.mark.engine  # it imports Megatron

LR = 3e-4
DECAYED, OTHER = {"wd_mult": 1.0, "lr_mult": 1.0}, {"wd_mult": 0.0, "lr_mult": 1.0}


def group(options: dict, expert: bool, **more) -> dict:
    return options | {"is_expert_parallel": expert, "is_decoupled_lr": False} | more


def optimizer(*groups: dict) -> types.SimpleNamespace:
    return types.SimpleNamespace(param_groups=list(groups))


DENSE = optimizer(group(DECAYED, False), group(OTHER, False))
EXPERTS = optimizer(group(DECAYED, True))


def distributed(*groups: dict) -> dict:
    return {"optimizer": {"param_groups": list(groups)}, "param_state_sharding_type": "fully_reshardable"}


def test_a_chain_of_two_is_loaded_as_one():
    from slime_cli.training.network.chained import fitted

    saved = {
        0: distributed(group(OTHER, False, lr=LR, step=4), group(DECAYED, False, lr=LR, step=4)),
        1: distributed(group(DECAYED, True, lr=LR, step=4)),
    }
    got = fitted(saved | {"param_state": "tensors"}, [DENSE])
    want = distributed(group(DECAYED, False, lr=LR, step=4), group(OTHER, False, lr=LR, step=4))
    assert got == want | {"param_state": "tensors"}


def test_one_is_loaded_as_a_chain_of_two():
    from slime_cli.training.network.chained import fitted

    saved = distributed(group(DECAYED, False, lr=LR, step=4), group(OTHER, False, lr=2 * LR, step=4))
    got = fitted(saved | {0: {"param_state": "dense"}, 1: {"param_state": "experts"}}, [DENSE, EXPERTS])
    assert got == {
        0: saved | {"param_state": "dense"},
        1: distributed(group(DECAYED, True, lr=LR, step=4)) | {"param_state": "experts"},
    }


def test_parameters_are_this_runs_where_groups_name_them():
    from slime_cli.training.network.chained import fitted

    saved = {
        "state": {"common_step": 4},
        "param_groups": [group(OTHER, False, lr=2 * LR, params=[0]), group(DECAYED, False, lr=LR, params=[1, 2])],
    }
    own = {
        0: {"state": {0: "a", 1: "b"}, "param_groups": [{"params": [0]}, {"params": [1]}]},
        1: {"state": {0: "c"}, "param_groups": [{"params": [0]}]},
    }
    assert fitted(saved | own, [DENSE, EXPERTS]) == {
        0: {
            "state": {0: "a", 1: "b", "common_step": 4},
            "param_groups": [group(DECAYED, False, lr=LR, params=[0]), group(OTHER, False, lr=2 * LR, params=[1])],
        },
        1: {"state": {0: "c", "common_step": 4}, "param_groups": [group(DECAYED, True, lr=LR, params=[0])]},
    }


def test_what_was_saved_as_this_run_has_it_stays_as_it_is():
    from slime_cli.training.network.chained import fitted

    for same in ({0: {"a": 1}, 1: {"b": 2}}, distributed(group(DECAYED, False))):
        assert fitted(same, [DENSE, EXPERTS]) is same
