"""What a user's function raises names the user's file and line, not ours: every kind, wherever it is called.

1. Raised at once, in a neighbour's file, or deep in a library that the user called: the innermost line of the user's
own.
2. Raised while the module loads. 3. Across processes: reward workers, and errors that Ray carries. 4. From what a
function
left behind: a returned function, a source, a model's gradient.
"""

import contextlib
import json
import pathlib
import pickle
import re
import types
from collections.abc import Awaitable

import pytest

from slime_cli.buffer.sources.users import UserSource
from slime_cli.buffer.types import PromptRow, Sample
from slime_cli.errors import UsageError
from slime_cli.hooks import kinds, raised
from slime_cli.hooks.kinds import Hook
from slime_cli.hooks.table import KINDS
from slime_cli.rewards.rewards import RewardPool
from slime_cli.rollout.failures import Failure
from slime_cli.rollout.generate import Generator

HELPER = "import json\n\n\ndef deep(text):\n    return json.loads(text)\n"
BODIES = {
    "at once": ("{async_}def f(*a, **k):\n    return {{}}['lost']\n", "KeyError: 'lost' at {mine}:3"),
    "by a neighbour": ("{async_}def f(*a, **k):\n    return helper.deep('{{')\n", "JSONDecodeError: .* at {helper}:5"),
    "in a library": (
        "{async_}def f(*a, **k):\n    return helper.json.loads('{{')\n",
        "JSONDecodeError: .* at {mine}:3",
    ),
    "leaving": ("{async_}def f(*a, **k):\n    raise SystemExit(3)\n", "SystemExit: 3 at {mine}:3"),
}
"""What the function does -> its code after the first line, which imports the neighbour; what is said."""


def written(folder: pathlib.Path, code: str) -> dict[str, pathlib.Path]:
    (folder / "helper.py").write_text(HELPER)
    (folder / "mine.py").write_text("import helper\n" + code)
    return {"mine": folder / "mine.py", "helper": folder / "helper.py"}


def call(kind: str, hook: Hook) -> Awaitable[object]:
    known = KINDS[kind]
    given = [None] * len(known.positional)
    more = dict.fromkeys(known.keywords)
    if known.form == "sync":
        hook(*given, **more)
    return hook.ask(*given, **more)


@pytest.mark.parametrize("how", BODIES)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_innermost_line_of_the_users_own_is_named(kind: str, how: str, tmp_path: pathlib.Path):
    code, said = BODIES[how]
    files = written(tmp_path, code.format(async_="async " if KINDS[kind].form == "async" else ""))
    hook = Hook.load(f"{files['mine']}:f", kind)
    with pytest.raises(UsageError) as caught:
        await call(kind, hook)
    assert re.search(said.format(**files) + "$", caught.value.message), caught.value.message
    assert caught.value.message.startswith(f"{kind} hook '{files['mine']}:f' raised ")
    assert f'File "{files["mine"]}", line 3, in f' in caught.value.fix and "slime_cli" not in caught.value.fix
    again = pickle.loads(pickle.dumps(caught.value))  # Ray carries it from a rank
    assert (again.message, again.fix, again.exit_code) == (caught.value.message, caught.value.fix, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_does_not_load_is_named(kind: str, tmp_path: pathlib.Path):
    files = written(tmp_path, "\nhelper.deep('{')\n")
    with pytest.raises(UsageError, match=f"importing it raised JSONDecodeError: .* at {files['helper']}:5"):
        Hook.load(f"{files['mine']}:f", kind)
    (tmp_path / "mine.py").write_text("import helper\n\ndef f(:\n")
    with pytest.raises(UsageError, match=f"SyntaxError: .* at {files['mine']}:3"):
        Hook.load(f"{files['mine']}:f", kind)


@pytest.mark.parametrize("group_rm", [False, True])
async def test_reward_workers_name_it(group_rm: bool, tmp_path: pathlib.Path):
    files = written(tmp_path, BODIES["by a neighbour"][0].format(async_=""))
    args = types.SimpleNamespace(
        custom_rm_path=f"{files['mine']}:f", rm_type=None, reward_key=None, eval_reward_key=None, group_rm=group_rm
    )
    async with RewardPool(1) as pool:
        (failure,) = await pool.score_group([Sample(0, 0, response="x")], args)
    assert failure.kind == "error" and f"at {files['helper']}:5" in failure.detail
    assert f'File "{files["mine"]}", line 3, in f' in failure.trace and "slime_cli" not in failure.trace


async def test_the_generator_names_it(tmp_path: pathlib.Path):
    files = written(tmp_path, BODIES["in a library"][0].format(async_="async "))
    args = types.SimpleNamespace(
        custom_generate_function_path=f"{files['mine']}:f",
        dynamic_sampling_filter_path=None,
        rollout_sample_hook_path=None,
        eval_max_context_len=None,
    )
    client = types.SimpleNamespace(alive=lambda: None, call=contextlib.nullcontext, aborts=0)
    generator = Generator(args, client, types.SimpleNamespace())
    row = PromptRow("p", None, {}, "here", 1)
    rendered = types.SimpleNamespace(tokens=[1], text="p")
    group = types.SimpleNamespace(index=0, row=row, rendered=rendered, finished=[], pending=[Sample(0, 0)])
    (failure,) = await generator.generate(group, {"max_new_tokens": 1})
    assert isinstance(failure, Failure) and failure.detail.endswith(f"at {files['mine']}:3")


def test_what_a_function_left_behind_names_it_too(tmp_path: pathlib.Path):
    files = written(tmp_path, "\ndef f(*a):\n    return lambda losses: losses['lost']\n")
    reducer = Hook.load(f"{files['mine']}:f", "pg_loss_reducer")(1, 2, 3, 4)
    with pytest.raises(UsageError, match=f"raised KeyError: 'lost' at {files['mine']}:4$"):
        reducer({})
    code = "class f:\n    def __init__(self, args): pass\n    def __len__(self): return 2\n    BODY\n"
    for body, line in (("def get_samples(self, n): return {}['lost']", 5), ("", 0)):
        files = written(tmp_path / str(line or "none"), "") if (tmp_path / str(line or "none")).mkdir() else {}
        file = tmp_path / str(line or "none") / "mine.py"
        file.write_text("import json\n" + code.replace("BODY", body))
        with pytest.raises(UsageError, match=f"KeyError: 'lost' at {file}:{line}$" if line else "has no get_samples"):
            UserSource(f"{file}:f", types.SimpleNamespace())[0]


BACKWARD = """
import torch

class Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(context, x): return x * 2
    @staticmethod
    def backward(context, gradient): return {}["lost"]

def f(args, batch, logits, sum_of_sample_mean):
    return Spoilt.apply(logits).sum(), {}
"""


def test_a_gradient_of_a_users_own_names_it(tmp_path: pathlib.Path):
    import torch

    files = written(tmp_path, BACKWARD)
    value, _ = Hook.load(f"{files['mine']}:f", "loss")(None, None, torch.ones(2, requires_grad=True), None)
    line = ("import helper\n" + BACKWARD).split("\n").index(
        '    def backward(context, gradient): return {}["lost"]'
    ) + 1
    with pytest.raises(UsageError, match=f"what it made raised KeyError: 'lost' at {files['mine']}:{line}$"):
        with kinds.users_named("what it made"):
            value.backward()


def test_what_only_a_library_raised_is_not_the_users():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert raised.by_user(caught.value), "this test's own line"
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert not raised.by_user(caught.value)
