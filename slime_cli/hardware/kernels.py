"""Fast ways to compute that a GPU may have, each tried once against float64 before it is used.

Never guessed from versions: what raises, or answers wrongly, is not used, and :func:`found` says why. Callers have the
same mathematics in plain torch. On a CPU there are none.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

TRIED: dict[str, str] = {}
"""Each operation that was tried in this process -> the kernel that computes it, with the reason where that is not
the fast one."""


class Wrong(Exception):
    """A kernel's answer is too far from what it should be."""


def attempt[T](name: str, fast: str, plain: str, trial: Callable[[], T]) -> T | None:
    """The result of ``trial``; None where it fails, and :func:`found` then has the reason."""
    try:
        out = trial()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        TRIED[name] = f"{plain} ({fast}: {type(error).__name__}: {reason})"
        return None
    TRIED[name] = fast
    return out


def found() -> str:
    """One line for the user; empty where nothing was tried."""
    return ", ".join(f"{name} by {how}" for name, how in TRIED.items())


def require(what: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """Raises Wrong unless ``got`` is within ``bound`` times the largest number of ``want``; NaN never is."""
    exact = want.detach().double()
    by = float((got.detach().double() - exact).abs().max() / exact.abs().max())
    if not by <= bound:
        raise Wrong(f"{what} is off by {by:.2g}, relative to the largest number")


def here() -> torch.device:
    """The device that this process computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def generator(device: torch.device) -> torch.Generator:
    """A generator for trials: the process's own random numbers stay as they are."""
    return torch.Generator(device).manual_seed(0)


# -- the head ----------------------------------------------------------------------------------------------------------


@functools.cache
def softmax(device: torch.device) -> types.ModuleType | None:
    """:mod:`slime_cli.hardware.cuda.softmax` where its kernels work."""
    if device.type != "cuda":
        return None
    return attempt("log-probabilities", "a Triton kernel", "plain torch", functools.partial(_softmax, device))


def _softmax(device: torch.device) -> types.ModuleType:
    from slime_cli.hardware.cuda import softmax

    rng = generator(device)
    logits_TV = (torch.randn(7, 9001, device=device, generator=rng) * 4).bfloat16()
    logits_TV[1, :8000] = -torch.inf
    logits_TV[2] = torch.nan
    targets_T = torch.tensor([0, 9000, 5, 4096, 8191, 77, -5], device=device)
    given_2T = torch.randn(2, 7, device=device, generator=rng)
    given_2T[:, 2] = 0.0
    exact_TV = logits_TV.double().nan_to_num(nan=0.0, neginf=-torch.inf).requires_grad_()
    log_p_TV = (exact_TV / 0.7).log_softmax(-1)
    owned_T = targets_T >= 0
    log_prob_T = log_p_TV.gather(1, targets_T.clamp(min=0)[:, None])[:, 0] * owned_T
    # A token that is not in this slice still gives every other one its share of the gradient.
    elsewhere = -(exact_TV[6] / 0.7).logsumexp(0)
    p_TV = log_p_TV.exp()
    entropy_T = -(p_TV * log_p_TV.clamp(min=-1e3)).sum(-1)
    loss = (log_prob_T * given_2T[0]).sum() + elsewhere * given_2T[0, 6] + (entropy_T * given_2T[1]).sum()
    (want_TV,) = torch.autograd.grad(loss, exact_TV)
    found_4T = softmax.statistics(logits_TV, targets_T, 0.7, entropy=True)
    log_total_T = found_4T[1].log()
    got_entropy_T = log_total_T - found_4T[2] / found_4T[1]
    seen_T = torch.arange(7, device=device) != 2
    ours_T = seen_T & owned_T
    require("log-probability", (found_4T[3] - found_4T[0] - log_total_T)[ours_T], log_prob_T[ours_T], 1e-5)
    require("entropy", got_entropy_T[seen_T], entropy_T[seen_T], 1e-5)
    state_3T = torch.stack([found_4T[0], log_total_T, got_entropy_T])
    softmax.gradient(logits_TV, targets_T, state_3T, given_2T, 0.7, logits_TV, entropy=True)
    require("gradient", logits_TV, want_TV, 1e-2)
    return softmax


# -- weight gradients --------------------------------------------------------------------------------------------------


@functools.cache
def weight_gradients(device: torch.device) -> types.ModuleType | None:
    """:mod:`slime_cli.hardware.cuda.weight_gradients` where its GEMM works."""
    if device.type != "cuda":
        return None
    trial = functools.partial(_weight_gradients, device)
    return attempt("weight gradients", "sums in the GEMM", "a sum after each GEMM", trial)


def _weight_gradients(device: torch.device) -> types.ModuleType:
    from slime_cli.hardware.cuda import weight_gradients

    rng = generator(device)
    inputs, gradients = (torch.randn(96, 2, n, device=device, generator=rng).bfloat16() for n in (256, 384))
    total = torch.randn(384, 256, device=device, generator=rng)
    want = total.double() + gradients.flatten(0, 1).double().t() @ inputs.flatten(0, 1).double()
    weight_gradients.add(inputs, gradients, total)
    require("sum", total, want, 1e-5)
    return weight_gradients


# -- rotary embeddings -------------------------------------------------------------------------------------------------


@functools.cache
def rotary(device: torch.device) -> types.ModuleType | None:
    """:mod:`slime_cli.hardware.cuda.rotary` where its kernel works."""
    if device.type != "cuda":
        return None
    return attempt("rotary embeddings", "a Triton kernel", "plain torch", functools.partial(_rotary, device))


def _rotary(device: torch.device) -> types.ModuleType:
    from slime_cli.hardware.cuda import rotary

    rng = generator(device)
    mixed = torch.randn(33, 6, 96, device=device, generator=rng).bfloat16()
    x = mixed[:, 1:4].requires_grad_()
    weight = torch.randn(33, 3, 96, device=device, generator=rng)
    half = torch.rand(33, 1, 1, 32, device=device, generator=rng) * 4000
    angles = torch.cat([half, half], dim=-1)
    exact = x.detach().double().requires_grad_()
    first, second, rest = exact.split([32, 32, 32], dim=-1)
    cos, sin = half[:, 0].double().cos(), half[:, 0].double().sin()
    want = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    (want_gradient,) = torch.autograd.grad((want * weight).sum(), exact)
    got = rotary.rotate(x, angles)
    (gradient,) = torch.autograd.grad((got * weight).sum(), x)
    require("rotation", got, want, 1e-2)
    require("gradient", gradient, want_gradient, 1e-2)
    return rotary


# -- attention ---------------------------------------------------------------------------------------------------------

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float | None], torch.Tensor]
"""``f(query, key, value, ends, longest, scale)``, as :func:`slime_cli.hardware.cuda.attention.packed`."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Device, dtype and sizes of the attention heads that a trial is made with."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    width: int
    value_width: int

    def inputs(self, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rng = generator(self.device)
        shapes = ((self.heads, self.width), (self.groups, self.width), (self.groups, self.value_width))
        q, k, v = (torch.randn(total, *x, device=self.device, generator=rng).to(self.dtype) for x in shapes)
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@functools.cache
def attention(shape: Shape) -> Attention | None:
    """:func:`slime_cli.hardware.cuda.attention.packed` where it works for these heads."""
    if shape.device.type != "cuda":
        return None
    return attempt("attention", "torch's varlen_attn", "rectangles", functools.partial(_attention, shape))


def _attention(shape: Shape) -> Attention:
    from slime_cli.hardware.cuda.attention import DENSE_FROM, packed

    for lengths in ((5, 1, 300, 64, 129), (DENSE_FROM, DENSE_FROM)):
        is_attention(packed, shape, lengths)
    return packed


@torch.enable_grad()
def is_attention(kernel: Attention, shape: Shape, lengths: tuple[int, ...]) -> None:
    """Raises Wrong unless the kernel's answers over a pack, and their gradients, are those of the definition."""
    mine = shape.inputs(sum(lengths))
    q, k, v = (x.detach().double().requires_grad_() for x in mine)
    rng = generator(shape.device)
    weight = torch.randn(sum(lengths), shape.heads, shape.value_width, device=shape.device, generator=rng)
    want = _alone(q, k, v, lengths)
    got = kernel(*mine, _ends(lengths, shape.device), max(lengths), None)
    require("attention", got, want, 2e-2)
    gradients = torch.autograd.grad((got * weight.to(shape.dtype)).sum(), mine)
    for name, one, other in zip("qkv", gradients, torch.autograd.grad((want * weight).sum(), (q, k, v))):
        require(f"gradient of {name}", one, other, 3e-2)


def _ends(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Every sequence and head for itself, from the definition."""
    share = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
    out = []
    for one_q, one_k, one_v in zip(q.split(lengths), k.split(lengths), v.split(lengths)):
        scores = torch.einsum("ihd,jhd->hij", one_q, one_k) / q.size(-1) ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        out.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(later, -torch.inf).softmax(-1), one_v))
    return torch.cat(out)


def forget() -> None:
    """Nothing has been tried: for tests."""
    TRIED.clear()
    for each in (softmax, weight_gradients, rotary, attention):
        cached: Any = each
        cached.cache_clear()
