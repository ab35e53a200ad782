"""Two trainer ranks that each share a buffer with one rank of an engine, as on two GPUs: rank 0 speaks for both."""

import multiprocessing
import os

import pytest
import torch
from torch import distributed

from slime_cli.weights.sending import Sender
from slime_cli.weights.transport import Receiver, Sending
from tests.memory_engine import MemoryEngine

WEIGHTS = {f"w{i}": torch.full((i + 1, 4), float(i)) for i in range(9)}


def rank(number: int, meeting: str, how: Sending, answers: "multiprocessing.Queue") -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    sender = Sender(number, torch.device("cpu"))
    failed = []
    for factor in (1.0, 2.0):
        # what rank 1 has differs, so that it shows which rank's buffer an engine has opened
        named = [(name, (tensor + 100 * number) * factor) for name, tensor in WEIGHTS.items()]
        failed.append(sender.send(iter(named), how, 10_000))
    answers.put((number, failed))
    distributed.barrier()  # buffers stay until engines have what is in them


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_rank_of_an_engine_opens_the_buffer_of_its_own_trainer_rank(tmp_path):
    engine = MemoryEngine(WEIGHTS, ranks=2)
    other = MemoryEngine(WEIGHTS)
    how = Sending("ipc", (Receiver(engine.url, (0, 1)), Receiver(other.url, (0,))), 0, buffer=64)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=rank, args=(n, str(tmp_path / "meeting"), how, answers)) for n in range(2)]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=100) for _ in ranks)
    for process in ranks:
        process.join(20)
    assert found == {0: [{}, {}], 1: [{}, {}]}
    for name, tensor in WEIGHTS.items():
        assert torch.equal(other.weights[name], tensor * 2), name
        assert [torch.equal(held[name], (tensor + 100 * n) * 2) for n, held in enumerate(engine.by_rank)] == [
            True,
            True,
        ]
    engine.end()
    other.end()
