"""26 kinds of conversation over public chat templates: what is trained, judged by what is there to read.

The judge knows nothing of masks: it renders with transformers, and finds out by words that each message alone says.
"""

import itertools
import json
import re

import pytest

from bench import conversations
from bench.conversations import KINDS, Kind, Template
from slime_cli.buffer.types import RowError, Sample, Status

TEMPLATES = conversations.templates()
MARKED = re.compile(r"[SQARTCD]\d+[a-z]+")
"""Words that one message alone says."""
MARKUP = set(
    """think tool_call function functions parameter parameters arguments argument name word count look_up json id type
    invoke minimax arg_key arg_value channel analysis commentary final message call assistant to constrain start end
    says that thinks first""".split()
)
"""Words that a trained turn may hold beside its own marked ones."""


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    return {t.name: conversations.renderer(t, tmp_path_factory.mktemp("t") / t.name) for t in TEMPLATES}


def turns(kind: Kind) -> list[tuple[int, dict]]:
    """What is to be trained: places and messages."""
    if kind.label is not None:
        return [(len(kind.messages), {"role": "assistant", "content": kind.label})]
    found = [(i, m) for i, m in enumerate(kind.messages) if m["role"] == "assistant"]
    return [(i, m) for i, m in found if m.get("step_loss_mask", 1)]


def renderings(renderer, kind: Kind, count: int) -> set[str]:
    """The prompt for the turn after ``count`` messages, as transformers renders it in each form of the messages."""
    found = set()
    for null, arguments, name in itertools.product(("", None), (dict, str), ("reasoning_content", "thinking")):
        messages = []
        for given in kind.messages[:count]:
            message = {name if key == "reasoning_content" else key: value for key, value in given.items()}
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
            message["content"] = null if message["content"] is None else message["content"]
            for call in message.get("tool_calls", ()):
                inner = call["function"]
                value = json.loads(inner["arguments"]) if isinstance(inner["arguments"], str) else inner["arguments"]
                new = inner | {"arguments": json.dumps(value) if arguments is str else value}
                message["tool_calls"] = [c | {"function": new} if c is call else c for c in message["tool_calls"]]
            messages.append(message)
        more = renderer.options.template_kwargs | ({"tools": kind.tools} if kind.tools else {})
        try:
            found.add(
                renderer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
            )
        except Exception:  # this form is none for the template
            continue
    return found


