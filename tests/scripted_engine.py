"""An SGLang server and a router in one, over HTTP, that answer what a test sets: no weights, no model."""

import http.server
import json
import os
import pathlib
import threading

from safetensors.torch import load_file

from slime_cli import manifests
from slime_cli.weights import publish


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(self.server.answers.get(self.path))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "null")
        self.server.posted.append((self.path, body))
        answer = self.server.answers.get(self.path)
        self._answer(answer(body) if callable(answer) else answer)

    def _answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(404 if value is None else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class ScriptedEngine(http.server.ThreadingHTTPServer):
    """``answers`` by path; a function gets a POST's body. ``posted`` has what was sent."""

    def __init__(self, model: pathlib.Path | str, **server_info):
        super().__init__(("127.0.0.1", 0), Handler)
        config = (
            json.loads((pathlib.Path(model) / "config.json").read_text())
            if (pathlib.Path(model) / "config.json").exists()
            else {}
        )
        self.answers: dict = {
            "/workers": {"workers": []},
            "/model_info": {
                "model_path": str(model),
                "architectures": config.get("architectures"),
                "weight_version": "default",
            },
            "/server_info": {"dtype": "float32", "device": "cpu"} | server_info,
        }
        self.posted: list = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def endpoint(self, *others: "ScriptedEngine", host: str = os.uname().nodename, **fields) -> manifests.Endpoint:
        """The manifest of this one (the router as well) and others."""
        engines = [manifests.Engine(url=e.url, role="regular", devices=[0], pid=1, host=host) for e in (self, *others)]
        given = {
            "router_url": self.url,
            "engines": engines,
            "model": self.answers["/model_info"]["model_path"],
            "engine_name": "sglang",
            "engine_version": "0.5.16",
            "owner_pid": 1,
            "owner_host": host,
            "created": 0.0,
        }
        return manifests.Endpoint(**given | fields)


class LoadingEngine(ScriptedEngine):
    """Answers as an engine that loads versions from disk: it reports the name and the sums of the last one."""

    def __init__(self, model: pathlib.Path | str = "model", **server_info):
        super().__init__(model, **server_info)
        self.answers["/update_weights_from_disk"] = self._load
        self.answers["/flush_cache?timeout=0.2"] = {}
        self.answers["/weights_checker"] = {"ranks": [{"checksums": {}}]}

    def _load(self, body):
        version = manifests.read(pathlib.Path(body["model_path"]) / "manifest.json", manifests.Weights)
        sums = {name: tensor.checksum for name, tensor in version.tensors.items()}
        self.answers["/weights_checker"] = {"ranks": [{"checksums": sums}]}
        self.answers["/model_info"] = self.answers["/model_info"] | {"weight_version": body["weight_version"]}
        return {"success": True}

    @property
    def version(self) -> str:
        return self.answers["/model_info"]["weight_version"]


class ReadingEngine(LoadingEngine):
    """A :class:`LoadingEngine` that sums up the tensors that lie in the folder, whatever its manifest says."""

    def _load(self, body):
        tensors = {}
        for file in pathlib.Path(body["model_path"]).glob("*.safetensors"):
            tensors |= load_file(file)
        self.weights = {name: tensor.clone() for name, tensor in tensors.items()}
        self.summed()
        self.answers["/model_info"] = self.answers["/model_info"] | {"weight_version": body["weight_version"]}
        return {"success": True}

    def summed(self) -> None:
        """It reports the sums of ``weights``, which a test may change."""
        sums = {name: publish.checksum(tensor) for name, tensor in self.weights.items()}
        self.answers["/weights_checker"] = {"ranks": [{"checksums": sums}]}
