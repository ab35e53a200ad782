"""Packed attention and split-vocabulary log-probabilities against float64 references. Runs in ``layout_worker.py``.

Every case returns its largest differences by name; ``test_attention.py`` holds them to tolerances.
"""

import random

import torch
from megatron.core import mpu
from megatron.core.transformer import TransformerConfig

from slime_cli.training.batching import packs
from slime_cli.training.network import attention
from slime_cli.training.network.logprobs import token_entropy, token_log_probs

LENGTHS = {
    "one": [1],
    "ones": [1, 1, 1],
    "ragged": [5, 1, 17, 3, 8, 16, 2, 9],
    "powers": [1, 2, 4, 8, 16, 32],
    "long_and_short": [61, 1, 1, 33, 2],
    "many": [random.Random(0).randint(1, 40) for _ in range(50)],
}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (6, 1)}
DIM = 8


def softmax_attention(q, k, v):
    """softmax(q k' / sqrt(d)) v of one sequence and one head, each position over itself and those before; [L, d]
    each."""
    scores = (q @ k.T) / DIM**0.5
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def naive(q, k, v, lengths):
    """The same over a pack [T, heads, d]: every sequence alone, query head h with key head h // (heads / groups)."""
    share = q.size(1) // k.size(1)
    out = []
    start = 0
    for n in lengths:
        s = slice(start, start + n)
        out.append(
            torch.stack(
                [softmax_attention(q[s, h], k[s, h // share], v[s, h // share]) for h in range(q.size(1))], dim=1
            )
        )
        start += n
    return torch.cat(out).flatten(1)


def core(heads: int, groups: int):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * DIM,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=DIM,
        attention_dropout=0.0,
    )
    return attention.PackedAttention(config, 1, None, "self")


def inputs(total, heads, groups):
    generator = torch.Generator().manual_seed(total)
    return [
        torch.randn(total, n, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (heads, groups, groups)
    ]


def gap(a, b) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def relative_gap(got, want) -> float:
    """Over several tensors, to the largest number wanted: a sum is off by roundings of its terms, also where it is 0 or
    small."""
    return max(map(gap, got, want)) / max(float(x.abs().max()) for x in want)


def packed(lengths, heads, groups, dtype) -> dict[str, float]:
    q, k, v = inputs(sum(lengths), heads, groups)
    weight = torch.randn(sum(lengths), heads * DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = naive(q, k, v, lengths)
    want_gradients = torch.autograd.grad((want * weight).sum(), (q, k, v))
    mine = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    got = core(heads, groups)(*mine, packed_seq_params=packs.pack(lengths, torch.device("cpu")))
    gradients = torch.autograd.grad((got * weight.to(dtype)).sum(), mine)
    return {"out": relative_gap([got], [want]), "gradient": relative_gap(gradients, want_gradients)}


CONTINUED = ([5, 3, 1, 4, 9, 2, 6, 5], [-1, 0, 0, -1, -1, 4, 4, 3])
"""Lengths of a pack's sequences, and the one that each continues."""


def continued(heads, groups, dtype) -> dict[str, float]:
    """Sequences that continue others of the pack, against each with what it continues before it."""
    lengths, prefix_N = CONTINUED
    parts = [slice(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]
    q, k, v = inputs(sum(lengths), heads, groups)
    weight = torch.randn(sum(lengths), heads * DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = []
    for own, prefix in zip(parts, prefix_N):
        whole = [torch.cat([x[parts[prefix]], x[own]]) if prefix >= 0 else x[own] for x in (q, k, v)]
        want.append(naive(*whole, [len(whole[0])])[-(own.stop - own.start) :])
    want = torch.cat(want)
    want_gradients = torch.autograd.grad((want * weight).sum(), (q, k, v))
    mine = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    pack = packs.pack(lengths, torch.device("cpu"), prefix_N=prefix_N)
    got = core(heads, groups)(*mine, packed_seq_params=pack)
    gradients = torch.autograd.grad((got * weight.to(dtype)).sum(), mine)
    positions = [*range(5), 5, 6, 7, 5, *range(4), *range(9), 9, 10, *range(9, 15), *range(4, 9)]
    return {
        "out": relative_gap([got], [want]),
        "gradient": relative_gap(gradients, want_gradients),
        "positions": gap(pack.positions_T, torch.tensor(positions)),
    }


def unpacked() -> dict[str, float]:
    """[s, b, heads, d] without packing, as Megatron calls it outside of packs."""
    heads = 4
    groups = 2
    s = 7
    b = 3
    q, k, v = (x.view(b, s, -1, DIM) for x in inputs(b * s, heads, groups))
    want = torch.stack([naive(q[i], k[i], v[i], [s]) for i in range(b)], dim=1)
    got = core(heads, groups)(*(x.transpose(0, 1) for x in (q, k, v)))
    return {"out": gap(got, want)}


def places() -> dict[str, float]:
    """How many tokens are not where the rectangles say, over all shapes; how much padding the worst of them has."""
    wrong = 0
    padding = 0.0
    rng = random.Random(1)
    shapes = [
        *LENGTHS.values(),
        *([rng.randint(1, 2 ** rng.randint(0, 9)) for _ in range(rng.randint(1, 40))] for _ in range(200)),
    ]
    for lengths in shapes:
        shape = packs.rectangles(lengths)
        flat = torch.cat([g.flatten() for g in shape.queries])
        wrong += int((flat[shape.scatter_T] != torch.arange(sum(lengths))).sum())
        wrong += len(shape.scatter_T) - len(shape.scatter_T.unique())
        rows = sorted(tuple(row.tolist()) for g in shape.queries for row in g)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        for row, (start, n) in (
            zip(rows, sorted(zip(starts, lengths))) if rows and len(rows) == len(lengths) else [((), (0, -1))]
        ):
            wrong += row[:n] != tuple(range(start, start + n))
        padding = max(padding, len(flat) / sum(lengths))
    return {"wrong": wrong, "padding": padding}


def zigzag(lengths, size) -> dict[str, float]:
    """Every context parallel rank's part of a pack in turn, over keys and values as a gather gives them."""
    heads = 4
    groups = 2
    whole = inputs(sum(lengths), heads, groups)
    weight = torch.randn(sum(lengths), heads * DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = naive(*whole, lengths)
    want_gradients = torch.autograd.grad((want * weight).sum(), whole)
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    cuts = [packs.Cut(rank, size) for rank in range(size)]
    held = []
    for cut in cuts:
        owner_T, place_T = (torch.from_numpy(x) for x in packs.places(lengths, cut))
        real_T = place_T < torch.tensor(lengths)[owner_T]
        held.append((torch.where(real_T, starts[owner_T] + place_T, 0), real_T))
    q, k, v = ([torch.where(real_T[:, None, None], x[at_T], 1e3) for at_T, real_T in held] for x in whole)
    seen = []
    loss = 0.0
    worst = 0.0
    for cut, own, (at_T, real_T) in zip(cuts, q, held):
        got = core(heads, groups)(
            own, torch.cat(k), torch.cat(v), packed_seq_params=packs.pack(lengths, torch.device("cpu"), cut)
        )
        worst = max(worst, gap(got[real_T], want[at_T[real_T]]))
        loss = loss + (got[real_T] * weight[at_T[real_T]]).sum()
        seen += at_T[real_T].tolist()
    gradients = torch.autograd.grad(loss, whole)
    shares = [int(real_T.sum()) for _, real_T in held]
    return {
        "out": worst,
        "gradient": max(gap(a, b) for a, b in zip(gradients, want_gradients)),
        "not_once": float(sorted(seen) != list(range(sum(lengths)))),
        "uneven": float(max(map(len, q)) - min(map(len, q))),
        "shares": max(shares),
    }


def isolation() -> dict[str, float]:
    """What one sequence's output changes by when every other sequence of the pack becomes huge: nothing."""
    lengths = LENGTHS["ragged"]
    q, k, v = (x.detach() for x in inputs(sum(lengths), 4, 2))
    pack = packs.pack(lengths, torch.device("cpu"))
    before = core(4, 2)(q, k, v, packed_seq_params=pack)
    worst = 0.0
    start = 0
    for n in lengths:
        own = torch.zeros(sum(lengths), dtype=torch.bool)
        own[start : start + n] = True
        poisoned = [torch.where(own[:, None, None], x, 1e30) for x in (q, k, v)]
        worst = max(worst, gap(core(4, 2)(*poisoned, packed_seq_params=pack)[own], before[own]))
        start += n
    return {"out": worst}


def everything() -> dict[str, dict[str, float]]:
    out = {"unpacked": unpacked(), "places": places(), "isolation": isolation()}
    out |= {
        f"zigzag-{name}-{size}": zigzag(LENGTHS[name], size)
        for name in ("one", "ragged", "long_and_short", "many")
        for size in (2, 3, 4)
    }
    return out | every_pack()


def every_pack() -> dict[str, dict[str, float]]:
    out = {
        f"continued-{kind}-{str(dtype).removeprefix('torch.')}": continued(heads, groups, dtype)
        for kind, (heads, groups) in HEADS.items()
        for dtype in (torch.float64, torch.float32)
    }
    for name, lengths in LENGTHS.items():
        for kind, (heads, groups) in HEADS.items():
            out[f"{name}-{kind}-float64"] = packed(lengths, heads, groups, torch.float64)
            out[f"{name}-{kind}-float32"] = packed(lengths, heads, groups, torch.float32)
    return out


def log_probs() -> dict[str, dict[str, float]]:
    """Over this rank's slice of the vocabulary, against log_softmax in float64 over the whole of it."""
    tp = mpu.get_tensor_model_parallel_world_size()
    rank = mpu.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(0)
    whole_TV = torch.randn(23, 64, generator=generator, dtype=torch.float64) * 6
    whole_TV[3] = 40.0  # equal logits, and far from zero
    whole_TV[4, 7] = 1e4  # certainty
    targets_T = torch.randint(0, 64, (23,), generator=generator)
    weight_T = torch.randn(23, generator=generator, dtype=torch.float64)
    keep_TV = (torch.rand(23, 64, generator=generator) < 0.1).scatter(1, targets_T[:, None], True)
    keep_TV[5] = torch.arange(64) == targets_T[5]  # a slice of the vocabulary in which nothing stays
    ruled_out_TV = (
        torch.rand(23, 64, generator=generator) < 0.3
    ) & ~keep_TV  # by the model itself, with logits of -inf
    mine = slice(rank * 64 // tp, (rank + 1) * 64 // tp)
    out = {}
    for temperature in (1.0, 0.7, 1.5):
        exact_TV = whole_TV.clone().requires_grad_()
        log_p_TV = (exact_TV / temperature).log_softmax(-1)
        cut_T = (exact_TV / temperature).masked_fill(~keep_TV, -torch.inf).log_softmax(-1)[torch.arange(23), targets_T]
        left_TV = (exact_TV / temperature).masked_fill(ruled_out_TV, -torch.inf).log_softmax(-1)
        left_TV = torch.where(ruled_out_TV, 0, left_TV)
        wanted = {
            "log_probs": log_p_TV[torch.arange(23), targets_T],
            "cut": cut_T,
            "entropy": -(log_p_TV.exp() * log_p_TV).sum(-1),
            "entropy_left": -(left_TV.exp() * left_TV).sum(-1),
        }
        for name, want_T in wanted.items():
            given_TV = whole_TV.masked_fill(ruled_out_TV, -torch.inf) if name == "entropy_left" else whole_TV
            logits_TV = given_TV[:, mine].float().contiguous().requires_grad_()
            kept_TV = logits_TV.detach().clone()
            if name.startswith("entropy"):
                got_T = token_entropy(logits_TV, temperature)
            else:
                got_T = token_log_probs(logits_TV, targets_T, temperature, keep_TV[:, mine] if name == "cut" else None)
            (gradient_TV,) = torch.autograd.grad((got_T * weight_T.float()).sum(), logits_TV)
            (want_gradient_TV,) = torch.autograd.grad((want_T * weight_T).sum(), exact_TV, retain_graph=True)
            out[f"{name}-{temperature}"] = {
                "value": float(((got_T - want_T).abs() / want_T.abs().clamp(min=1)).max()),
                "gradient": gap(gradient_TV, want_gradient_TV[:, mine]),
                "overwritten": int((logits_TV != kept_TV).sum()),
            }
    return out
