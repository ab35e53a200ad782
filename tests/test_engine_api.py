"""Requests of a session, to a server whose connections are counted."""

import concurrent.futures
import contextlib
import http.server
import json
import threading
import time

import pytest

from slime_cli import engine_api
from slime_cli.errors import EngineError


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        time.sleep(body.get("sleep", 0))
        if body.get("leave"):
            self.close_connection = True
            return
        content = b'{"said": "no"}' if "status" in body else b"{}"
        self.send_response(body.get("status", 200))
        self.send_header("Content-Length", str(len(content)))
        with contextlib.suppress(BrokenPipeError):  # one that did not wait
            self.end_headers()
            self.wfile.write(content)
        self.close_connection = body.get("close", False)

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.connections, made.bodies = 0, []
    made.url = f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_a_connection_serves_many_requests(server):
    session = engine_api.Session(10)
    for number in range(5):
        session.done(server.url, "/a", {"number": number})
    assert [body["number"] for body in server.bodies] == list(range(5)) and server.connections == 1
    session.close()


def test_a_connection_that_the_server_has_closed_is_not_used_again(server):
    session = engine_api.Session(10)
    for _ in range(3):
        session.done(server.url, "/a", {"close": True})
        time.sleep(0.1)
    assert len(server.bodies) == server.connections == 3
    session.close()


def test_threads_have_connections_of_their_own(server):
    session = engine_api.Session(10)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: session.done(server.url, "/a", {"sleep": 0.2, "n": n}), range(4)))
    for _ in range(4):
        session.done(server.url, "/a", {})
    assert server.connections == 4
    session.close()


def test_what_went_wrong_is_said(server):
    session = engine_api.Session(10)
    with pytest.raises(EngineError, match=r"/a answered 400: .*no"):
        session.done(server.url, "/a", {"status": 400})
    with pytest.raises(EngineError, match="TimeoutError"):
        engine_api.Session(0.3).done(server.url, "/a", {"sleep": 1})
    with pytest.raises(EngineError, match="RemoteDisconnected"):
        session.done(server.url, "/a", {"leave": True})
    session.done(server.url, "/a", {})
    with pytest.raises(EngineError, match=r"127.0.0.1:9/a: ConnectionRefusedError"):
        session.done("http://127.0.0.1:9", "/a", {})
    session.close()
