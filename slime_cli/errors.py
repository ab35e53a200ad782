"""Every error that a user is meant to read, with the exit code that the command line ends with.

A message says what is wrong, where, and what to do about it; ``fix`` is printed on a line of its own.
"""


class SlimeError(Exception):
    """Base of all errors that end a command with a message instead of a traceback."""

    exit_code = 1

    def __init__(self, message: str, fix: str = ""):
        super().__init__(message)
        self.message = message
        self.fix = fix


class UsageError(SlimeError):
    """The command line, a profile or the environment asks for something that cannot be done."""

    exit_code = 2


class DataError(SlimeError):
    """Input data (prompts, checkpoints, manifests) is missing, malformed or unusable."""

    exit_code = 3


class EngineError(SlimeError):
    """An engine, router or trainer process failed to start, died or answered wrongly."""

    exit_code = 4


class Interrupted(SlimeError):
    """Stopped from outside; what was committed is on disk and the same command resumes."""

    exit_code = 5
