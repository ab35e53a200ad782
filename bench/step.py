"""slime's trainer step against a bare Megatron loop over the same micro-batches, and tracing on against off.

Runs in a process of its own (``python -m bench.step MODEL``) and prints one JSON object.
"""

import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np


def main(model: str) -> None:
    from slime_cli.hardware import device as hardware

    device = hardware.prepare_trainer()
    import torch

    torch.set_num_threads(1)
    from slime_cli.addresses import free_port
    from slime_cli.buffer.batch import TrainBatch
    from slime_cli.hardware import transformer_engine
    from slime_cli.models import architecture
    from slime_cli.tracing.reading import read_spans
    from slime_cli.tracing.spans import Tracer
    from slime_cli.training.network import megatron
    from slime_cli.training.settings import Settings
    from slime_cli.training.trainer import Trainer

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = megatron.always(device, transformer_engine=transformer_engine.problem(device.kind) is None)
    argv += architecture.argv(architecture.megatron_args(architecture.read_config(model))) + [
        "--global-batch-size",
        "256",
        "--lr",
        "1e-4",
    ]
    args = megatron.parse(argv, 0, 1)
    megatron.initialise(args, device)
    folder = tempfile.mkdtemp()
    traced = Tracer(folder, "on")
    silent = Tracer(folder, "off", enabled=False)
    trainer = Trainer(args, Settings(max_tokens=2048), silent)
    rng = np.random.default_rng(0)
    n = 256
    responses = rng.integers(2, 24, n)
    lengths = responses + rng.integers(8, 40, n)
    batch = TrainBatch(
        np.arange(n),
        np.arange(n) // 8,
        lengths,
        responses,
        rng.normal(size=n),
        np.zeros(n, bool),
        rng.integers(6, 300, int(lengths.sum())),
        np.ones(int(responses.sum()), np.uint8),
        np.full(int(responses.sum()), -5, np.float32),
    )
    bare = functools.partial(bare_step, trainer, batch)

    def traced_step():
        with tracing(trainer, traced), traced.span("train"):  # as the rank's actor does
            trainer.train(batch)

    kinds = {"slime": lambda: trainer.train(batch), "bare": bare, "traced": traced_step}
    times = {kind: [] for kind in kinds}
    for i in range(26):
        for kind in sorted(kinds, key=lambda k: (i + len(k)) % 3):  # interleaved, so that noise hits all alike
            start = time.perf_counter()
            kinds[kind]()
            if i >= 2:
                times[kind].append(time.perf_counter() - start)
    missing = SPANS - {span.name for span in read_spans(folder)}
    if missing:
        raise RuntimeError(f"the traced steps recorded no {', '.join(sorted(missing))}: the ratio would leave them out")
    middle = {kind: statistics.median(values) for kind, values in times.items()}
    print(
        json.dumps({"step": ratio(times, "slime", "bare"), "trace": ratio(times, "traced", "slime"), "seconds": middle})
    )


SPANS = {"train", "data", "advantages", "forward_backward", "optimizer"}
"""What a rank records of a step: its own spans, and those of the network."""


@contextlib.contextmanager
def tracing(trainer, tracer) -> Iterator[None]:
    """``tracer`` for the trainer, which alone records a step's spans; then what was there before."""
    before = trainer.tracer
    trainer.tracer = tracer
    try:
        yield
    finally:
        trainer.tracer = before


def ratio(times: dict[str, list[float]], kind: str, to: str) -> float:
    """Median over rounds: the two times of a round are neighbours, so a machine that slows down for a while cancels
    out."""
    return statistics.median(a / b for a, b in zip(times[kind], times[to]))


def bare_step(trainer, batch) -> None:
    """The same packs through Megatron's own loop, with its own cross entropy as the loss."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    mbs, _ = trainer.splitter.micro_batches(batch, range(len(batch)))

    def forward_step(iterator, model):
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
