"""One group of the rank that sends and every rank of the engines, over which weights are broadcast.

Stock SGLang (0.5.16) joins it by ``/init_weights_update_group``, receives by ``/update_weights_from_distributed`` and
leaves by ``/destroy_weights_update_group``. NCCL on GPUs, gloo on a CPU. An engine that refuses a request never takes
part in the broadcast that belongs to it, and NCCL would wait for it without an end: so whatever waits here also looks
at the engines' answers, and is given up after :data:`PATIENCE`. A group in which anything went wrong is of no further
use.
"""

import datetime
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from slime_cli import addresses, engine_api
from slime_cli.errors import EngineError
from slime_cli.weights.posting import Posting
from slime_cli.weights.transport import Receiver

PATIENCE = 25.0
"""Seconds for the group to come together, and for one bucket to reach every engine."""
_LOOK = 0.0005
_GIVE_UP = 5.0
"""Seconds for an engine to leave a group."""


class BrokenError(Exception):
    """The group came to nothing; the text completes "the engines were not reached: "."""


class Group:
    """Raises :class:`BrokenError` when it does not come together. ``device``: the sender's, torch's."""

    def __init__(self, receivers: Sequence[Receiver], device: torch.device) -> None:
        self.receivers = tuple(receivers)
        self.name = f"slime-{os.getpid()}-{time.time_ns()}"
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._host = _address(receivers)
        self._joined: Any = None
        size = 1 + sum(receiver.ranks for receiver in receivers)
        listener = socket.create_server((self._host, 0), family=_family(self._host))
        port = listener.getsockname()[1]
        patience = datetime.timedelta(seconds=PATIENCE)
        # torch by itself would listen on every interface.
        self._store = TCPStore(
            self._host, port, size, True, patience, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        session = engine_api.Session(PATIENCE)
        asked = Posting([r.url for r in receivers], "/init_weights_update_group", session)
        offsets = {r.url: 1 + sum(before.ranks for before in receivers[:i]) for i, r in enumerate(receivers)}
        common = {"master_address": self._host, "master_port": port, "world_size": size}
        common |= {"group_name": self.name, "backend": self.backend}
        asked.put(lambda url: common | {"rank_offset": offsets[url]})
        try:
            _watched(lambda: self._join(size, patience), asked, device)
            asked.wait(0)
            if asked.failed:
                raise BrokenError("; ".join(asked.failed.values()))
        except BrokenError:
            self.close()
            raise
        finally:
            asked.close()
            session.close()

    def _join(self, size: int, patience: datetime.timedelta) -> None:
        """With the keys that torch's own functions, by which engines join, put into the store."""
        store = PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store))
        if self.backend == "gloo":
            if addresses.is_loopback(self._host):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            self._joined = distributed.ProcessGroupGloo(PrefixStore("cpu/", store), 0, size, patience)
        else:
            options = distributed.ProcessGroupNCCL.Options()
            self._joined = distributed.ProcessGroupNCCL(PrefixStore("cuda/", store), 0, size, options)

    def broadcast(self, flat: torch.Tensor, asked: Posting) -> None:
        """``flat`` to every engine, each of which was asked by ``asked`` to take it. Raises :class:`BrokenError`."""

        def send() -> None:
            work = self._joined.broadcast(flat, 0)
            work.wait()
            if flat.is_cuda:
                torch.cuda.current_stream(flat.device).synchronize()

        try:
            _watched(send, asked, flat.device)
        except BrokenError:
            self.close()
            raise

    def close(self) -> None:
        """Leaves it, as the engines do that answer. May be called again."""
        joined, self._joined = self._joined, None
        if joined is None:
            return

        def leave(url: str) -> None:
            engine_api.post(url, "/destroy_weights_update_group", {"group_name": self.name}, _GIVE_UP)

        asked = [threading.Thread(target=_quietly, args=(lambda url=r.url: leave(url),)) for r in self.receivers]
        for thread in asked:
            thread.daemon = True
            thread.start()
        given_up = threading.Thread(target=_quietly, args=(joined.abort,), daemon=True)
        given_up.start()
        for thread in (*asked, given_up):
            thread.join(_GIVE_UP)


def _watched(work: Callable[[], None], asked: Posting, device: torch.device) -> None:
    """``work`` in a thread, until it is done, an engine has refused, or too much time has gone."""
    failed: list[Exception] = []

    def run() -> None:
        try:
            if device.type == "cuda":  # another thread begins with the first one
                torch.cuda.set_device(device)
            work()
        except Exception as error:  # whatever torch raises
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + PATIENCE
    while thread.is_alive():
        thread.join(_LOOK)
        if thread.is_alive() and not asked.look():
            raise BrokenError("; ".join(asked.failed.values()))
        if time.monotonic() > end:
            raise BrokenError(f"nothing arrived in {PATIENCE:.0f} s")
    if failed:
        asked.look()
        said = "; ".join(asked.failed.values())
        raise BrokenError(said or f"{type(failed[0]).__name__}: {str(failed[0]).splitlines()[0]}")


def _quietly(work: Callable[[], object]) -> None:
    try:
        work()
    except (EngineError, RuntimeError):
        return


def _address(receivers: Sequence[Receiver]) -> str:
    """Where engines reach this process: loopback where all of them are on this machine."""
    hosts = [urllib.parse.urlsplit(receiver.url).hostname or "" for receiver in receivers]
    return addresses.LOOPBACK if all(map(addresses.is_loopback, hosts)) else addresses.reachable()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