def runs(sample: Sample) -> list[tuple[int, int]]:
    """Where trained tokens begin and end."""
    start = len(sample.tokens) - sample.response_length
    flags = [0] * start + list(sample.effective_mask()) + [0]
    edges = [i for i, (a, b) in enumerate(zip([0, *flags], flags, strict=False)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def words_of(message: dict) -> set[str]:
    return set(MARKED.findall(json.dumps(message, ensure_ascii=False)))


def judge(renderer, template: Template, kind: Kind, samples: list[Sample]) -> None:
    tokenizer = renderer.tokenizer
    stops = {tokenizer.convert_tokens_to_ids(text) for text in template.stops}
    found = [(sample, run) for sample in samples for run in runs(sample)]
    assert len(found) == len(turns(kind)), "as many trained stretches as turns to train"
    for (sample, (start, end)), (i, message) in zip(found, turns(kind), strict=True):
        text = tokenizer.decode(sample.tokens[start:end])
        assert set(MARKED.findall(text)) == words_of(message), text
        plain = re.sub("|".join(map(re.escape, sorted({*template.special, *template.stops}, key=len))), " ", text)
        rest = set(re.findall(r"[A-Za-z_]{2,}", MARKED.sub("", plain)))
        assert rest <= MARKUP, rest - MARKUP
        assert sample.tokens[end - 1] in stops and not stops & set(sample.tokens[start : end - 1]), text
        assert tokenizer.decode(sample.tokens[:start]) in renderings(renderer, kind, i), "its prompt is an engine's"
    for number, sample in enumerate(samples):
        sample.check()
        assert (sample.index, sample.part, sample.status) == (7, number, Status.COMPLETED)
        begins = sample.tokens.count(tokenizer.bos_token_id) if template.bos else 0
        assert begins == (template.bos is not None and sample.tokens[0] == tokenizer.bos_token_id) or (
            template.bos in template.special + template.stops
        )


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_every_kind_is_trained_as_it_should_be_or_refused_with_a_fix(renderers, template):
    renderer = renderers[template.name]
    refused = []
    for kind in KINDS:
        try:
            samples = renderer.example(kind.row()).samples(Sample(7, 3))
        except RowError as error:
            assert error.fix and error.message.startswith("rows.jsonl:1: ")
            refused.append((kind.name, error.kind))
        else:
            try:
                judge(renderer, template, kind, samples)
            except AssertionError as error:
                raise AssertionError(f"{template.name}: {kind.name}") from error
    assert ("empty answer", "empty_answer") in refused
    always = {"one answer", "prompt and label", "two turns", "first turn not trained", "contents in parts"}
    assert not always & {name for name, _ in refused}
    if template.name in ("qwen3", "qwen3-2507-thinking", "qwq-32b", "glm-4.7", "minimax-m2"):
        assert [name for name, _ in refused] == ["empty answer"]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_control_tokens_that_a_user_writes_are_text(renderers, template):
    """The conversation has the same control tokens in the same order as with harmless words in their place."""
    renderer = renderers[template.name]
    kind = next(kind for kind in KINDS if kind.name == "control tokens in the question")
    harmless = Kind("", json.loads(json.dumps(kind.messages).replace(json.dumps(conversations.ENDS)[1:-1], "words")))

    def control(one: Kind) -> list[list[int]]:
        ids = renderer.tokens.ids
        return [[t for t in s.tokens if t in ids] for s in renderer.example(one.row()).samples(Sample(0, 0))]

    assert control(kind) == control(harmless)
    prompt = renderer.prompt(Kind("", kind.messages[:1]).row()).tokens
    assert [t for t in prompt if t in renderer.tokens.ids] == [
        t for t in renderer.prompt(Kind("", harmless.messages[:1]).row()).tokens if t in renderer.tokens.ids
    ], "in a prompt for reinforcement learning too"
    assert prompt[-1] != renderer.tokenizer.eos_token_id


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_turns_that_are_kept_are_trained_alike_in_one_sample(renderers, tmp_path, template):
    """Each word that others say is read once, in its order, whatever the template makes of earlier turns."""
    renderer = conversations.renderer(template, tmp_path, rewritten_turns="keep")
    decode = renderer.tokenizer.decode
    for kind in KINDS:
        try:
            apart = renderers[template.name].example(kind.row()).samples(Sample(7, 3))
        except RowError:
            continue
        if (template.name, kind.name) == ("glm-4.7", "two answers in a row"):
            continue  # nothing ends the first where the second follows it
        (sample,) = renderer.example(kind.row()).samples(Sample(7, 3))
        found = runs(sample)
        trained = [decode(sample.tokens[a:b]) for a, b in found]
        assert trained == [decode(s.tokens[a:b]) for s in apart for a, b in runs(s)], kind.name
        edges = [0, *itertools.chain(*found), len(sample.tokens)]
        read = "".join(decode(sample.tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True))
        last = turns(kind)[-1][0]
        words = [w for m in kind.messages[:last] if m["role"] in ("user", "tool") for w in MARKED.findall(str(m))]
        assert [w for w in MARKED.findall(read) if w[0] in "QT"] == words, kind.name
        untrained = [w for w in MARKED.findall(read) if w[0] in "ARC"]
        assert set(untrained) <= {w for m in kind.messages if "step_loss_mask" in m for w in words_of(m)}, kind.name


OPENS = ["qwq-32b", "deepseek-v3", "deepseek-v3.1-thinking", "deepseek-r1-distill", "glm-4.7", "minimax-m2"]
"""Their generation prompts open ``<think>``, and a turn without reasoning has none."""


@pytest.mark.parametrize("name", OPENS)
def test_an_opening_that_is_cut_leaves_the_templates_own_turns(tmp_path, name):
    """Which only grow then: one sample."""
    template = next(t for t in TEMPLATES if t.name == name)
    renderer = conversations.renderer(template, tmp_path, opened_thinking="cut")
    kind = next(kind for kind in KINDS if kind.name == "two turns")
    (sample,) = renderer.example(kind.row()).samples(Sample(7, 3))
    decode = renderer.tokenizer.decode
    trained = [decode(sample.tokens[a:b], skip_special_tokens=True) for a, b in runs(sample)]
    assert trained == ["A1says that", "A3says that"]
    assert "<think>" not in decode(sample.tokens)


@pytest.mark.parametrize("name", ["qwen3", "mistral-nemo", "gpt-oss", *OPENS])
def test_what_is_not_to_be_matched_or_to_fan_out_is_refused(tmp_path, name):
    template = next(t for t in TEMPLATES if t.name == name)
    renderer = conversations.renderer(template, tmp_path, opened_thinking="refuse", rewritten_turns="refuse")
    kind = next(kind for kind in KINDS if kind.name == "three turns, system")
    with pytest.raises(RowError) as caught:
        renderer.example(kind.row())
    assert caught.value.kind == ("opened_thinking" if name in OPENS else "rewritten") and caught.value.fix


def test_the_judge_sees_what_is_wrong(renderers):
    """A mask that leaves the end out, one that takes the question in, one that loses a turn."""
    template = next(t for t in TEMPLATES if t.name == "qwen2.5-instruct")
    renderer = renderers[template.name]
    kind = next(kind for kind in KINDS if kind.name == "two turns")
    (good,) = renderer.example(kind.row()).samples(Sample(7, 3))
    judge(renderer, template, kind, [good])
    mask = good.effective_mask()
    first = mask.index(0)
    wrong = [[*mask[:-1], 0], [*mask[: first + 2], *[1] * (len(mask) - first - 2)], [0] * first + mask[first:]]
    for changed in wrong:
        good.loss_mask = list(changed)
        with pytest.raises(AssertionError):
            judge(renderer, template, kind, [good])
