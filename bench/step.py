"""slime's trainer step against a bare Megatron loop over the same micro-batches, and tracing on against off.

Runs in a process of its own (``python -m bench.step MODEL``) and prints one JSON object.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.pairs import interleaved, medians, ratio
from slime_cli.buffer.columns import TrainBatch
from slime_cli.tracing.reading import read_spans
from slime_cli.tracing.spans import Tracer

if TYPE_CHECKING:
    from slime_cli.training.trainer import Trainer

SAMPLES = 256
BARE_ROUNDS = 24
TRACED_ROUNDS = 40
"""The difference to be found is at most 2 %, and a step's time varies by about as much."""
SPANS = {"train", "data", "advantages", "forward_backward", "optimizer"}
"""Spans that a rank records in a step: the actor's, the trainer's and, over its networks, those of the passes."""


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        traced = Tracer(folder, "trainer-0")
        silent = Tracer(folder, "off", enabled=False)
        trainer = made(model, silent)
        batch = random_batch()

        def step(tracer: Tracer) -> None:
            """As the rank's actor takes it."""
            with tracing(trainer, tracer), tracer.span("train"):
                trainer.train(batch)

        against_bare = interleaved(
            {"slime": lambda: step(silent), "bare": lambda: bare_step(trainer, batch)}, BARE_ROUNDS
        )
        tracing_on_off = interleaved({"on": lambda: step(traced), "off": lambda: step(silent)}, TRACED_ROUNDS)
        require_every_span(folder)
    print(
        json.dumps(
            {
                "step": ratio(against_bare["slime"], against_bare["bare"]),
                "trace": ratio(tracing_on_off["on"], tracing_on_off["off"]),
                "seconds": medians(against_bare | tracing_on_off),
            }
        )
    )


def require_every_span(folder: str) -> None:
    missing = SPANS - {span.name for span in read_spans(folder)}
    if missing:
        raise RuntimeError(f"the traced steps recorded no {', '.join(sorted(missing))}: the ratio would leave them out")


def made(model: str, tracer: Tracer) -> "Trainer":
    """A trainer of one rank in this process."""
    from slime_cli.hardware import device as hardware

    device = hardware.prepare_trainer()
    import torch

    torch.set_num_threads(1)
    from slime_cli.addresses import free_port
    from slime_cli.models import architecture
    from slime_cli.training.network import megatron
    from slime_cli.training.settings import Settings
    from slime_cli.training.trainer import Trainer

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = megatron.always(device)
    known = architecture.megatron_args(architecture.read_config(model))
    assert known is not None, model
    argv += architecture.argv(known)
    argv += ["--global-batch-size", str(SAMPLES), "--lr", "1e-4"]
    args = megatron.parse(argv, 0, 1)
    megatron.initialise(args, device)
    return Trainer(args, Settings(max_tokens=2048), tracer)


def random_batch() -> TrainBatch:
    rng = np.random.default_rng(0)
    responses = rng.integers(2, 24, SAMPLES)
    lengths = responses + rng.integers(8, 40, SAMPLES)
    return TrainBatch(
        np.arange(SAMPLES),
        np.arange(SAMPLES) // 8,
        lengths,
        responses,
        rng.normal(size=SAMPLES),
        np.zeros(SAMPLES, bool),
        rng.integers(6, 300, int(lengths.sum())),
        np.ones(int(responses.sum()), np.uint8),
        np.full(int(responses.sum()), -5, np.float32),
    )


@contextlib.contextmanager
def tracing(trainer: "Trainer", tracer: Tracer) -> Iterator[None]:
    """``tracer`` for the trainer, which alone records a step's spans; then what was there before."""
    before = trainer.tracer
    trainer.tracer = tracer
    try:
        yield
    finally:
        trainer.tracer = before


def bare_step(trainer: "Trainer", batch: TrainBatch) -> None:
    """The same packs through Megatron's own loop, with its own cross entropy as the loss."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    mbs, _ = trainer.splitter.micro_batches(batch, range(len(batch)))

    def forward_step(iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
        mb = next(iterator)
        labels = mb.tokens_T.roll(-1)[None]
        out = model(mb.tokens_T[None], mb.pack.positions_T[None], None, labels=labels, packed_seq_params=mb.pack)
        return out, lambda loss: (loss.float().mean(), {"loss": loss.detach().float().mean()})

    for module in trainer.policy.model:
        module.zero_grad_buffer()
    trainer.policy.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(mbs),
        model=trainer.policy.model,
        num_microbatches=len(mbs),
        seq_length=trainer.args.seq_length,
        micro_batch_size=1,
        forward_only=False,
    )
    trainer.policy.optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
