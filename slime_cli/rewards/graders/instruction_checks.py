"""Instructions about the form of an answer, each checked by a function of the answer and the instruction's arguments.

The names are those of IFEval (Zhou et al. 2023) and IFBench (Pyatkin et al. 2025), which data sets have;
docs/rewards.md says what each asks for. A function's parameters behind ``text`` are its arguments, all needed.
Registered by :func:`instruction`, called by :mod:`.instructions`. Every function reads the text once.
"""

import collections
import json
import operator
import re
import string
from collections.abc import Callable
from typing import Any

from slime_cli.rewards.graders.answers import GraderError

CHECKS: dict[str, Callable[..., bool]] = {}
RELATIONS = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "more than": operator.gt,
    "exactly": operator.eq,
}
ABBREVIATIONS = frozenset("mr mrs ms dr prof st vs etc no fig eq e.g i.e cf approx jr sr u.s u.k a.m p.m".split())
SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?:\s+|\Z)")
LONGEST_WORD = 40
CLOSING = string.punctuation + "“”‘’…–— "
EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf\u2b50\u2b55\ufe0f\u200d]+")
SCRIPTS = {
    "ko": "[가-힣]",
    "th": "[\u0e01-\u0e5b]",
    "bn": "[\u0980-\u09ff]",
    "ta": "[\u0b80-\u0bff]",
    "te": "[\u0c00-\u0c7f]",
    "kn": "[\u0c80-\u0cff]",
    "ml": "[\u0d00-\u0d7f]",
    "gu": "[\u0a80-\u0aff]",
    "pa": "[\u0a00-\u0a7f]",
    "el": "[\u0370-\u03ff]",
    "he": "[\u0590-\u05ff]",
    "ja": "[ぁ-ヿ一-鿿]",
    "zh": "[一-鿿]",
}
COMMON_WORDS = {
    "en": "the and of to is in that it was for with as are this",
    "de": "der die das und ist nicht ein eine mit zu den von für auf",
    "fr": "le la les et est des une du dans que pour pas sur avec",
    "es": "el los las y es una del que en por con para su como",
    "it": "il di che è e un una per non sono con della gli nel",
    "pt": "o os e é um uma do da que em não para com dos",
}


