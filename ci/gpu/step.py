"""The trainer's step on one GPU: MFU on equal and mixed lengths, what each fast way brings, and whether it is right.

``python -m ci.gpu.step [--seconds 450] [--small]`` makes a random Qwen3 of the 0.6B shape and prints JSON lines:
``accuracy`` (log-probabilities of every variant against the same weights in float32, gradients against plain
torch's), ``step`` (seconds, MFU and peak memory of every variant), ``bare`` (slime's step over Megatron's own loop with
the same packs), ``attention`` (one layer's, by kernel and pack) and ``profile`` (a step's kernels). MFU counts 6 N
floating-point operations a token, N all parameters once, over the H200's 990e12 a second. What there is no time for is
said.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.step import bare_step
from ci.gpu import shapes
from slime_cli.buffer.columns import TrainBatch
from slime_cli.tracing.spans import Tracer

if TYPE_CHECKING:
    import torch

    from slime_cli.training.trainer import Trainer

FLOPS = 990e12
SHAPE = shapes.QWEN3_06B
SMALL = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=2048,
)
VARIANTS = (
    "as shipped",
    "plain",
    "no attention kernel",
    "no softmax kernel",
    "head in chunks of 256 MiB",
    "no fused rotary",
    "no fused SwiGLU",
    "no fused weight gradients",
)
"""Each leaves one thing out; ``plain`` all of them, which is the step before there were any."""


def say(event: str, **found: Any) -> None:
    print(json.dumps({"event": event, **found}, default=float), flush=True)


@dataclasses.dataclass
class Bench:
    """The trainer and what its variants change."""

    trainer: "Trainer"
    config: dict[str, Any]
    small: bool
    end: float

    def late(self, seconds: float) -> bool:
        return time.monotonic() + seconds > self.end

    @contextlib.contextmanager
    def variant(self, name: str) -> Iterator[None]:
        """The step as the variant says; as shipped afterwards."""
        from slime_cli.hardware import kernels
        from slime_cli.training.network import heads
        from slime_cli.training.network.attention import PackedAttention

        (model,) = self.trainer.policy.model
        parts = list(model.modules())
        attention = [part for part in parts if isinstance(part, PackedAttention)]
        linear = [part for part in parts if hasattr(part, "gradient_accumulation_fusion")]
        config: Any = self.trainer.policy.config
        shipped = [part.kernel for part in attention]
        sums = [part.gradient_accumulation_fusion for part in linear]
        rotary, swiglu = config.apply_rope_fusion, config.bias_activation_fusion
        room, softmax = self.trainer.log_prob_head.keywords["room"], kernels.softmax

        def left_out(what: str) -> bool:
            return name in ("plain", what)

        for part in attention:
            part.kernel = None if left_out("no attention kernel") else part.kernel
        for part in linear:
            part.gradient_accumulation_fusion = part.gradient_accumulation_fusion and not left_out(
                "no fused weight gradients"
            )
        config.apply_rope_fusion = rotary and not left_out("no fused rotary")
        config.bias_activation_fusion = swiglu and not left_out("no fused SwiGLU")
        self.trainer.log_prob_head.keywords["room"] = (
            heads.CPU_BYTES // 2 if left_out("head in chunks of 256 MiB") else room
        )
        off: Any = lambda device: None  # noqa: E731
        kernels.softmax = off if left_out("no softmax kernel") else softmax
        try:
            yield
        finally:
            for part, kernel in zip(attention, shipped):
                part.kernel = kernel
            for part, fused in zip(linear, sums):
                part.gradient_accumulation_fusion = fused
            config.apply_rope_fusion, config.bias_activation_fusion = rotary, swiglu
            self.trainer.log_prob_head.keywords["room"] = room
            kernels.softmax = softmax

    def batches(self) -> dict[str, TrainBatch]:
        rng = np.random.default_rng(1)
        vocabulary = self.config["vocab_size"]
        if self.small:
            return {
                "equal": batch([10] * 32, [50] * 32, vocabulary),
                "mixed": batch([10] * 16, rng.integers(4, 100, 16), vocabulary),
            }
        mixed = np.clip(np.exp(rng.normal(6.0, 0.8, 128)), 32, 3996).astype(int)
        return {
            "equal": batch([100] * 256, [512] * 256, vocabulary),
            "mixed": batch([100] * 128, mixed, vocabulary),
        }

    def mfu(self, tokens: int, seconds: float) -> float:
        return 6 * parameters(self.config) * tokens / seconds / FLOPS


def parameters(c: dict[str, Any]) -> int:
    """The parameters of a tied Qwen3 of this shape, without its norms."""
    heads, groups, width = (c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = c["hidden_size"] * (2 * heads * width + 2 * groups * width + 3 * c["intermediate_size"])
    return c["num_hidden_layers"] * layer + c["vocab_size"] * c["hidden_size"]


def batch(prompts: Any, responses: Any, vocabulary: int) -> TrainBatch:
    rng = np.random.default_rng(0)
    prompts, responses = np.asarray(prompts), np.asarray(responses)
    lengths = prompts + responses
    n = len(lengths)
    return TrainBatch(
        np.arange(n),
        np.arange(n) // 8,
        lengths,
        responses,
        rng.integers(0, 2, n).astype(float),
        np.zeros(n, bool),
        rng.integers(6, vocabulary, int(lengths.sum())),
        np.ones(int(responses.sum()), np.uint8),
        np.full(int(responses.sum()), -11.9, np.float32),
    )


def checkpoint(folder: pathlib.Path, shape: dict[str, int]) -> Any:
    """A random model as an HF folder; the model itself, in float32 on the device."""
    import torch
    import transformers

    config: Any = transformers.Qwen3Config
    made = config(
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        initializer_range=0.02,
        dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        **shape,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = transformers.Qwen3ForCausalLM(made)
    model.to(torch.bfloat16).save_pretrained(folder)
    return model.float().eval()


def made(
    folder: pathlib.Path,
    max_tokens: int,
    options: Sequence[str] = ("--transformer-impl", "local"),
    rank: int = 0,
    world: int = 1,
) -> "Trainer":
    """A trainer of the HF model in ``folder`` in this process. ``options``: Megatron's, besides the model's own. Where
    it is one rank of several, ``MASTER_ADDR`` and ``MASTER_PORT`` are set."""
    import torch

    from slime_cli.addresses import free_port
    from slime_cli.hardware import device as hardware
    from slime_cli.models import architecture
    from slime_cli.training.network import megatron
    from slime_cli.training.settings import Settings
    from slime_cli.training.trainer import Trainer
    from slime_cli.weights.bridge import Bridge

    device = hardware.find()
    known = architecture.megatron_args(architecture.read_config(str(folder)))
    assert known is not None
    argv = [*architecture.argv(known), "--global-batch-size", "256", "--lr", "1e-6", *options]
    args = megatron.parse([*megatron.always(device, options), *argv], rank, world)
    if not torch.distributed.is_initialized():
        if world == 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        megatron.initialise(args, device)
    trainer = Trainer(args, Settings(max_tokens=max_tokens), Tracer(str(folder), "off", enabled=False))
    Bridge(str(folder), args.params_dtype).load(trainer.policy.model)
    trainer.begin()
    return trainer


def synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def accuracy(bench: Bench, exact: Any) -> None:
    """Every variant's log-probabilities against the float32 model's, and its gradient against plain torch's."""
    lengths = [40, 7, 90, 33] if bench.small else [1500, 132, 3000, 612, 64, 900]
    given = batch([10 if bench.small else 50] * len(lengths), np.asarray(lengths), bench.config["vocab_size"])
    want_R = exact_log_probs(exact, given)
    plain: list[torch.Tensor] = []
    for name in sorted(VARIANTS, key=lambda name: name != "plain"):
        with guarded("accuracy", name), bench.variant(name):
            log_probs_R, gradients, found = answers(bench.trainer, given)
            diff_R = (log_probs_R - want_R).abs()
            plain = plain or gradients
            gap = sum(float((a - b).square().sum()) for a, b in zip(gradients, plain)) ** 0.5
            size = sum(float(b.square().sum()) for b in plain) ** 0.5
            say(
                "accuracy",
                variant=name,
                mean_abs_diff=float(diff_R.mean()),
                max_abs_diff=float(diff_R.max()),
                gradient_relative_to_plain=gap / size,
                gradient_norm=sum(float(a.square().sum()) for a in gradients) ** 0.5,
                **found,
            )


