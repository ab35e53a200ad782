"""The engine profile against a scripted router and engines: which requests go where, and when it is content."""

import gzip
import http.server
import json
import pathlib
import threading

import pytest

from slime_cli.errors import EngineError
from slime_cli.manifests import Endpoint, Engine
from slime_cli.profiling.engines import profile_engines


class Scripted(http.server.BaseHTTPRequestHandler):
    """An engine that writes its trace at a generation, or (as the router) passes those to the first engine."""

    def do_GET(self):
        self._answer({"workers": [{"url": url, "is_healthy": True} for url in self.server.workers]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        server.seen.append((self.path, body))
        if self.path == "/start_profile":
            server.profile = body
        elif server.forward_to:
            server.forward_to.generate()
        else:
            server.generate()
        self._answer({}, 500 if self.path == server.broken else 200)

    def _answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    def __init__(self, workers=(), forward_to=None):
        super().__init__(("127.0.0.1", 0), Scripted)
        self.workers = workers
        self.forward_to = forward_to
        self.seen = []
        self.profile = None
        self.broken = ""
        self.writes = True
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def generate(self):
        if self.profile and self.writes:
            with gzip.open(pathlib.Path(self.profile["output_dir"]) / "1-TP-0.trace.json.gz", "w") as file:
                file.write(b"{}")


@pytest.fixture
def engines():
    servers = [Server(), Server()]
    yield servers
    for server in servers:
        server.shutdown()


@pytest.fixture
def endpoint(engines):
    router = Server(workers=[engine.url for engine in engines], forward_to=engines[0])
    listed = [Engine(url=engine.url, role="regular", devices=[], pid=1, host="h") for engine in engines]
    yield Endpoint(
        router_url=router.url,
        engines=listed,
        model="m",
        engine_name="sglang",
        engine_version="0",
        owner_pid=1,
        owner_host="h",
        created=0.0,
    )
    router.shutdown()


def test_every_engine_is_profiled_even_one_that_the_router_never_chooses(tmp_path, engines, endpoint, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # must not be used
    found = profile_engines(endpoint, tmp_path / "out", num_steps=3, timeout=20)
    assert sorted(found) == sorted(engine.url for engine in engines)
    assert all(len(paths) == 1 and paths[0].is_file() for paths in found.values())
    for engine in engines:
        assert engine.profile["num_steps"] == 3 and engine.profile["activities"] == ["CPU"]
        assert "/stop_profile" not in {path for path, _ in engine.seen}
    assert engines[0].profile["output_dir"] != engines[1].profile["output_dir"]


@pytest.mark.slow
def test_a_second_profile_into_the_same_folder_waits_for_its_own_traces(tmp_path, engines, endpoint):
    profile_engines(endpoint, tmp_path, timeout=20)
    for engine in engines:
        engine.writes = False
    with pytest.raises(EngineError, match="no complete trace"):
        profile_engines(endpoint, tmp_path, timeout=1)


def test_an_engine_that_refuses_is_named(tmp_path, engines, endpoint):
    engines[1].broken = "/start_profile"
    with pytest.raises(EngineError, match=rf"{engines[1].url}/start_profile: status 500"):
        profile_engines(endpoint, tmp_path, timeout=5)


def test_a_router_that_is_down_or_empty(tmp_path, endpoint):
    import msgspec

    with pytest.raises(EngineError, match="/workers"):
        profile_engines(msgspec.structs.replace(endpoint, router_url="http://127.0.0.1:9"), tmp_path)
    empty = Server()
    with pytest.raises(EngineError, match="no workers"):
        profile_engines(msgspec.structs.replace(endpoint, router_url=empty.url), tmp_path)
    empty.shutdown()
