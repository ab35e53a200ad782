"""What each rank of an engine keeps of a version's tensors: how SGLang's dense models name, fuse, pad and share them.

A rank's tensor is one or more published ones (parts), of each a range of rows or of columns, one under the other, and
rows of zeros behind. Everything is by name and shape, so that a tensor is never needed whole. Torch-free;
:mod:`slime_cli.weights.verification` sums up what comes out.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""How SGLang names what HF keeps apart, in the order in which it puts it together, row under row."""
_PADDED = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight")
_KEYS_VALUES = re.compile(r".*\.(k_proj|v_proj)\.(weight|bias)")
_ROWS = re.compile(r".*\.(q_proj|gate_proj|up_proj)\.(weight|bias)")
_COLUMNS = re.compile(r".*\.(o_proj|down_proj)\.weight")
_PLAIN = re.compile(r"(.*\.)?(embed_tokens|lm_head|qkv_proj|gate_up_proj|o_proj|down_proj|\w*norm)\.(weight|bias)")
_DRAFT = "draft."
"""What SGLang puts before the names of the layers that draft."""
_SHARED = re.compile(r"draft\.((?:model\.embed_tokens|lm_head)\.weight)")
_MIMO = re.compile(
    r"draft\.model\.(?:mtp_block\.)?((?<=block\.).*|(?:token_|hidden_|final_)layernorm\..*|input_proj\..*)"
)
"""A tensor of MiMo's one MTP layer."""
_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of these rows."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank among those that share an engine's model by tensor parallelism."""

    place: int = 0
    of: int = 1
    kv_heads: int = 0
    """Heads of keys and values of the model; 0 where that is not known, which is enough for a rank alone."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A range of a part's rows, or of its columns. Rows may end behind the part's last one: those are zeros."""

    axis: int
    begin: int
    end: int


@functools.lru_cache(maxsize=65536)
def parts_of(name: str) -> tuple[str, ...]:
    """HF names of the tensors that the engine's tensor ``name`` is made of.

    Of layers that draft MiMo's are known, and what they share with the model; others keep a name that no tensor of a
    version has."""
    if found := _SHARED.fullmatch(name):
        name = found[1]
    elif found := _MIMO.fullmatch(name):
        name = f"model.mtp_layers.0.{found[1]}"
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return tuple(name.replace(fused, part) for part in parts)
    return (name,)


def is_plain(name: str) -> bool:
    """An engine's tensor that has the shape of its parts, one under the other. Of others the bytes alone may agree."""
    return _PLAIN.fullmatch(name) is not None and not name.startswith(_DRAFT)


def cut(part: str, shape: Sequence[int], rank: Rank) -> Cut | None:
    """What ``rank`` keeps of the published tensor ``part``; None where that is not known."""
    return _cut(part, tuple(shape), rank)


@functools.lru_cache(maxsize=65536)
def _cut(part: str, shape: tuple[int, ...], rank: Rank) -> Cut | None:
    rows = shape[0] if shape else 1
    if _PADDED.fullmatch(part):
        return _share(0, rows + -rows % _MULTIPLE, rank.place, rank.of)
    if rank.of == 1:
        return Cut(0, 0, rows)
    if _KEYS_VALUES.fullmatch(part):
        heads = rank.kv_heads
        if not heads or rows % heads:
            return None
        if heads < rank.of:  # several ranks keep the same one
            return None if rank.of % heads else _share(0, rows, rank.place // (rank.of // heads), heads)
        return _share(0, rows, rank.place, rank.of) if heads % rank.of == 0 else None
    if _ROWS.fullmatch(part):
        return _share(0, rows, rank.place, rank.of)
    if _COLUMNS.fullmatch(part):
        return _share(1, shape[1], rank.place, rank.of)
    return Cut(0, 0, rows)


def _share(axis: int, length: int, place: int, of: int) -> Cut | None:
    each = length // of
    return None if length % of else Cut(axis, place * each, (place + 1) * each)


def kept(chunks: Iterable[bytes], shape: Sequence[int], size: int, cuts: Sequence[Cut]) -> Iterator[tuple[int, bytes]]:
    """(index in ``cuts``, bytes that belong to it) as the part is read once; zeros behind its end included.

    ``size``: bytes of an element. A chunk may end anywhere between two elements.
    """
    rows = shape[0] if shape else 1
    row = size
    for length in shape[1:]:
        row *= length
    begun = 0
    rest = b""
    for chunk in chunks:
        whole = rest + chunk if rest else chunk
        ends = len(whole) // row * row
        for index, cut in enumerate(cuts):
            if cut.axis:
                piece = _columns(whole[:ends], row, cut, row // shape[1])
            else:  # a row need not be whole
                piece = chunk[max(cut.begin * row - begun, 0) : max(cut.end * row - begun, 0)]
            if piece:
                yield index, piece
        begun += len(chunk)
        rest = whole[ends:] if any(cut.axis for cut in cuts) else b""
    for index, cut in enumerate(cuts):
        if cut.axis == 0 and cut.end > rows:
            yield index, bytes((cut.end - max(cut.begin, rows)) * row)


def _columns(whole: bytes, row: int, cut: Cut, column: int) -> bytes:
    """The columns of rows that are whole."""
    first, last = cut.begin * column, cut.end * column
    return b"".join(whole[at + first : at + last] for at in range(0, len(whole), row))
