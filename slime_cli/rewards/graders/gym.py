"""``reasoning-gym``: the verifier of the task that made the prompt."""

import functools
import json
from typing import Any

from slime_cli.rewards.graders.answers import GraderError


@functools.lru_cache(maxsize=64)
def gym_task(task: str, arguments: str) -> Any:
    """The task's scorer, configured as the source was. ``arguments`` is JSON, for the cache's sake."""
    from slime_cli.gym import make_task, thaw

    return make_task(task, {**thaw(json.loads(arguments)), "size": 1, "seed": 0})


def task_of(gym: dict[str, Any]) -> Any:
    return gym_task(gym["task"], json.dumps(gym.get("arguments") or {}, sort_keys=True))


def grade_reasoning_gym(response: str, label: str | None, metadata: dict[str, Any], index: int) -> float:
    """The task's own ``score_answer`` on the stripped response."""
    from slime_cli.gym import thaw

    gym = metadata.get("reasoning_gym")
    if not isinstance(gym, dict) or not {"task", "entry"} <= gym.keys():
        raise GraderError("reasoning-gym: metadata['reasoning_gym'] with 'task' and 'entry' is missing")
    try:
        task = task_of(gym)
    except Exception as error:
        raise GraderError(f"reasoning-gym: no scorer for {gym['task']!r}: {error!r}") from error
    answer = response.strip()
    if not answer:
        return 0.0
    try:
        return float(task.score_answer(answer, thaw(gym["entry"])))
    except Exception as error:
        raise GraderError(f"reasoning-gym: {gym['task']} cannot score {answer[:80]!r}: {error!r}") from error
