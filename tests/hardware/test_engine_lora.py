"""SGLang's LoRA in an engine on a CPU: nothing is pinned, and its plain torch kernels give B A x.

1. What SGLang asks for in pinned memory comes unpinned, the same numbers.
2. Its manager has the two methods that are wrapped, and they are wrapped where an engine applies its hooks.
3. Its ``torch_native`` backend adds scale * B A x for each sequence's adapter, and nothing for one without.
"""

import json

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found():
    """What a process with the CPU engine's environment finds."""
    from tests import cpu_engine

    return cpu_engine.found(__file__)


def test_what_is_asked_for_in_pinned_memory_comes_unpinned(found):
    assert found["unpinned"] == [1, 2]


def test_the_manager_s_methods_are_wrapped(found):
    assert found["wrapped"] == ["__init__", "prepare_lora_batch"]


def test_the_kernels_of_plain_torch(found):
    assert found["gap"] < 1e-6


def main() -> None:
    import sgl_kernel  # noqa: F401  (which registers the hooks)
    import sglang.srt.lora.lora_manager as manager
    import torch
    from sglang.srt.lora.torch_ops import lora_ops
    from sglang.srt.plugins.hook_registry import HookRegistry

    from slime_cli.hardware.cpu import engine_lora

    def pinned() -> list[int]:
        return torch.tensor([1, 2], pin_memory=True).pin_memory().tolist()

    HookRegistry.apply_hooks()
    names = [target.rpartition(".")[2] for target in HookRegistry._patched if target.startswith(engine_lora.MANAGER)]
    assert all(hasattr(getattr(manager.LoRAManager, name), "__wrapped__") for name in names)
    torch.manual_seed(0)
    x_TI, a_NRI, b_NOR = torch.randn(5, 6), torch.randn(2, 3, 6), torch.randn(2, 7, 3)
    lengths, which, ranks, scales = torch.tensor([2, 3]), torch.tensor([0, 1]), torch.tensor([0, 3]), torch.ones(2) * 2
    middle_TR = lora_ops.sgemm_lora_a_fwd(x_TI, a_NRI, which, lengths, ranks, scales)
    base_TO = torch.randn(5, 7)
    got_TO = lora_ops.sgemm_lora_b_fwd(
        middle_TR, b_NOR, which, lengths, ranks, torch.tensor([0, 7]), base_output=base_TO.clone()
    )
    want_TO = base_TO.clone()
    want_TO[2:] += 2 * x_TI[2:] @ a_NRI[1].T @ b_NOR[1].T
    gap = float((got_TO - want_TO).abs().max())
    print(json.dumps({"unpinned": engine_lora.unpinned(pinned), "wrapped": sorted(names), "gap": gap}))


if __name__ == "__main__":
    main()