def exact_log_probs(exact: Any, given: TrainBatch) -> "torch.Tensor":
    """Log-probabilities of the response tokens by the model ``exact``, one sequence at a time, float32 [R]."""
    import torch
    import torch.nn.functional as F

    want = []
    with torch.no_grad():
        for i in range(len(given)):
            start = int(given.starts_N[i])
            ids = torch.as_tensor(given.tokens_T[start : start + given.lengths_N[i]], device=exact.device)[None]
            n = int(given.response_lengths_N[i])
            logits = exact(ids).logits[0, -n - 1 : -1].double()
            want.append(F.log_softmax(logits, -1).gather(1, ids[0, -n:, None])[:, 0])
    return torch.cat(want).float()


def answers(trainer: "Trainer", given: TrainBatch) -> "tuple[torch.Tensor, list[torch.Tensor], dict[str, float]]":
    """Log-probabilities in the batch's order, the gradient of every weight, and the entropy."""
    import torch

    from slime_cli.training import metrics

    parts, _ = trainer._parts(given)
    trainer._preparation(given, parts).run()
    head, loss = trainer._objective()
    reports = []

    def kept(mb: Any, out_2R: torch.Tensor) -> tuple[torch.Tensor, Any]:
        value, report = loss(trainer.settings, mb, out_2R)
        reports.append((mb.rows_R, out_2R.detach(), metrics.of_micro_batch(report, mb.mask_R)))
        return value, None

    trainer.policy.backward(parts[0], head, kept)
    total = int(given.response_lengths_N.sum())
    log_probs_R, entropy_R = torch.zeros(2, total, device=reports[0][1].device)
    for rows_R, out_2R, _ in reports:
        at = torch.as_tensor(rows_R, device=out_2R.device)
        log_probs_R[at], entropy_R[at] = out_2R[0].float(), out_2R[1].float()
    gradients = [p.main_grad.clone() for p in trainer.policy.model[0].parameters()]
    return log_probs_R, gradients, {"entropy": float(entropy_R.mean()), "log_prob": float(log_probs_R.mean())}


