"""An engine with a script in place of a model, for the contract of generate functions (:mod:`.doctor_function`).

It answers ``/generate`` as SGLang does, always with the same tokens, and remembers what it gave where: so that what a
function returns can be compared, token by token, with what was sampled.
"""

import http.server
import json
import threading
from typing import Any, cast

VERSION = "v000000"
MANY = 1000
"""Requests of one call of a function, after which it does not seem to end."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        engine = cast(ScriptedEngine, self.server)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = engine.answer(body) if self.path.rstrip("/") == "/generate" else None
        data = json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class ScriptedEngine(http.server.ThreadingHTTPServer):
    """Answers ``tokens``, whose text is ``text``, until it is closed (``with``)."""

    def __init__(self, tokens: list[int], text: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens = tokens
        self.text = text
        self.aborting = False
        self.given: dict[tuple[int, ...], tuple[int, float]] = {}
        """Tokens before a sampled token -> the token, and its log-probability."""
        self.requests = 0

    def __enter__(self) -> "ScriptedEngine":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """None, which is a 404, for a request that lacks its tokens, and after :data:`MANY`."""
        self.requests += 1
        if self.requests > MANY or not isinstance(body.get("input_ids"), list):
            return None
        most = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
        ids = self.tokens[: 1 if self.aborting else most]
        before = tuple(body["input_ids"])
        scored = []
        for place, token in enumerate(ids):
            log_prob = -0.25 - (len(before) + place) / 1024  # exact in binary, and unlike at each place
            self.given[(*before, *ids[:place])] = token, log_prob
            scored.append([log_prob, token, None])
        reason = "abort" if self.aborting else "stop" if len(ids) == len(self.tokens) else "length"
        meta = {"finish_reason": {"type": reason}, "weight_version": VERSION, "output_token_logprobs": scored}
        meta |= {"prompt_tokens": len(before), "completion_tokens": len(ids)}
        return {"output_ids": ids, "text": self.text if len(ids) == len(self.tokens) else "", "meta_info": meta}
