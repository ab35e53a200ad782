"""Starting or joining Ray, over a scripted ``ray.init``: where workers start, the token, and every failure in words."""

import concurrent.futures
import os
import socket
import sys
import types

import grpc
import pytest

from slime_cli.cluster import join
from slime_cli.errors import EngineError


@pytest.fixture
def ray(monkeypatch, tmp_path):
    """A stand-in for the module; ``calls`` has the settings and the working directory of each ``init``."""
    for name in [n for n in os.environ if n.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ, HOME=str(tmp_path / "home")))
    fake = types.SimpleNamespace(calls=[], error=None, asks=True)

    def init(**settings):
        fake.calls.append((settings, os.getcwd()))
        if fake.error:
            raise fake.error

    fake.init = init
    monkeypatch.setattr(join, "asks_for_token", lambda joined: fake.asks)
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def head():
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("address", ["CLOSED", "127.0.0.1:99999", "no.such.host.invalid:6379"])
def test_where_nobody_listens_ray_is_not_asked(ray, tmp_path, head, address):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        os.environ["RAY_ADDRESS"] = address = address.replace("CLOSED", f"127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(EngineError, match=f"nobody listens at RAY_ADDRESS={address} "):
            join.start(tmp_path / "logs", 1)
    assert not ray.calls


def test_a_ray_of_the_run_s_own_keeps_to_loopback_and_its_workers_start_in_no_folder_of_the_user_s(ray, tmp_path):
    before = os.getcwd()
    assert join.start(tmp_path / "logs", 3) is ray
    ((settings, folder),) = ray.calls
    assert settings["address"] == "local" and settings["num_cpus"] == 3 and "runtime_env" not in settings
    assert folder == str(tmp_path / "logs") and os.getcwd() == before
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0" and "RAY_AUTH_MODE" not in os.environ


def test_what_ray_writes_meanwhile_is_in_a_log(ray, tmp_path, capfd):
    init = ray.init

    def noisy(**settings):
        os.write(2, b"gcs_client.cc: Failed to get cluster ID\n")
        init(**settings)

    ray.init = noisy
    join.start(tmp_path / "logs", 3)
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n" and "Failed to get" in (tmp_path / "logs" / "ray.log").read_text()


def test_a_cluster_s_workers_get_the_environment_that_a_local_one_inherits(ray, tmp_path, head):
    os.environ["RAY_ADDRESS"] = head
    join.start(tmp_path / "logs", 3)
    settings, _ = ray.calls[0]
    given = settings["runtime_env"]["env_vars"]
    assert settings["address"] == "auto" and given["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert given["PYTHONPATH"] == os.environ["PYTHONPATH"] and "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ


@pytest.mark.parametrize("given", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "file"])
def test_the_token_that_ray_s_settings_name_is_offered(tmp_path, given):
    environment = {} if given == "file" else {given: "x"}
    (tmp_path / ".ray").mkdir()
    if given == "file":
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    join.use_token(environment, tmp_path)
    assert environment["RAY_AUTH_MODE"] == "token"


def test_without_a_token_or_with_a_mode_of_the_user_s_own_nothing_is_changed(tmp_path):
    environment = {}
    join.use_token(environment, tmp_path)
    assert environment == {}
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}
    join.use_token(environment, tmp_path)
    assert environment["RAY_AUTH_MODE"] == "disabled"


@pytest.mark.parametrize("asks", [True, False])
def test_a_token_is_offered_to_a_cluster_that_asks_for_one_alone(ray, tmp_path, head, asks):
    os.environ |= {"RAY_ADDRESS": head, "RAY_AUTH_TOKEN": "x"}
    ray.asks = asks
    join.start(tmp_path / "logs", 1)
    assert os.environ.get("RAY_AUTH_MODE") == ("token" if asks else None)


@pytest.mark.parametrize(("code", "asks"), [("UNAUTHENTICATED", True), ("OK", False), ("UNAVAILABLE", False)])
def test_the_cluster_itself_says_whether_it_asks(monkeypatch, code, asks):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used

    def answer(request, context):
        if code != "OK":
            context.abort(getattr(grpc.StatusCode, code), "no")
        return b""

    method = {"GetClusterId": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", method)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert join.asks_for_token(f"127.0.0.1:{port}") is asks
    finally:
        server.stop(None)
    assert join.asks_for_token("auto") and join.asks_for_token("ray://127.0.0.1:1")


def chained(cause, error):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("address", "error", "said", "fix"),
    [
        (
            "HEAD",
            chained(RuntimeError("InvalidAuthToken: missing\nmore"), ConnectionError("Failed to connect")),
            "HEAD asks for a token",
            "RAY_AUTH_TOKEN_PATH",
        ),
        (
            "HEAD",
            ConnectionError("Failed to connect to Ray cluster at HEAD\nTraceback"),
            "joined at RAY_ADDRESS=HEAD: Failed to connect",
            "ray status",
        ),
        ("nonsense", ValueError("Malformed address"), "RAY_ADDRESS=nonsense: Malformed address", "unset RAY_ADDRESS"),
        ("HEAD", RuntimeError(""), "RAY_ADDRESS=HEAD: RuntimeError", "ray status"),
        (
            None,
            RuntimeError("The current node timed out during startup."),
            "Ray did not start: The current node timed out",
            "logs",
        ),
        (None, OSError(28, "No space left on device"), "No space left on device", "logs"),
    ],
)
def test_whatever_ray_raises_is_an_engine_error_of_one_line_with_a_fix(ray, tmp_path, head, address, error, said, fix):
    if address:
        os.environ["RAY_ADDRESS"] = address.replace("HEAD", head)
        said = said.replace("HEAD", head)
    ray.error = error
    with pytest.raises(EngineError) as raised:
        join.start(tmp_path / "logs", 1)
    assert said in raised.value.message and "\n" not in raised.value.message and fix in raised.value.fix
