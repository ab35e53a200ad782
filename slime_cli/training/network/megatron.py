"""Genuine Megatron in this process: its parser, its validation, its process groups, its seeds.

One call of :func:`initialise` a process. A later phase of a run parses its own options with :func:`parse` in the same
process groups.
"""

import argparse
import contextlib
import datetime
import io
import os
import random
import socket
from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from slime_cli import addresses
from slime_cli.errors import EngineError, UsageError
from slime_cli.hardware import device as hardware
from slime_cli.hardware import transformer_engine
from slime_cli.options import catalogue
from slime_cli.processes import die_with_parent


def always(device: hardware.Device, given: Sequence[str] = ()) -> list[str]:
    """Native options that slime sets for every run; a user's own, ``given``, come later on the line and win."""
    out = [
        "--attention-dropout",
        "0",
        "--hidden-dropout",
        "0",
        "--tokenizer-type",
        "NullTokenizer",
        "--lr-decay-style",
        "constant",
        "--train-iters",
        "1000000",
        "--ckpt-format",
        "torch_dist",
        "--no-rope-fusion",
        "--moe-token-dispatcher-type",
        "alltoall",
        "--micro-batch-size",
        "1",
        "--lr-warmup-iters",
        "0",
        "--eval-iters",
        "0",
        "--eval-interval",
        "1000000",
    ]
    if transformer_engine.layers(device.kind, given) == "local":
        out += [
            "--transformer-impl",
            "local",
            "--no-masked-softmax-fusion",
            "--no-persist-layer-norm",
        ]
    if device.kind == "cpu":
        out += ["--distributed-backend", "gloo", "--use-cpu-initialization"]
        out += ["--no-gradient-accumulation-fusion", "--no-bias-swiglu-fusion"]  # made for a GPU's memory
    else:
        out += ["--distributed-backend", "nccl", *(() if "--fp16" in given else ("--bf16",))]
    return out


def parse(argv: list[str], rank: int, world_size: int) -> argparse.Namespace:
    """Megatron's own ``parse_args`` and ``validate_args`` over ``argv``. Raises UsageError with Megatron's own
    words."""
    from megatron.training.arguments import parse_args, validate_args

    from slime_cli.hardware.megatron import async_save_kept, command_line

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=os.environ.get("LOCAL_RANK", str(rank)))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            with command_line(argv):
                args = parse_args(_add_ours, ignore_unknown_args=False)
            hardware.check_trainer(vars(args))
            transformer_engine.check(args)
            with async_save_kept(args):
                validate_args(args)
    except SystemExit:
        last = said.getvalue().strip().splitlines()[-1:]
        raise UsageError(
            f"Megatron refuses the options: {' '.join(last)}", "its own --help lists what it takes"
        ) from None
    except (AssertionError, ValueError, RuntimeError) as error:
        raise UsageError(f"Megatron refuses the options: {error}", "see the option it names") from error
    args.padded_vocab_size = args.vocab_size
    args.variable_seq_lengths = True  # packs differ in length, and pipeline stages must tell each other; not a flag
    return args


def _add_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options of models that Megatron has no option for (:data:`slime_cli.options.catalogue.ADDED`)."""
    for option in catalogue.ADDED["megatron"]:
        parser.add_argument(*option.flags, dest=option.dest, action=option.action, help=option.help)
    return parser


def initialise(args: argparse.Namespace, device: hardware.Device) -> None:
    """Process groups, seeds and Megatron's globals. ``MASTER_ADDR`` and ``MASTER_PORT`` must be set."""
    from megatron.core import mpu

    # Megatron's checkpoint writer forks a helper, which must not outlive a trainer that is killed.
    os.register_at_fork(after_in_child=die_with_parent)
    if device.kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store = _meeting_point(args.rank, args.world_size)
    minutes = args.distributed_timeout_minutes
    torch.distributed.init_process_group(
        device.backend,
        store=store,
        rank=args.rank,
        world_size=args.world_size,
        timeout=datetime.timedelta(minutes=minutes),
    )
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=args.use_gloo_process_groups,
        distributed_timeout_minutes=minutes,
    )


def _meeting_point(rank: int, world_size: int) -> Store:
    """Where the ranks find each other. Rank 0 listens on ``MASTER_ADDR`` alone; torch by itself on every interface."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    if addresses.is_loopback(host):  # the ranks' own connections stay on this machine as well
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    listener = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=4096).detach()
        except OSError as error:
            raise EngineError(
                f"the trainer cannot listen on {host} port {port}: {error.strerror}", "start it again"
            ) from None
    patience = datetime.timedelta(minutes=30)
    return TCPStore(host, port, world_size, rank == 0, timeout=patience, master_listen_fd=listener)


def begin_phase(args: argparse.Namespace) -> None:
    """Makes ``args`` Megatron's current ones and seeds every generator from ``args.seed``, as Megatron does."""
    from megatron.core import mpu, num_microbatches_calculator, tensor_parallel
    from megatron.training.global_vars import set_args, unset_global_variables

    unset_global_variables()
    set_args(args)
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        args.rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False
    )
    seed = args.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
