"""How a run takes engines that somebody else owns: claimed and compared before anything is started, released at its
end.
"""

import contextlib
import io
import types

import pytest
from rich.console import Console

from slime_cli import manifests
from slime_cli.errors import DataError, EngineError, UsageError
from slime_cli.options.resolve import resolve
from slime_cli.run import Run
from slime_cli.screen import Screen
from slime_cli.serving import claim
from tests import checkpoints
from tests.scripted_engine import ScriptedEngine


def run(tmp_path, name, model, more=""):
    words = (
        f"--hf-checkpoint {model} --prompt-data p --num-rollout 1 --rollout-batch-size 1 --rollout-endpoint"
        f" {tmp_path / 'endpoint.json'} {more}"
    )
    made = Run(resolve(words.split(), (), "train"), tmp_path / name, Screen(Console(file=io.StringIO(), width=500)), {})
    made.model = str(model)
    return made


async def test_engines_are_claimed_for_as_long_as_the_run_lives_and_compared_first(tmp_path):
    served = checkpoints.write(tmp_path / "served")
    other = checkpoints.write(tmp_path / "other", num_hidden_layers=3)
    engine = ScriptedEngine(served)
    path = tmp_path / "endpoint.json"
    manifests.write(path, engine.endpoint())
    first = run(tmp_path, "a", served)
    second = run(tmp_path, "b", served)
    with contextlib.ExitStack() as stack:
        first._attach(first.resolved, stack)
        with (
            contextlib.ExitStack() as inner,
            pytest.raises(UsageError, match=f"updated by slime train --run-dir {tmp_path / 'a'} "),
        ):
            second._attach(second.resolved, inner)
    with contextlib.ExitStack() as stack, pytest.raises(DataError, match=r"layers\.2.* is 16, not missing"):
        third = run(tmp_path, "c", other)
        third._attach(third.resolved, stack)
    assert claim.holder_of(claim.beside(path)) is None and not engine.posted
    with contextlib.ExitStack() as stack:
        second._attach(second.resolved, stack)
        assert (await second.serving()).url == engine.url
        assert manifests.read(tmp_path / "b" / "endpoint.json", manifests.Endpoint).claim == str(claim.beside(path))


def test_weights_that_change_under_requests_need_engines_without_a_prefix_cache(tmp_path):
    served = checkpoints.write(tmp_path / "served")
    for cached in (True, False):
        engine = ScriptedEngine(served, disable_radix_cache=not cached)
        manifests.write(tmp_path / "endpoint.json", engine.endpoint())
        made = run(tmp_path, "a", served, "--schedule async --use-tis --in-flight pause")
        with contextlib.ExitStack() as stack:
            if cached:
                with pytest.raises(UsageError, match="--in-flight pause: .* has a prefix cache"):
                    made._attach(made.resolved, stack)
            else:
                made._attach(made.resolved, stack)


def test_where_no_engine_is_left_the_run_says_of_what_the_last_one_died(tmp_path):
    served = checkpoints.write(tmp_path / "served")
    made = run(tmp_path, "a", served)

    def check():
        raise EngineError("engine 0 ended with code -9")

    made.fleet = types.SimpleNamespace(alive=list, check=check)
    with pytest.raises(EngineError, match="engine 0 ended with code -9"):
        made.engine_urls()
