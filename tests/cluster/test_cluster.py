"""What goes wrong in Ray's workers, over a scripted Ray: an engine error with its words, never Ray's own traceback."""

import types

import pytest
import ray

from slime_cli.cluster import cluster
from slime_cli.cluster.learner import Learner
from slime_cli.errors import EngineError, UsageError


def failing(error: Exception) -> tuple[types.SimpleNamespace, types.SimpleNamespace]:
    """A Ray whose every answer is ``error``, and an actor whose methods can be asked."""

    def get(reference: object, timeout: float | None = None) -> None:
        raise error

    method = types.SimpleNamespace(remote=lambda *arguments: None)
    return types.SimpleNamespace(get=get, exceptions=ray.exceptions), types.SimpleNamespace(state=method, save=method)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ray.exceptions.RuntimeEnvSetupError("no space for it"), "no space for it"),
        (ray.exceptions.ActorDiedError(), "a trainer rank died"),
        (ray.exceptions.GetTimeoutError("late"), "late"),
        (ray.exceptions.RayTaskError("f", "Traceback\nValueError: x", ValueError("x")), "the trainer failed"),
    ],
)
def test_whatever_ray_says_of_a_trainer_is_an_engine_error(error, said):
    fake, actor = failing(error)
    with pytest.raises(EngineError, match=said):
        Learner(fake, [actor]).save("root")


def test_a_message_for_the_user_comes_through_as_it_is():
    fake, actor = failing(ray.exceptions.RayTaskError("f", "Traceback", UsageError("give another", "so")))
    with pytest.raises(UsageError, match="give another"):
        Learner(fake, [actor]).save("root")


def test_an_engine_whose_actor_is_gone_has_ended_with_ray_s_last_words(monkeypatch):
    fake, actor = failing(ray.exceptions.RuntimeEnvSetupError("no space for it"))
    monkeypatch.setattr(ray, "get", fake.get)
    found = cluster.EngineProxy(actor).state()
    assert found["exit_code"] == -1 and found["devices"] == [] and "no space for it" in found["last_lines"]