def instruction(name: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    def registered(check: Callable[..., bool]) -> Callable[..., bool]:
        CHECKS[name] = check
        return check

    return registered


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, as IFEval counts them: "don't" is two."""
    return re.findall(r"\w+", text)


def plain_words(text: str) -> list[str]:
    """Words between blanks, without the punctuation around them."""
    return [word for token in text.split() if (word := token.strip(CLOSING))]


def sentences(text: str) -> list[str]:
    """What ends in a period, an exclamation or question mark before a blank, and what is left behind the last."""
    out = []
    begin = 0
    for found in SENTENCE_END.finditer(text):
        before = text[max(begin, found.start() - LONGEST_WORD) : found.start()].split()
        last = before[-1].strip("\"'“”‘’([*_").lower() if before else ""
        if found[0][0] == "." and (last in ABBREVIATIONS or re.fullmatch("[a-z]", last)):
            continue
        out.append(text[begin : found.end()].strip())
        begin = found.end()
    return [sentence for sentence in (*out, text[begin:].strip()) if re.search(r"\w", sentence)]


def holds(count: int, relation: str, bound: Any) -> bool:
    if relation not in RELATIONS:
        raise GraderError(f"ifbench: the relation {relation!r} is none of {', '.join(RELATIONS)}")
    return RELATIONS[relation](count, int(bound))


def count_of(word: str, text: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


# -- IFEval ------------------------------------------------------------------------------------------------------------


@instruction("keywords:existence")
def has_keywords(text: str, keywords: list[str]) -> bool:
    return all(count_of(word, text) for word in keywords)


@instruction("keywords:frequency")
def keyword_count(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return holds(count_of(keyword, text), relation, frequency)


@instruction("keywords:forbidden_words")
def lacks_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


@instruction("keywords:letter_frequency")
def letter_count(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return holds(text.lower().count(letter.lower()), let_relation, let_frequency)


@instruction("language:response_language")
def in_language(text: str, language: str) -> bool:
    """By its script, or by which of six languages its most common words are of; other languages are refused."""
    if language in SCRIPTS:
        letters = [letter for letter in text if letter.isalpha()]
        own = sum(1 for letter in letters if re.match(SCRIPTS[language], letter))
        kana = re.search("[ぁ-ヿ]", text) is not None
        return own > len(letters) / 2 and (language not in ("zh", "ja") or kana == (language == "ja"))
    if language not in COMMON_WORDS:
        known = ", ".join(sorted([*SCRIPTS, *COMMON_WORDS]))
        raise GraderError(f"ifbench: the language {language!r} cannot be recognised; these can: {known}")
    said = collections.Counter(word.lower() for word in words(text))
    scores = {name: sum(said[word] for word in common.split()) for name, common in COMMON_WORDS.items()}
    return scores[language] > 0 and scores[language] == max(scores.values())


@instruction("length_constraints:number_sentences")
def sentence_count(text: str, num_sentences: int, relation: str) -> bool:
    return holds(len(sentences(text)), relation, num_sentences)


@instruction("length_constraints:number_words")
def word_count(text: str, num_words: int, relation: str) -> bool:
    return holds(len(words(text)), relation, num_words)


@instruction("length_constraints:number_paragraphs")
def paragraph_count(text: str, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\*\*\*", text)]
    inside = parts[bool(not parts[0]) : len(parts) - bool(not parts[-1])]
    return len(inside) == int(num_paragraphs) and all(inside)


@instruction("length_constraints:nth_paragraph_first_word")
def first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    place = int(nth_paragraph) - 1
    found = plain_words(parts[place]) if len(parts) == int(num_paragraphs) and 0 <= place < len(parts) else []
    return bool(found) and found[0].lower() == first_word.lower()


@instruction("detectable_content:number_placeholders")
def placeholder_count(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= int(num_placeholders)


@instruction("detectable_content:postscript")
def has_postscript(text: str, postscript_marker: str) -> bool:
    letters = [letter for letter in postscript_marker if letter.isalpha()]
    return re.search(r"(?<!\w)" + r"\.? ?".join(letters) + r"(?!\w)", text, re.IGNORECASE) is not None


@instruction("detectable_format:number_bullet_lists")
def bullet_count(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?![*])|-(?!-)|•)[ \t]*\S", text, re.MULTILINE)) == int(num_bullets)


@instruction("detectable_format:constrained_response")
def constrained(text: str) -> bool:
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


@instruction("detectable_format:number_highlighted_sections")
def highlight_count(text: str, num_highlights: int) -> bool:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", text)
    return sum(1 for bold, light in found if (bold or light).strip()) >= int(num_highlights)


@instruction("detectable_format:multiple_sections")
def section_count(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter)}\s+\d+", text)) >= int(num_sections)


@instruction("detectable_format:json_format")
def is_json(text: str) -> bool:
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        text = re.sub(r"\A(?i:json)\b", "", text[3:-3])
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:title")
def has_title(text: str) -> bool:
    return any(inside.strip("<> ") for inside in re.findall(r"<<([^\n<>]+)>>", text))


@instruction("combination:two_responses")
def two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    given = [part for part in parts if part]
    return len(given) == 2 and given[0] != given[1] and all(parts[1:-1])


@instruction("combination:repeat_prompt")
def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("startend:end_checker")
def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def is_quoted(text: str) -> bool:
    inside = text.strip()
    return len(inside) > 2 and inside[0] == inside[-1] == '"'


@instruction("change_case:capital_word_frequency")
def capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return holds(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


@instruction("change_case:english_capital")
def all_capitals(text: str) -> bool:
    return text.isupper()


@instruction("change_case:english_lowercase")
def no_capitals(text: str) -> bool:
    return text.islower()


@instruction("punctuation:no_comma")
def no_comma(text: str) -> bool:
    return "," not in text and "，" not in text


# -- IFBench -----------------------------------------------------------------------------------------------------------


@instruction("count:word_count_range")
def words_between(text: str, min_words: int, max_words: int) -> bool:
    return int(min_words) <= len(words(text)) <= int(max_words)


@instruction("count:unique_word_count")
def unique_words(text: str, N: int) -> bool:
    return len({word.lower() for word in plain_words(text)}) >= int(N)


@instruction("count:numbers")
def number_count(text: str, N: int) -> bool:
    return len(re.findall(r"\d+(?:[.,]\d+)*", text)) == int(N)


@instruction("words:repeats")
def few_repeats(text: str, small_n: int) -> bool:
    said = collections.Counter(word.lower() for word in plain_words(text))
    return max(said.values(), default=0) <= int(small_n)


@instruction("words:no_consecutive")
def no_alliteration(text: str) -> bool:
    letters = [word[0].lower() for word in plain_words(text)]
    return all(one != other for one, other in zip(letters, letters[1:], strict=False))


@instruction("words:prime_lengths")
def prime_lengths(text: str) -> bool:
    sizes = {sum(map(str.isalnum, word)) for word in plain_words(text)}
    return bool(sizes) and all(size > 1 and all(size % d for d in range(2, int(size**0.5) + 1)) for size in sizes)


@instruction("words:alphabet")
def alphabetical_starts(text: str) -> bool:
    letters = [word[0].lower() for word in plain_words(text)]
    places = [string.ascii_lowercase.find(letter) for letter in letters]
    follows = all((one + 1) % 26 == other for one, other in zip(places, places[1:], strict=False))
    return bool(places) and -1 not in places and follows


@instruction("sentence:increment")
def growing_sentences(text: str, small_n: int) -> bool:
    sizes = [len(plain_words(sentence)) for sentence in sentences(text)]
    return bool(sizes) and all(other - one == int(small_n) for one, other in zip(sizes, sizes[1:], strict=False))


@instruction("sentence:keyword")
def keyword_in_sentence(text: str, word: str, N: int) -> bool:
    found = sentences(text)
    place = int(N) - 1
    return 0 <= place < len(found) and word.lower() in [one.lower() for one in plain_words(found[place])]


@instruction("format:newline")
def word_per_line(text: str) -> bool:
    lines = [line.split() for line in text.strip().splitlines()]
    return bool(lines) and all(len(line) == 1 for line in lines)


@instruction("format:no_whitespace")
def no_whitespace(text: str) -> bool:
    inside = text.strip()
    return bool(inside) and not re.search(r"\s", inside)


@instruction("format:emoji")
def sentences_end_in_emoji(text: str) -> bool:
    pieces = [piece for piece in re.split(r"(?<=[.!?])\s+(?!" + EMOJI.pattern + r")|\n+", text.strip()) if piece]
    return bool(pieces) and all(EMOJI.match(piece.rstrip(CLOSING)[-1:]) for piece in pieces)


@instruction("format:list")
def list_with_separator(text: str, sep: str) -> bool:
    return text.count(sep) >= 2


@instruction("format:options")
def one_of_options(text: str, options: list[str] | str) -> bool:
    named = re.split(r"\s*(?:/|,|\bor\b)\s*", options) if isinstance(options, str) else options
    said = text.strip().strip(".)( \"'").lower()
    return said in [one.strip().strip(".)( \"'").lower() for one in named if one.strip()]


@instruction("format:title_case")
def title_case(text: str) -> bool:
    found = [word for word in plain_words(text) if word[0].isalpha()]
    return bool(found) and all(word[0].isupper() and word[1:] == word[1:].lower() for word in found)


@instruction("format:output_template")
def output_template(text: str) -> bool:
    places = [text.find(head) for head in ("My Answer:", "My Conclusion:", "Future Outlook:")]
    return -1 not in places and places == sorted(places)


@instruction("custom:multiples")
def multiples_of_seven(text: str) -> bool:
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]