@contextlib.contextmanager
def guarded(event: str, name: str) -> Iterator[None]:
    """An error is a line of its own, and the others go on being measured."""
    try:
        yield
    except Exception as error:
        say(event, variant=name, error=repr(error)[:500], trace=traceback.format_exc()[-1500:])


def timed(step: Callable[[], Any], repeats: int) -> list[float]:
    out = []
    for _ in range(repeats):
        synchronise()
        start = time.perf_counter()
        step()
        synchronise()
        out.append(time.perf_counter() - start)
    return out


def steps(bench: Bench) -> None:
    import torch

    from slime_cli.hardware import peak

    for name in VARIANTS:
        for kind, given in bench.batches().items():
            if bench.late(30):
                say("step", variant=name, batch=kind, left_out="no time")
                continue
            with guarded("step", name), bench.variant(name):
                torch.cuda.empty_cache()
                peak.forget()
                repeats = 2 if bench.small else 5 if name == "as shipped" else 3
                times = timed(lambda: bench.trainer.train(given), repeats)
                seconds = statistics.median(times[1:])
                tokens = int(given.lengths_N.sum())
                say(
                    "step",
                    variant=name,
                    batch=kind,
                    seconds=round(seconds, 4),
                    mfu=round(bench.mfu(tokens, seconds), 4),
                    tokens_per_s=round(tokens / seconds),
                    peak_gb=round(peak.most() / 1e9, 2),
                    all_seconds=[round(t, 4) for t in times],
                )


def bare(bench: Bench) -> None:
    """Both take turns, so that neither has the warmer GPU."""
    from slime_cli.training.settings import Settings

    before = bench.trainer.settings
    bench.trainer.settings = before if bench.small else Settings(max_tokens=8192)
    try:
        for kind, given in bench.batches().items():
            with guarded("bare", kind):
                ours, theirs = [], []
                for _ in range(2 if bench.small else 4):
                    ours += timed(lambda: bench.trainer.train(given), 1)
                    theirs += timed(lambda: bare_step(bench.trainer, given), 1)
                one, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
                say("bare", batch=kind, slime=one, bare=other, ratio=one / other)
    finally:
        bench.trainer.settings = before


