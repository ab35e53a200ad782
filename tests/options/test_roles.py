"""``--megatron-config-path``: one role's Megatron options, or a message that says what is wrong and where."""

import re

import pytest

from slime_cli.errors import UsageError
from slime_cli.options import roles


def write(folder, text: str) -> str:
    path = folder / "roles.yaml"
    path.write_text(text)
    return str(path)


def test_a_roles_options_by_dest(tmp_path):
    path = write(tmp_path, "megatron:\n  - role: critic\n    lr: 2.0e-5\n    lr-warmup-iters: 3\n")
    assert roles.read(path, "critic") == {"lr": 2e-5, "lr_warmup_iters": 3}
    assert roles.read(write(tmp_path, "megatron: []\n"), "critic") == {}


@pytest.mark.parametrize(
    "text, words",
    [
        ("megatron: {lr: 1}", "list of maps"),
        ("lr: 1", "list of maps"),
        ("megatron:\n  - role: actress\n", "'actress'.*critic"),
        ("megatron:\n  - lr: 1.0\n", "role None"),
        ("megatron:\n  - role: critic\n  - role: critic\n", "twice"),
        ("megatron:\n  - role: critic\n    lrr: 1.0\n", "no such option.*lr"),
        ("megatron:\n  - role: critic\n    train_iters: 3\n", "set by slime"),
        ("megatron: [", "not readable"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, text, words):
    with pytest.raises(UsageError) as error:
        roles.read(write(tmp_path, text), "critic")
    assert re.search(words, f"{error.value} {error.value.fix}", re.S)


def test_a_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        roles.read(str(tmp_path / "none.yaml"), "critic")
