"""An endpoint that somebody else owns (``--rollout-endpoint``): used, watched, never stopped."""

import pathlib
from collections.abc import Callable

import httpx
import msgspec

from slime_cli import manifests
from slime_cli.errors import EngineError
from slime_cli.serving import claim


class Attached:
    """Answers what :class:`slime_cli.serving.fleet.Fleet` answers, for engines of another process."""

    def __init__(self, path: str):
        self.path = path
        found = manifests.read(path, manifests.Endpoint)
        self.endpoint = msgspec.structs.replace(found, claim=found.claim or str(claim.beside(path)))
        self.http = httpx.Client(trust_env=False, timeout=10)

    def claim(self, holder: str, say: Callable[[str], None]) -> claim.Claim:
        """The right to change the engines' weights, for ``holder``. Raises UsageError that names who has it."""
        path = pathlib.Path(self.endpoint.claim)
        if not path.parent.is_dir():
            say(f"warning: {path} is not on this machine: nothing keeps runs of others from updating the same engines")
            path = claim.beside(self.path)
        return claim.Claim(path, holder, say)

    def wait_healthy(self) -> manifests.Endpoint:
        self.check()
        return self.endpoint

    def check(self) -> None:
        """Raises EngineError when the router, or every engine, no longer answers."""
        if not self._answers(self.endpoint.router_url + "/workers"):
            raise EngineError(
                f"{self.path}: the router at {self.endpoint.router_url} does not answer",
                "is `slime serve-rollout` still running?",
            )
        if not self.alive():
            raise EngineError(f"{self.path}: none of its engines answers", "is `slime serve-rollout` still running?")

    def alive(self) -> list[str]:
        return [
            e.url for e in self.endpoint.engines if self._answers(e.url + "/model_info")
        ]  # /health waits for a generation

    def _answers(self, url: str) -> bool:
        try:
            return self.http.get(url).status_code == 200
        except httpx.HTTPError:
            return False
