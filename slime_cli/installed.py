"""Which engine packages are installed, in which versions, and what to do about one that is missing. Imports none of
them.

Used by doctor, by every command that starts an engine, and by run.json. megatron-bridge stands apart: the packages that
it asks for contradict SGLang's (two versions of flashinfer-python), and it imports almost none of them. So slime
declares those that it does import, and megatron-bridge itself is installed without its requirements, by one command.
"""

import importlib.metadata
from collections.abc import Callable

from slime_cli.errors import UsageError

TESTED = {
    "torch": "2.11.0",
    "transformers": "5.12.1",
    "sglang": "0.5.16",
    "sglang-router": "0.3.2",
    "megatron-core": "0.19.2",
    "megatron-bridge": "0.6.2",
    "ray": "2.60.0",
}
"""The versions that the tests ran with. A test compares them with pyproject.toml and the lock files."""

WITHOUT_REQUIREMENTS = ("megatron-bridge",)
"""Packages that the wheel does not ask for, because their own requirements cannot be met beside SGLang's."""

TRAINING = ("torch", "transformers", "megatron-core", "megatron-bridge")
SERVING = ("torch", "transformers", "sglang", "sglang-router")


def command(name: str) -> str:
    """The words that install the tested version of a package."""
    option = "--no-deps " if name in WITHOUT_REQUIREMENTS else ""
    return f"pip install {option}{name}=={TESTED[name]}"


def version(name: str) -> str | None:
    """The installed version; None when the package is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(*names: str, version: Callable[[str], str | None] = version) -> None:
    """Raises UsageError that names the packages that are missing and the commands that install them."""
    if missing := [name for name in names if version(name) is None]:
        fix = " && ".join(command(name) for name in missing)
        raise UsageError(f"not installed: {', '.join(missing)}", f"{fix}   (slime doctor looks at all of them)")
