"""Is an HF checkpoint fit for a run: what :mod:`slime_cli.models.whole` finds, and whether its chat template can be
used.

``slime doctor`` lists all of it; ``train``, ``serve-rollout``, ``convert`` and ``sync`` call :func:`require` before
they start anything. The chat template is rendered as transformers does it, on a conversation of our own.
"""

import os
import pathlib
from collections.abc import Callable, Collection, Iterator

from slime_cli.findings import Finding
from slime_cli.models import whole
from slime_cli.rollout import template

FOLDER = "checkpoint"
CONFIG = "model config"
TOKENIZER = "tokenizer"
TEMPLATE = "chat template"
WEIGHTS = "weights"
IDS = whole.IDS
"""Names of the findings."""


def check_checkpoint(folder: pathlib.Path) -> Iterator[Finding]:
    yield from whole.findings(folder)
    if folder.is_dir():
        yield check_chat_template(folder)


def require(
    folder: str | os.PathLike, say: Callable[[str], None], needed: Collection[str], looked_at: Collection[str] = ()
) -> None:
    """Raises DataError for the first finding of those ``needed`` that fails; ``say`` is told of what else is not well
    with these and with those ``looked_at``. Nothing heavy is imported: it is called before anything is started.
    """
    for finding in check_checkpoint(pathlib.Path(folder)):
        if finding.name in (FOLDER, *needed, *looked_at):
            whole.act_on(finding, folder, finding.name in (FOLDER, *needed), say)


def check_chat_template(folder: pathlib.Path) -> Finding:
    import jinja2

    name = TEMPLATE
    own = "put a chat_template.jinja into the checkpoint"
    try:
        text, tokens = template.read(folder)
        if text is None:
            return Finding(name, "warn", "none: prompts must be plain text", f"for chat prompts {own}")
        render = template.renderer(text, tokens)
        messages = template.CONVERSATION
        try:
            render(messages[:2], True)
        except jinja2.TemplateError:
            messages = messages[1:]  # some templates refuse a system message
            render(messages[:1], True)
        lost = [message["content"] for message in messages if message["content"] not in render(messages, False)]
        rewrite = template.first_rewrite(render, messages)
        end = template.turn_end(folder)
    except jinja2.TemplateSyntaxError as error:
        return Finding(name, "fail", f"line {error.lineno}: {error.message}", own)
    except ValueError as error:  # a file beside the template cannot be read
        return Finding(name, "fail", str(error), whole.AGAIN)
    except Exception as error:  # a template may call anything: all it raises is the finding
        return Finding(name, "fail", f"{type(error).__name__}: {error}", own)
    if lost:
        return Finding(name, "fail", f"leaves out the content {lost[0]!r}", own)
    endless = end.problem() if end is not None else ""
    if endless or rewrite:
        fix = (
            "supervised training makes a sample of each part (--on-rewritten-turns, --opened-thinking); a function "
            "that generates several turns must append tokens, never render the conversation anew"
        )
        problems = filter(None, (endless, rewrite and f"not append-only: {rewrite}"))
        return Finding(name, "warn", "; ".join(problems), template.END_FIX if endless else fix)
    system = "" if messages is template.CONVERSATION else "; takes no system message"
    ending = f"; {end.text!r} ends a turn" if end is not None else ""
    return Finding(name, "ok", f"renders, append-only{ending}{system}")
