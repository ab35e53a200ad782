"""docs/conversations.md says what is trained."""

from bench.conversations_page import PAGE, page


def test_the_page_is_what_its_command_writes():
    assert PAGE.read_text(encoding="utf-8") == page(), "make conversations writes it again"
