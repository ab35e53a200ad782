"""A router in front of the router: passes every request on, and keeps what ``/generate`` was asked and what it
answered."""

import http.server
import json
import pathlib
import threading
from typing import Any, cast

import httpx


class Handler(http.server.BaseHTTPRequestHandler):
    def pass_on(self) -> None:
        recorder = cast(Recorder, self.server)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        given = {"content-type": self.headers.get("content-type") or "application/json"}
        answer = recorder.http.request(self.command, recorder.url + self.path, content=body, headers=given)
        if self.path == "/generate" and answer.status_code == 200:
            recorder.turns.append((json.loads(body), answer.json()))
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers.get("content-type", "application/json"))
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    do_GET = do_POST = pass_on

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Recorder(http.server.ThreadingHTTPServer):
    """Stands in front of the router of an ``endpoint.json`` (``with``)."""

    daemon_threads = True
    request_queue_size = 512  # by default 5: of an evaluation's connections the others try again, after up to 16 s

    def __init__(self, endpoint: pathlib.Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.found = json.loads(endpoint.read_text())
        self.url = self.found["router_url"]
        self.http = httpx.Client(trust_env=False, timeout=120)
        self.turns: list[tuple[dict, Any]] = []
        """(request, answer) of every ``/generate``."""

    def __enter__(self) -> "Recorder":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self.http.close()

    def endpoint(self, path: pathlib.Path) -> pathlib.Path:
        """The same endpoint with this address for the router's, written to ``path``."""
        host, port = self.server_address[:2]
        path.write_text(json.dumps(self.found | {"router_url": f"http://{host}:{port}"}))
        return path
