"""Kinds of functions: each has an option, the page lists them all, and none is there that nothing calls."""

import pathlib

from slime_cli.hooks.table import KINDS, page
from slime_cli.options import own
from slime_cli.options.not_yet import NOT_YET

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "hooks.md"


def test_the_page_lists_every_kind_as_it_is():
    assert page() in PAGE.read_text(), "python -m slime_cli.hooks.table prints it"


def test_every_kind_has_an_option_and_every_option_for_a_function_a_kind():
    options = {kind.option for kind in KINDS.values()}
    assert options <= own.by_dest().keys() and not {kind.flag for kind in KINDS.values()} & NOT_YET.keys()
    named = {dest for dest in own.by_dest() if dest.endswith(("_function_path", "_hook_path"))}
    assert named <= options
