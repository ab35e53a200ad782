"""``docs/moving.md``: how a launch script of slime's moves over, from the tables that the code reads itself.

``make options`` writes it, together with ``docs/options.md``; a test holds the page to what this makes.
"""

import collections
import pathlib
import tempfile
from collections.abc import Iterable, Iterator

from bench.scripts import Verdict, all_verdicts, by_cause
from slime_cli.hooks.kinds import SLIMES
from slime_cli.options import layers
from slime_cli.options.checks.settled import PLUGINS
from slime_cli.options.derive import FULLY_ASYNC
from slime_cli.options.not_yet import NOT_YET
from slime_cli.options.scripts.move import DEVICES, LEFT_OUT, WHY_IDLE

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "moving.md"
HEAD = """\
# Moving over from slime scripts

slime's options have the same names and meanings here, Megatron's and SGLang's are passed through, and functions of
yours are called with the same arguments ([Functions](hooks.md)). So a launch script moves over by its first line:
`slime train` in the place of `ray job submit ... -- python3 train.py`. Ray is started where there is none, or joined
where `RAY_ADDRESS` names one. This page is written by `make options`.

```
slime train --from-script run-qwen3-4B.sh --dry-run
```

reads such a script without running anything and prints the command for us: its arrays, the model's file that it
reads, conditions and counted loops are followed as bash would. Below it are what changed and why; what cannot be
known without running the script (a command's output, a variable that is not set), each with its line: it stays as it
is written; and the variables that the script exports. Then comes the dry run of that command. More options after it
are laid over the script's. It starts nothing.

## Where the line is

- An option that nothing reads, or that slime sets by itself, is an **error** with what to do instead.
- An option that has no effect because of another value at hand (`--kl-loss-coef` without `--use-kl-loss`) is a
  **warning**.
- Of two values for one option the last holds, with a **warning**.
- What belongs to a model or a feature that is not here is an **error** that names it.
"""


def page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        verdicts = all_verdicts(pathlib.Path(folder))
    sections = (HEAD, _other_names(), _without_effect(), _left_out(), _refused(), _scripts(verdicts))
    return "\n".join(section.rstrip() + "\n" for section in sections)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def _other_names() -> str:
    rows = [
        ("`train_async.py`", "`--schedule one-step-off`"),
        (f"`--rollout-function-path {FULLY_ASYNC}`", "`--schedule async`; its name is taken too"),
        (
            "`--rollout-function-path slime.rollout.sft_rollout.generate_rollout`",
            "`--loss-type sft_loss`, which such scripts give too",
        ),
        *(
            (f"functions of `{theirs[:-1]}`", f"`{ours[:-1]}`; their names are taken too")
            for theirs, ours in SLIMES.items()
        ),
        (
            "`--rm-url` as a teacher's address, with `--use-opd`",
            "`--opd-teacher-url`; with a warning the other is taken",
        ),
        (
            f"`--actor-num-gpus-per-node` left out, which means {DEVICES}",
            f"`--actor-num-gpus-per-node {DEVICES}`: the default is 1 here",
        ),
        (
            "`--custom-config-path`",
            "the same; a key that is an option is that option, and slime follows it from the start",
        ),
        ("`WANDB_KEY` given as `--wandb-key`", "the same; it is recorded and shown nowhere"),
    ]
    return f"## What has another name\n\n{_table(('slime', 'here'), rows)}"


def _without_effect() -> str:
    rows = [(f"`{flag}`", why) for flag, why in WHY_IDLE.items()]
    return f"## Taken where it says what is so anyway\n\n{_table(('option', ''), rows)}"


def _grouped(flags: Iterable[str]) -> Iterator[tuple[str, str]]:
    by_reason: dict[str, list[str]] = collections.defaultdict(list)
    for flag in flags:
        by_reason[NOT_YET[flag].removeprefix("leave it out: ")].append(f"`{flag}`")
    yield from ((", ".join(found), reason) for reason, found in by_reason.items())


def _left_out() -> str:
    flags = [flag for flag in NOT_YET if flag in LEFT_OUT and layers.find(flag) is None]
    text = "A run without them trains the same, so `--from-script` leaves them out; given by hand they are refused.\n"
    return f"## What `--from-script` leaves out\n\n{text}\n{_table(('option', 'why'), _grouped(flags))}"


def _refused() -> str:
    flags = [flag for flag in NOT_YET if flag not in LEFT_OUT]
    models = "; ".join(PLUGINS.values())
    text = f"`--spec slime_plugins.models.NAME` is refused with the model that it builds: {models}.\n"
    return f"## What is not here\n\n{text}\n{_table(('option', 'instead'), _grouped(flags))}"


def _scripts(verdicts: list[Verdict]) -> str:
    passing = sum(one.passes for one in verdicts)
    text = (
        f"The 45 scripts of slime's `scripts/` and `examples/`, their options given to `slime train --dry-run` with\n"
        "small files in the place of data and YAML files (`make scripts` writes `runs/scripts.json`):\n"
        f"**{passing} pass as they are**. Models, checkpoints and the examples' own modules are not looked at there.\n"
    )
    causes = [(str(len(scripts)), cause) for cause, scripts in by_cause(verdicts)]
    each = [(f"`{one.script}`", str(one.options), "passes" if one.passes else _options_of(one)) for one in verdicts]
    return (
        f"## slime's own scripts\n\n{text}\n{_table(('script', 'options', ''), each)}\n"
        f"Why, by the number of scripts:\n\n{_table(('scripts', 'why'), causes)}"
    )


def _options_of(verdict: Verdict) -> str:
    named = dict.fromkeys(f"`{cause['option']}`" if cause["option"] else cause["why"] for cause in verdict.refused)
    return "refused: " + ", ".join(named)


if __name__ == "__main__":
    PAGE.write_text(page())