def optimizer(bench: Bench) -> None:
    """Milliseconds of the optimizer's step, gradient norm included."""
    with guarded("optimizer", "as shipped"):
        ms = [1e3 * t for t in timed(bench.trainer.policy._apply, 6)]
        say("optimizer", ms=round(statistics.median(ms[1:]), 2))


def attention(bench: Bench) -> None:
    """Forward and backward of one layer's attention, by pack: every kernel, and rectangles."""
    import torch

    from slime_cli.hardware.cuda import attention as cuda
    from slime_cli.training.batching import packs
    from slime_cli.training.network.attention import PackedAttention

    rng = np.random.default_rng(0)
    mixed = np.clip(np.exp(rng.normal(6.0, 0.8, 24)), 32, 3996).astype(int).tolist()
    lengths = {"16k of 612": [612] * 26, "mixed": mixed, "16k of 2048": [2048] * 8, "one of 16k": [16384]}
    module = next(m for m in bench.trainer.policy.model[0].modules() if isinstance(m, PackedAttention))
    shipped = module.kernel
    c = bench.config
    for label, pack in lengths.items():
        parameters = packs.pack(pack, torch.device("cuda"))
        shapes = [(sum(pack), c[n], c["head_dim"]) for n in ("num_attention_heads", *["num_key_value_heads"] * 2)]
        mine = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        ways: dict[str, Any] = {"varlen_attn": cuda.packed, "rectangles": None}
        if len(set(pack)) == 1:
            count = len(pack)
            ways["stacked"] = lambda q, k, v, ends, longest, scale, n=count: cuda.stacked(q, k, v, n, scale)
        cuda.DENSE_FROM = sys.maxsize
        for name, kernel in ways.items():
            with guarded("attention", name):
                module.kernel = kernel
                out = module(*mine, packed_seq_params=parameters)
                weight = torch.randn_like(out)
                forward = timed(lambda: module(*mine, packed_seq_params=parameters), 6)
                both = timed(lambda: torch.autograd.grad(module(*mine, packed_seq_params=parameters), mine, weight), 6)
                ms = [round(1e3 * statistics.median(times), 3) for times in (forward, both)]
                say("attention", pack=label, kernel=name, forward_ms=ms[0], ms=ms[1])
    module.kernel = shipped


def profile(bench: Bench) -> None:
    import torch
    from torch.profiler import ProfilerActivity

    for kind, given in bench.batches().items():
        with guarded("profile", kind):
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
                (seconds,) = timed(lambda: bench.trainer.train(given), 1)
            rows = [
                (e.key, e.self_device_time_total / 1e3, e.count)
                for e in found.key_averages()
                if e.self_device_time_total > 0 and str(e.device_type).endswith("CUDA")
            ]
            rows.sort(key=lambda row: -row[1])
            top = [[name[:100], round(ms, 1), count] for name, ms, count in rows[:32]]
            total = sum(row[1] for row in rows)
            say("profile", batch=kind, ms=1e3 * seconds, kernels_ms=total, count=sum(r[2] for r in rows), top=top)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=450)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    start = time.monotonic()
    from slime_cli.hardware import device as hardware

    device = hardware.prepare_trainer()
    import torch

    from slime_cli.hardware import kernels

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        exact = checkpoint(folder, SMALL if options.small else SHAPE)
        trainer = made(folder, 512 if options.small else 16384)
        config = json.loads((folder / "config.json").read_text())
        bench = Bench(trainer, config, options.small, start + options.seconds)
        room = trainer.log_prob_head.keywords["room"]
        took = time.monotonic() - start
        say("made", device=device.name, torch=torch.__version__, kernels=kernels.found(), room=room, seconds=took)
        accuracy(bench, exact)
        del exact
        steps(bench)
        for part in (bare, profile, attention, optimizer):
            if device.kind == "cpu" and part in (profile, attention):
                continue
            if bench.late(25):
                say(part.__name__, left_out="no time")
            else:
                part(bench)
        say("end", seconds=time.monotonic() - start)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # NCCL's threads and Megatron's helpers are not waited for
