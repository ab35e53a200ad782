"""As :mod:`slime_cli.loop.phase` still calls transport and verification. Goes when it calls the publisher."""

import pathlib

from slime_cli.manifests.proof import Proof
from slime_cli.weights import verification
from slime_cli.weights.transports import disk

__all__ = ["load", "unchanged", "verify"]


def unchanged(urls: list[str], version: str) -> None:
    verification.unchanged(dict.fromkeys(urls, version))


def load(urls: list[str], folder: pathlib.Path, version: str) -> None:
    disk.load(disk.opened(folder, version), urls, flush=True)


def verify(urls: list[str], folder: pathlib.Path, version: str) -> list[Proof]:
    return verification.verify(disk.opened(folder, version), urls)
