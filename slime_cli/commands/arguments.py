"""The part of the command line that ``train`` and ``serve-rollout`` read themselves, before options are resolved."""

import dataclasses

from slime_cli.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Line:
    """A command line split into what the command reads and what :mod:`slime_cli.options` resolves."""

    profiles: list[str]
    dry_run: bool
    verbose: bool
    script: str | None
    """A launch script of slime's to take the options from."""
    rest: list[str]


def split(argv: list[str]) -> Line:
    """Takes ``--profile NAME`` (repeatable), ``--from-script PATH``, ``--dry-run`` and ``--verbose`` out of
    ``argv``."""
    profiles = []
    script = None
    rest = []
    switches = set()
    words = iter(argv)
    for word in words:
        if word == "--profile":
            name = next(words, None)
            if name is None or name.startswith("--"):
                raise UsageError("--profile needs a name", "for example --profile quickstart")
            profiles.append(name)
        elif word.startswith("--profile="):
            profiles.append(word.partition("=")[2])
        elif word.partition("=")[0] == "--from-script":
            script = word.partition("=")[2] or next(words, "")
            if not script or script.startswith("--"):
                raise UsageError("--from-script needs a launch script", "for example --from-script run.sh --dry-run")
        elif word in ("--dry-run", "--verbose"):
            switches.add(word)
        else:
            rest.append(word)
    return Line(profiles, "--dry-run" in switches, "--verbose" in switches, script, rest)
