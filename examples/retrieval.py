"""Search in a local index within an answer, as often as the model asks for it.

It writes ``<search>words</search>``. The engine stops there; the best passages are appended as text that is not
trained, and the model continues. The answer is what it writes in ``<answer>...</answer>``.

The index is Okapi BM25 (Robertson and Zaragoza, 2009) over a file of JSON lines, ``{"title": ..., "text": ...}``: a few
thousand passages are searched in milliseconds. For millions, ask an index server in the place of ``search``.
"""

import collections
import functools
import json
import math
import pathlib
import re

from slime_cli import hooks

SEARCHES = 3
PASSAGES = 2
CLOSE = ["</search>"]
CORPUS = pathlib.Path(__file__).parent / "data" / "passages.jsonl"
K1, B = 1.2, 0.75
SYSTEM = (
    "Look things up before you answer: write <search>words</search> and passages are written behind it. "
    "Then write the answer alone as <answer>...</answer>."
)


async def generate(args, sample, sampling_params):
    """``--custom-generate-function-path``. Keys of ``--custom-config-path``: retrieval_corpus, retrieval_close."""
    engine = hooks.engine(args)
    close = getattr(args, "retrieval_close", CLOSE)
    if not sample.response_length and isinstance(sample.prompt, str):  # else it is continued after an interruption
        question = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sample.prompt}]
        sample.tokens = hooks.render(args, question)
    found = index(str(getattr(args, "retrieval_corpus", CORPUS)))
    stops = {"stop": [*close, *(sampling_params.get("stop") or [])]}
    turn = sample.metadata.setdefault("turn", {"searches": 0, "begin": 0})  # what a continued call must know
    while True:
        await engine.generate(sample, sampling_params | stops)
        query = asked(sample.response[turn["begin"] :], close)
        if sample.status is not hooks.Status.COMPLETED or query is None or turn["searches"] == SEARCHES:
            break
        passages = "\n".join(f"({p['title']}) {p['text']}" for p in found.search(query, PASSAGES))
        hooks.append_text(args, sample, f"\n<result>{passages or 'nothing was found'}</result>\n")
        turn |= {"searches": turn["searches"] + 1, "begin": len(sample.response)}
    return sample


def asked(text, closes=CLOSE):
    """The words of the search in a turn's text, which the engine ended at its closing mark; None where it has none."""
    ends = [text.index(mark) for mark in closes if mark in text]
    return text[: min(ends)].rpartition("<search>")[2][-200:] if ends else None


class Index:
    """BM25 over passages."""

    def __init__(self, passages):
        self.passages = passages
        self.counts = [collections.Counter(words(f"{p['title']} {p['text']}")) for p in passages]
        self.lengths = [sum(counts.values()) for counts in self.counts]
        self.mean = sum(self.lengths) / max(len(passages), 1)
        self.holding = collections.defaultdict(list)  # word -> passages that have it
        for i, counts in enumerate(self.counts):
            for word in counts:
                self.holding[word].append(i)

    def search(self, query, most):
        """The best passages, best first; none that has no word of the query."""
        scores = collections.Counter()
        for word in set(words(query)):
            holding = self.holding.get(word, [])
            rarity = math.log(1 + (len(self.passages) - len(holding) + 0.5) / (len(holding) + 0.5))
            for i in holding:
                count = self.counts[i][word]
                scores[i] += rarity * count * (K1 + 1) / (count + K1 * (1 - B + B * self.lengths[i] / self.mean))
        return [self.passages[i] for i, _ in sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:most]]


@functools.cache
def index(path):
    """One a process, and read once."""
    return Index([json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.strip()])


def words(text):
    return re.findall(r"\w+", text.lower())


def reward(args, sample):
    """``--custom-rm-path``: 1 where the answer's words are the label's (exact match)."""
    answers = re.findall(r"<answer>(.*?)</answer>", sample.response, re.DOTALL)
    return float(bool(answers) and words(answers[-1]) == words(sample.label))
