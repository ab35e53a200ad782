"""docs/moving.md says what the tables say that the code reads."""

from bench.moving_page import PAGE, page


def test_the_page_is_what_its_command_writes():
    assert PAGE.read_text() == page(), "make options writes it again"
