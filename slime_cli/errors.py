"""Every error that a user is meant to read, with the exit code that the command line ends with.

A message says what is wrong, where, and what to do about it; ``fix`` is printed on a line of its own.
"""

from collections.abc import Sequence


class SlimeError(Exception):
    """Base of all errors that end a command with a message instead of a traceback."""

    exit_code = 1

    def __init__(self, message: str, fix: str = ""):
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.parts: tuple[SlimeError, ...] = (self,)
        """The errors that it lists; itself where it stands alone."""


class UsageError(SlimeError):
    """The command line, a profile or the environment asks for something that cannot be done."""

    exit_code = 2


class DataError(SlimeError):
    """Input data (prompts, checkpoints, manifests) is missing, malformed or unusable."""

    exit_code = 3


class EngineError(SlimeError):
    """An engine, router or trainer process failed to start, died or answered wrongly."""

    exit_code = 4


def together(errors: Sequence[SlimeError], what: str) -> SlimeError:
    """The only one of ``errors``, or one of the first's kind that lists all, each fix once; ``what``: "options are"."""
    if len(errors) == 1:
        return errors[0]
    lines = []
    fixes = [error.fix for error in errors]
    for number, error in enumerate(errors, 1):
        said = bool(error.fix) and error.fix not in fixes[number:]
        lines.append(f"  {number}. {error.message}{f' ({error.fix})' * said}")
    listing = type(errors[0])("\n".join([f"{len(errors)} {what}:", *lines]), "fix each as it says")
    listing.parts = tuple(part for error in errors for part in error.parts)
    return listing


class Interrupted(SlimeError):
    """Stopped from outside; what was committed is on disk and the same command resumes."""

    exit_code = 5
