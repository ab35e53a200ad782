"""The CPU engine's attention, sequences side by side, against SGLang's own loop over them.

1. Decoding and prefill give the stock numbers: any lengths, cached prefixes, grouped queries, more sequences than are
   computed at once. The cache's other places hold NaN, which no sequence may see.
2. What is not plain causal attention, and long prompts, go the stock way.
"""

import itertools
import json

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def gaps():
    """By case, as a process with the CPU engine's environment finds them."""
    from tests import cpu_engine

    return cpu_engine.found(__file__)


CASES = {
    "short": ([1, 2, 3, 5, 8, 13, 16, 17], [1, 1, 3, 2, 8, 1, 4, 17]),
    "many": ([n % 23 + 1 for n in range(300)], [n % 7 % (n % 23 + 1) + 1 for n in range(300)]),
    "one": ([40], [40]),
}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("what", ["decode", "extend"])
def test_sequences_side_by_side_are_sequences_one_by_one(gaps, what, case, heads):
    assert gaps[f"{what}-{case}-{heads}"] < 1e-12


def test_what_is_special_goes_the_stock_way(gaps):
    assert gaps["stock"] == ["window", "window", "encoder", "bidirectional", "long"]


def test_sglang_calls_them(gaps):
    assert gaps["hooked"] == [True, True]


def main() -> None:
    import sgl_kernel  # noqa: F401  (as a server does, which registers the hooks)
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang.srt.plugins.hook_registry import HookRegistry

    from slime_cli.hardware.cpu import engine_attention

    engine_attention.BYTES = 2**16
    stock = {"decode": Backend._run_sdpa_forward_decode, "extend": Backend._run_sdpa_forward_extend}
    found: dict = {}
    for (case, (lengths, new)), (heads, (h, g)) in itertools.product(CASES.items(), HEADS.items()):
        torch.manual_seed(len(lengths))
        lengths, new = torch.tensor(lengths), torch.tensor(new)
        slots = int(lengths.sum()) + 40
        caches = [torch.full((slots, g, 16), torch.nan, dtype=torch.float64) for _ in range(2)]
        table = torch.randint(slots, (len(lengths) + 3, 64), dtype=torch.int32)
        pools = torch.randperm(len(lengths) + 3)[: len(lengths)]
        free = torch.randperm(slots - 1) + 1
        for pool, n, end in zip(pools, lengths, lengths.cumsum(0)):
            table[pool, :n] = free[end - n : end]
        for cache in caches:
            cache[0] = 0.0  # where SGLang puts the tokens of its own padding
            cache[free[: int(lengths.sum())]] = torch.randn(int(lengths.sum()), g, 16, dtype=torch.float64)
        more = {"scaling": 0.3, "enable_gqa": h != g}
        for what, count, places, causal in (
            ("decode", len(lengths), (lengths,), False),
            ("extend", int(new.sum()), (lengths, lengths - new, new), True),
        ):
            query = torch.randn(count, h, 16, dtype=torch.float64)
            given = (*caches, table, pools, *places)
            want = stock[what](None, query, torch.empty_like(query), *given, causal=causal, **more)
            hook = getattr(engine_attention, what)
            got = hook(None, None, query, torch.full_like(query, torch.nan), *given, causal=causal, **more)
            found[f"{what}-{case}-{heads}"] = float((got - want).abs().max())
    went: list[str] = []
    one = torch.ones(1, dtype=torch.long)
    nothing = (None,) * 6

    def special(name, hook, lengths, **more):
        hook(lambda *a, **k: went.append(name), *nothing, one, *lengths, **more)

    two = (one, one - 1, one)
    special("window", engine_attention.decode, (one,), sliding_window_size=4)
    special("window", engine_attention.extend, two, sliding_window_size=4, causal=True)
    special("encoder", engine_attention.extend, two, encoder_lens=one, causal=True)
    special("bidirectional", engine_attention.extend, two, causal=False)
    special("long", engine_attention.extend, (one * 5000, one - 1, one * 5000), causal=True)
    found["stock"] = went
    HookRegistry.apply_hooks()
    found["hooked"] = [vars(Backend)[f"_run_sdpa_forward_{what}"].__wrapped__ is fn for what, fn in stock.items()]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
