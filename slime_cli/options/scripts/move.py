"""What a launch script gives slime's ``train.py``, as a command of ours, with what changed and why.

Only what changes nothing in the result is left out or put otherwise here. What would change it stays as it is given,
and is refused by name where the command is read.
"""

import dataclasses
import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence

from slime_cli.options import layers, own
from slime_cli.options.checks.settled import IDLE, ROLLOUTS
from slime_cli.options.derive import FULLY_ASYNC
from slime_cli.options.not_yet import NOT_YET
from slime_cli.options.scripts.expand import Notes, Value
from slime_cli.options.scripts.follow import Followed, follow, told
from slime_cli.options.unread import UNREAD

LEFT_OUT = frozenset(
    """
    --use-fault-tolerance --rollout-health-check-interval --rollout-health-check-timeout
    --rollout-health-check-first-wait --num-gpus-per-node
    --update-weight-disk-dir --update-weight-disk-keep-files --update-weight-buffer-size --check-weight-update-equal
    --rollout-data-transport --use-distributed-post --recompute-loss-function --data-pad-size-multiplier
    --log-probs-max-tokens-per-gpu --dump-details --save-debug-train-data --memory-snapshot-dir
    --memory-snapshot-num-steps --memory-recorder --profile-target --log-multi-turn --log-passrate
    --log-reward-category --log-correct-samples --use-rollout-entropy --ci-test --ci-disable-kl-checker
    --ci-train-rollout-logprob-abs-diff-threshold --ci-save-grad-norm --ci-load-grad-norm --train-env-vars --http-proxy
    """.split()
)
"""Options of slime's that are not here and without which a run trains the same; ``not_yet.py`` says what to do
instead. One that is here by now is given like any other."""
APPENDED = "--rollout-sample-hook-path"
"""The one option of slime's whose values add up where it is given more than once."""
DEVICES = 8
"""slime's default of ``--actor-num-gpus-per-node``."""
WHY_IDLE = {
    **{own.flag(dest): f"it has no effect {why}" for dest, why in IDLE.items()},
    "--debug-train-only": "with --loss-type sft_loss no engine is started anyway",
    "--disable-compute-advantages-and-returns": "with --loss-type sft_loss there are none anyway",
    "--train-backend": "Megatron is the only trainer",
}


@dataclasses.dataclass(frozen=True)
class Given:
    """An option as the script has it."""

    words: tuple[Value, ...]

    @property
    def flag(self) -> str:
        return self.words[0].text.partition("=")[0]

    @property
    def value(self) -> str:
        after = self.words[0].text.partition("=")[2:]
        return " ".join([*filter(None, after), *(word.text for word in self.words[1:])])


@dataclasses.dataclass(frozen=True)
class Moved:
    """A script as a command of ours."""

    options: tuple[Given, ...]
    changed: tuple[str, ...]
    """Each with its reason."""
    unknown: tuple[str, ...]
    """What could not be read, each with its line."""
    exported: tuple[str, ...]

    @property
    def argv(self) -> list[str]:
        return [word.text for given in self.options for word in given.words]

    def command(self, more: Sequence[str] = ()) -> str:
        """As one would type it. ``more``: options that are given beside the script's."""
        lines = [" ".join(map(_typed, given.words)) for given in self.options]
        if more:
            lines.append(shlex.join(more))
        return " \\\n    ".join(["slime train", *lines])


def move(path: str) -> Moved:
    """Raises UsageError for a script that cannot be read."""
    followed = follow(pathlib.Path(path))
    start = followed.start
    notes: Notes = start.notes.union(*(word.notes for word in start.words))
    given = list(_split(start.words))
    supervised = any(option.flag == "--loss-type" and option.value == "sft_loss" for option in given)
    changed: list[str] = []
    options = list(_once(_kept(given, supervised, changed), changed))
    options += _added(followed, given, supervised, changed)
    return Moved(tuple(options), tuple(changed), tuple(told(notes)), followed.exported)


def _split(words: Sequence[Value]) -> Iterator[Given]:
    current: list[Value] = []
    for word in words:
        if word.text.startswith("--") and current:
            yield Given(tuple(current))
            current = []
        current.append(word)
    if current:
        yield Given(tuple(current))


def _kept(given: list[Given], supervised: bool, changed: list[str]) -> Iterator[Given]:
    for option in given:
        why = _left_out(option, supervised)
        if why:
            changed.append(f"{option.flag} is left out: {why}")
        else:
            yield option


def _left_out(option: Given, supervised: bool) -> str:
    """Why the run is the same without it; empty where it is not, or where the option has a say."""
    flag = option.flag
    if flag == "--rollout-function-path" and option.value in ROLLOUTS:
        if option.value == FULLY_ASYNC:
            return "" if supervised else "slime's fully asynchronous rollouts are --schedule async"
        of_supervised = "sft_loss" in ROLLOUTS[option.value]
        return "it is what is done anyway" if of_supervised == supervised else ""
    if flag in ("--debug-train-only", "--disable-compute-advantages-and-returns") and not supervised:
        return ""
    if flag in WHY_IDLE and (flag != "--train-backend" or option.value == "megatron"):
        return WHY_IDLE[flag]
    if flag in LEFT_OUT and layers.find(flag) is None:
        return NOT_YET[flag].removeprefix("leave it out: ")
    found = layers.find(flag)
    if flag in own.by_flag() and own.by_flag()[flag].secret:
        return "it is a secret, and this is printed; `wandb login`, or WANDB_API_KEY, gives it"
    if found is not None and found[0] == "megatron" and found[1].dest in UNREAD:
        return f"it has no effect: {UNREAD[found[1].dest]}"
    return ""


def _once(options: Iterator[Given], changed: list[str]) -> Iterator[Given]:
    """The last of each, as argparse takes it; in the place of the first."""
    listed = list(options)
    last: dict[str, Given] = {}
    for option in listed:
        before = last.get(option.flag) if option.flag == APPENDED else None
        last[option.flag] = Given((*before.words, *option.words[1:])) if before else option
    seen: set[str] = set()
    for option in listed:
        now = last[option.flag]
        if option.flag in seen:
            continue
        seen.add(option.flag)
        if now.value != option.value and option.flag != APPENDED:
            changed.append(f"{option.flag} is given more than once: the last one holds, {now.value}")
        yield now


def _added(followed: Followed, given: list[Given], supervised: bool, changed: list[str]) -> Iterator[Given]:
    flags = {option.flag: option.value for option in given}
    if "--actor-num-gpus-per-node" not in flags:
        changed.append(f"--actor-num-gpus-per-node {DEVICES} is added: slime's default, which is 1 here")
        yield _option("--actor-num-gpus-per-node", str(DEVICES))
    if supervised or "--schedule" in flags:
        return
    if flags.get("--rollout-function-path") == FULLY_ASYNC:
        yield _option("--schedule", "async")
    elif followed.start.program == "train_async.py":
        changed.append("--schedule one-step-off is added: it is what train_async.py does")
        yield _option("--schedule", "one-step-off")


def _option(*words: str) -> Given:
    return Given(tuple(map(Value, words)))


def _typed(word: Value) -> str:
    """For a shell; what stays as it is written is still expanded by it."""
    if not word.notes:
        return shlex.quote(word.text)
    return '"' + re.sub(r'(["\\])', r"\\\1", word.text) + '"'
