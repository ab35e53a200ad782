"""Words that the project does not use, in the package's texts (docstrings, help, messages) and in the documentation.

Subject, verb, object; the field's own words. Many readers have English as a second language.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
FORBIDDEN = {
    r"goes on|go on|going on|went on": "continues, resumes, happens",
    r"mend|mends|mended|mending": "fix",
    r"told apart|tell apart|tells apart|telling apart": "distinguished, known by",
    r"predicts? further tokens?": "multi-token-prediction (MTP)",
}


def texts(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Line and text of everything that a reader or user sees."""
    if path.suffix == ".md":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def problems(path: pathlib.Path) -> list[str]:
    out = []
    for line, text in texts(path):
        if path.suffix == ".py" and re.match(r"Of\b", text):
            out.append(f"line {line} begins with 'Of': say what it is")
        for words, better in FORBIDDEN.items():
            if found := re.search(rf"\b({words})\b", text, re.IGNORECASE):
                out.append(f"line {line} says {found[0]!r}: {better}")
    return out


def test_the_words_of_texts():
    files = [*(ROOT / "slime_cli").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    found = {path.relative_to(ROOT).as_posix(): what for path in files if (what := problems(path))}
    assert found == {}
