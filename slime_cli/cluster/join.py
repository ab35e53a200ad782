"""Starting Ray for a run, or joining the cluster that ``RAY_ADDRESS`` names.

Called once a process, by :mod:`slime_cli.cluster.cluster`; Ray is imported here and nowhere before, since it reads its
settings when it is imported.
"""

import contextlib
import os
import pathlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

from slime_cli import interrupts, processes
from slime_cli.errors import EngineError

_WORKERS = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # engines and ranks pick their device by its index
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray puts workers behind everything else; these are the work
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a thread that outlives a run's Ray starts none of its own
}
_IS_IT_THERE = "`ray status --address {}` says whether it runs; unset RAY_ADDRESS to let the run start a Ray of its own"
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""By Ray's own setting for machines that form no cluster, a local one keeps to loopback, as far as Ray lets it."""


def start(folder: pathlib.Path, cores: int) -> Any:
    """The module ``ray``, connected. Raises EngineError with what to do when it cannot be.

    ``folder`` is where a local Ray starts its workers: it puts that folder first on their import path, so it is none of
    the user's, whose scripts could take a library's place. What runs in a worker enters the user's folder itself.
    """
    joined = os.environ.get("RAY_ADDRESS")
    for name, value in (_WORKERS if joined else _WORKERS | _ALONE).items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONWARNINGS"] = "ignore"
    os.environ["PYTHONPATH"] = processes.import_path(os.environ.get("PYTHONPATH", ""))
    settings: dict[str, Any] = dict(
        include_dashboard=False, log_to_driver=False, logging_level="ERROR", namespace="slime"
    )
    if joined:
        _require_listener(joined)
        if asks_for_token(joined):
            use_token(os.environ, pathlib.Path.home())
        names = (*_WORKERS, "PYTHONWARNINGS", "PYTHONPATH")
        settings |= {"address": "auto", "runtime_env": {"env_vars": {name: os.environ[name] for name in names}}}
    else:
        settings |= {
            "address": "local",
            "num_cpus": cores,
            "object_store_memory": 256 * 2**20,
            "_node_ip_address": "127.0.0.1",
        }
    import ray

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.chdir(folder), _quiet(folder / "ray.log"), interrupts.kept():
            ray.init(**settings)
    except Exception as error:
        raise _explained(error, joined) from None
    return ray


def _require_listener(joined: str) -> None:
    """Ray tries for minutes where nobody listens. An address without a port (``auto``) or with a protocol is left to
    Ray.
    """
    host, _, port = joined.rpartition(":")
    if not host or "/" in joined or not port.isdecimal():
        return
    try:
        if int(port) > 65535:  # the resolver would take it for the port that its low 16 bits are
            raise OSError("no such port")
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EngineError(f"nobody listens at RAY_ADDRESS={joined} ({reason})", _IS_IT_THERE.format(joined)) from None


@contextlib.contextmanager
def _quiet(log: pathlib.Path) -> Iterator[None]:
    """What Ray's native part writes to stderr meanwhile goes to ``log``: each second that it cannot connect."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def asks_for_token(joined: str) -> bool:
    """Whether the cluster refuses calls without one. A token that it does not ask for keeps its calls to us from
    arriving.

    True where that cannot be asked: an address without a port, or with a protocol.
    """
    if "/" in joined or not joined.rpartition(":")[2].isdecimal():
        return True
    import grpc

    with grpc.insecure_channel(joined, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=10)
        except grpc.RpcError as error:
            return error.code() == grpc.StatusCode.UNAUTHENTICATED
    return False


def use_token(environment: Any, home: pathlib.Path) -> None:
    """Offers a cluster the token that Ray's settings name. ``ray start`` asks for one by default; Ray's client has to
    be told.
    """
    named = (
        environment.get("RAY_AUTH_TOKEN")
        or environment.get("RAY_AUTH_TOKEN_PATH")
        or (home / ".ray" / "auth_token").is_file()
    )
    if named:
        environment.setdefault("RAY_AUTH_MODE", "token")


def _explained(error: BaseException, joined: str | None) -> EngineError:
    """What Ray raised, in a line, with the fix."""
    texts = []
    found: BaseException | None = error
    while found is not None:
        texts.append(str(found))
        found = found.__cause__ or found.__context__
    everything = "\n".join(texts)
    if not joined:
        return EngineError(
            f"Ray did not start: {_line(texts[0], error)}",
            "its logs are in /tmp/ray/session_latest/logs; slime doctor checks shared memory",
        )
    if "AuthToken" in everything or "Authentication" in everything:
        return EngineError(
            f"the Ray cluster at RAY_ADDRESS={joined} asks for a token, and this process has none or another one",
            "copy ~/.ray/auth_token of the head node to this machine, or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
        )
    return EngineError(
        f"no Ray cluster could be joined at RAY_ADDRESS={joined}: {_line(texts[0], error)}", _IS_IT_THERE.format(joined)
    )


def _line(text: str, error: BaseException) -> str:
    return (text.strip().splitlines() or [type(error).__name__])[0][:300]
