"""Rewards that compare texts as texts: ``exact`` and ``f1``."""

import collections
import string
from typing import Any

from slime_cli.rewards.graders.answers import after_thinking, need_label


def grade_exact(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    return float(response.strip() == need_label(label, "exact").strip())


def f1_tokens(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as SQuAD's metric has them (Rajpurkar et al. 2016)."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in text.split() if word not in ("a", "an", "the")]


def grade_f1_hotpotqa(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """HotpotQA's rule on top of F1: yes, no and noanswer count only as the whole answer (Yang et al. 2018)."""
    ours, truth = (" ".join(f1_tokens(text)) for text in (after_thinking(response), need_label(label, "f1")))
    if ours != truth and {ours, truth} & {"yes", "no", "noanswer"}:
        return 0.0
    return grade_f1(response, label, metadata, index)


def grade_f1(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """Harmonic mean of token precision and recall; 1 when both texts have no token left."""
    ours = f1_tokens(after_thinking(response))
    truth = f1_tokens(need_label(label, "f1"))
    if not ours or not truth:
        return float(ours == truth)
    shared = sum((collections.Counter(ours) & collections.Counter(truth)).values())
    return 2.0 * shared / (len(ours) + len(truth))
