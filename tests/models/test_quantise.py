"""The quantised formats' arithmetic against float64, its error bounds, and INT4 against compressed-tensors' own
code."""

import math

import pytest
import torch

from slime_cli.errors import DataError
from slime_cli.models import quantise

SHAPES = [(256, 384), (130, 257), (1, 1), (127, 5), (3, 200)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows of very different size, with a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator) * torch.logspace(-3, 0, shape[-2]).unsqueeze(-1)
    return torch.where(torch.rand(*shape, generator=generator) < 0.01, weight * 20, weight).to(dtype)


def rectangles(shape: tuple[int, int], strategy: str, block: tuple[int, int] = (128, 128)):
    """Row slice, column slice and place in the grid of each rectangle, by the format's description."""
    rows, columns = {"block": block, "channel": (1, shape[1]), "tensor": shape}[strategy]
    for i in range(math.ceil(shape[0] / rows)):
        for j in range(math.ceil(shape[1] / columns)):
            yield slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns), (i, j)


def e4m3() -> torch.Tensor:
    """All finite values of the format from its definition: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    numbers = [m / 8 * 2.0**-6 for m in range(8)] + [
        (1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)
    ]
    numbers = torch.tensor(numbers[:-1], dtype=torch.float64)  # the last code is NaN
    return torch.cat([-numbers.flip(0), numbers])


# -- FP8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("strategy", quantise.STRATEGIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_the_nearest_value_under_the_rectangles_own_scale(shape, strategy, scale_fmt):
    weight = make(*shape)
    values, scale = quantise.quantise_fp8(weight, strategy, scale_fmt=scale_fmt)
    assert values.dtype == torch.float8_e4m3fn and values.shape == weight.shape and scale.dtype == torch.float32
    wanted = {
        "block": (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128)),
        "channel": (shape[0], 1),
        "tensor": (1,),
    }[strategy]
    assert tuple(scale.shape) == wanted
    table = e4m3()
    grid = scale.reshape(-1, 1) if strategy == "tensor" else scale
    for rows, columns, place in rectangles(shape, strategy):
        exact = weight[rows, columns].double().abs().max() / 448
        found = grid[place].double()
        if scale_fmt:
            assert math.frexp(found)[0] == 0.5 and exact * (1 - 1e-7) <= found < 2 * exact
        else:
            assert abs(found - exact) <= 2**-24 * exact
        wanted = weight[rows, columns].double() / found
        nearest = (wanted.reshape(-1, 1) - table).abs().amin(1).reshape(wanted.shape)
        assert ((values[rows, columns].double() - wanted).abs() <= nearest + 1e-6 * wanted.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", quantise.STRATEGIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_comes_back_within_a_sixteenth(shape, strategy, dtype):
    weight = make(*shape, dtype=dtype)
    values, scale = quantise.quantise_fp8(weight, strategy)
    back = quantise.dequantise_fp8(values, scale)
    assert back.dtype == torch.bfloat16 and back.shape == weight.shape
    for rows, columns, _ in rectangles(shape, strategy):
        error = (back[rows, columns].double() - weight[rows, columns].double()).abs()
        size = weight[rows, columns].double().abs()
        assert error.max() <= 2**-4 * size.max()
        assert (error <= (2**-4 + 2**-8) * size + 2**-10 / 448 * size.max()).all()  # 2**-8: the rounding to bfloat16


def test_fp8_of_zeros_and_of_the_smallest_numbers():
    weight = make(256, 256)
    weight[:128, :128] = 0
    weight[128:, 128:] = -0.0
    weight[128:, :128] = 1e-45  # the smallest float32: 1/448 of it is zero
    for scale_fmt in (None, "ue8m0"):
        values, scale = quantise.quantise_fp8(weight, scale_fmt=scale_fmt)
        assert torch.isfinite(scale).all() and (scale > 0).all() and scale[0, 0] == scale[1, 1] == 1
        back = quantise.dequantise_fp8(values, scale)
        assert (back[:128, :128] == 0).all() and (back[128:, 128:] == 0).all() and torch.isfinite(back).all()
    for strategy in ("channel", "tensor"):
        values, scale = quantise.quantise_fp8(torch.zeros(3, 5), strategy)
        assert (scale == 1).all() and (quantise.dequantise_fp8(values, scale) == 0).all()


def test_fp8_holds_the_largest_numbers():
    for value in (3.38e38, -3.38e38):
        values, scale = quantise.quantise_fp8(torch.full((2, 3), value), scale_fmt=None)
        assert (values.float().abs() == 448).all()
        assert torch.allclose(quantise.dequantise_fp8(values, scale).float(), torch.full((2, 3), value), rtol=2**-8)


@pytest.mark.parametrize("strategy", quantise.STRATEGIES)
def test_fp8_of_stacked_experts_is_that_of_each(strategy):
    stack = make(3, 130, 257)
    values, scale = quantise.quantise_fp8(stack, strategy)
    back = quantise.dequantise_fp8(values, scale)
    assert values.shape == stack.shape and scale.dim() == 3
    for i in range(3):
        one, its_scale = quantise.quantise_fp8(stack[i], strategy)
        assert torch.equal(values[i].float(), one.float()) and torch.equal(scale[i].reshape(its_scale.shape), its_scale)
        assert torch.equal(back[i], quantise.dequantise_fp8(one, its_scale))


def test_fp8_reads_scales_of_other_dtypes_and_blocks():
    weight = make(130, 257)
    values, scale = quantise.quantise_fp8(weight, block=(64, 32), scale_fmt="ue8m0")
    assert tuple(scale.shape) == (3, 9)
    back = quantise.dequantise_fp8(values, scale, (64, 32))
    for dtype in (torch.float8_e8m0fnu, torch.bfloat16):  # both hold powers of two
        assert torch.equal(back, quantise.dequantise_fp8(values, scale.to(dtype), (64, 32)))
    with pytest.raises(DataError, match="block of 128x128"):
        quantise.dequantise_fp8(values, scale)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad):
    weight = make(130, 256)
    weight[129, 255] = bad
    for strategy in quantise.STRATEGIES:
        with pytest.raises(DataError, match="NaN or infinity"):
            quantise.quantise_fp8(weight, strategy)
    for symmetric in (True, False):
        with pytest.raises(DataError, match="NaN or infinity"):
            quantise.quantise_int4(weight.unsqueeze(0), 32, symmetric)
    values, scale = quantise.quantise_fp8(torch.ones(4, 4))
    with pytest.raises(DataError, match="NaN or infinity"):
        quantise.dequantise_fp8(values, scale * bad)


# -- INT4 --------------------------------------------------------------------------------------------------------------


def restored(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    return quantise.dequantise_int4(
        stored["_packed"], stored["_scale"], tuple(stored["_shape"].tolist()), stored.get("_zero_point")
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape,group", [((64, 128), 32), ((13, 66), 33), ((1, 3), 1), ((9, 20), 20)])
def test_int4_is_the_rounded_quotient_and_off_by_half_a_step_at_most(shape, group, symmetric, dtype):
    weight = make(*shape, dtype=dtype) + (0 if symmetric else 0.3)
    stored = quantise.quantise_int4(weight, group, symmetric)
    scale_OG1 = stored["_scale"].double().unsqueeze(-1)
    groups = weight.double().reshape(shape[0], -1, group)
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    exact = torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15
    assert stored["_scale"].dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)
    assert (scale_OG1 >= exact * (1 - 1e-7)).all() and (
        scale_OG1 <= exact * (1 + 2**-7) + 2**-24
    ).all()  # rounded up, one place at most
    zero = torch.zeros_like(exact)
    if not symmetric:
        zero = quantise.unpack_int4(stored["_zero_point"].t(), shape[0]).t().double().unsqueeze(-1)
        assert ((zero - (-8 - low / scale_OG1)).abs() <= 0.5 + 1e-6).all()
    values = quantise.unpack_int4(stored["_packed"], shape[1]).double().reshape(groups.shape)
    assert ((values - (groups / scale_OG1 + zero)).abs() <= 0.5 + 1e-6).all()
    error = ((values - zero) * scale_OG1 - groups).abs()
    assert (error <= scale_OG1 * (0.5 + 1e-6)).all()
    back = restored(stored)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, ((values - zero) * scale_OG1).reshape(shape).to(torch.bfloat16))
    if not symmetric and dtype == torch.float32:
        assert (back[weight == 0] == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_of_zeros_and_of_the_smallest_and_largest_numbers(dtype, symmetric):
    info = torch.finfo(dtype)
    weight = make(8, 128, dtype=dtype)
    weight[:, :32] = 0
    weight[:, 32:64] = info.smallest_normal * info.eps  # the smallest number there is
    weight[:, 64:96] = torch.tensor([info.max, info.min] * 16).to(dtype)
    stored = quantise.quantise_int4(weight, 32, symmetric)
    assert (
        torch.isfinite(stored["_scale"]).all() and (stored["_scale"] > 0).all() and (stored["_scale"][:, 0] == 1).all()
    )
    back = quantise.unpack_int4(stored["_packed"], 128).float()
    zero = 0.0 if symmetric else quantise.unpack_int4(stored["_zero_point"].t(), 8).t().float().repeat_interleave(32, 1)
    back = (back - zero).double() * stored["_scale"].double().repeat_interleave(32, 1)
    assert (back[:, :32] == 0).all() and torch.isfinite(back).all()
    assert ((back - weight.double()).abs() <= stored["_scale"].double().repeat_interleave(32, 1) * (0.5 + 1e-6)).all()


def test_int4_of_stacked_experts_is_that_of_each():
    stack = make(3, 13, 64, dtype=torch.bfloat16)
    for symmetric in (True, False):
        stored = quantise.quantise_int4(stack, 32, symmetric)
        assert stored["_shape"].tolist() == [3, 13, 64] and restored(stored).shape == stack.shape
        for i in range(3):
            one = quantise.quantise_int4(stack[i], 32, symmetric)
            assert all(torch.equal(stored[suffix][i], one[suffix]) for suffix in one if suffix != "_shape")
            assert torch.equal(restored(stored)[i], restored(one))


@pytest.mark.parametrize("count", range(1, 18))
def test_packing_puts_eight_nibbles_into_a_word_lowest_first(count):
    values = torch.arange(-8, 8).repeat(2)[:count].to(torch.int8)
    packed = quantise.pack_int4(values.reshape(1, -1))
    words = [0] * math.ceil(count / 8)
    for i, value in enumerate(values.tolist()):
        words[i // 8] |= (value + 8) << 4 * (i % 8)
    assert packed.dtype == torch.int32 and [word & 0xFFFFFFFF for word in packed[0].tolist()] == words
    assert torch.equal(quantise.unpack_int4(packed, count)[0], values)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(64, 128), (13, 96), (2, 24, 64)])
def test_compressed_tensors_packs_the_same_and_reads_the_same(shape, symmetric):
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weight = make(*shape, dtype=torch.bfloat16)
    weight[..., :32] = 0
    stored = quantise.quantise_int4(weight, 32, symmetric)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    theirs = {"weight": weight.float(), "weight_scale": stored["_scale"].float()}
    if not symmetric:
        packed = stored["_zero_point"].transpose(-1, -2)
        theirs["weight_zero_point"] = quantise.unpack_int4(packed, shape[-2]).transpose(-1, -2)
    theirs = PackedQuantizationCompressor.compress(theirs, scheme)
    assert {name.removeprefix("weight") for name in theirs} == set(stored)
    for suffix in stored.keys() - {"_scale"}:
        assert torch.equal(theirs["weight" + suffix], stored[suffix]), suffix
    read = PackedQuantizationCompressor.decompress(
        {"weight" + suffix: tensor for suffix, tensor in stored.items()}, scheme
    )
    assert torch.equal(read["weight"], restored(stored))


def test_int4_refuses_groups_that_do_not_divide_and_parts_that_do_not_fit():
    with pytest.raises(DataError, match="rows of 257, which groups of 32 do not divide"):
        quantise.quantise_int4(make(130, 257), 32, True)
    stored = quantise.quantise_int4(make(24, 64), 32, False)
    changes = {
        "_packed": stored["_packed"].repeat(1, 2),
        "_scale": stored["_scale"][:8],
        "_zero_point": stored["_zero_point"].t(),
    }
    for change in ({suffix: tensor} for suffix, tensor in changes.items()):
        with pytest.raises(DataError, match="not 4 bits by group"):
            restored(stored | change)
