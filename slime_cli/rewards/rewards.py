"""Rewards: which grader a sample gets, where it runs, and what counts as a reward.

:class:`RewardPool` is used by the rollout and by evaluation. Invariants: every sample gets a number, a dict holding a
finite number under the reward key (evaluation has one of its own), or a RewardFailure; nothing a grader or a user's
function does raises into the caller. ``metadata["custom_rm_path"]`` wins over ``--custom-rm-path``,
``metadata["rm_type"]`` over ``--rm-type``, and a custom function over any type. A reward that the generate function
gave a sample stands and is only checked, except with ``--group-rm``, whose function sees it and has the last word.
"""

import asyncio
import collections
import json
import math
import pickle
import random
from collections.abc import Sequence
from typing import Any

from slime_cli.addresses import is_local
from slime_cli.buffer.types import Sample, Status
from slime_cli.buffer.values import NotPlain, RewardFailure, plain, unstorable
from slime_cli.errors import SlimeError
from slime_cli.hooks import kinds as hooks
from slime_cli.rewards import graders
from slime_cli.rewards.pool import Work, WorkerPool

__all__ = ["RewardFailure", "RewardPool"]

Reward = float | dict[str, Any]
GRADE = Work("grade")
REMOTE_TRIES = 4
REMOTE_BACKOFF = 0.5
REMOTE_IN_FLIGHT = 64


def checked_reward(value: Any, key: str | None, needs_key: bool = True) -> Reward | RewardFailure:
    """A number as float, or a dict with a finite number under ``key``; anything else is a bad value, by name.

    ``needs_key=False`` lets a dict pass without a key (a reward post-processing function will read it).
    """
    if isinstance(value, bool | int | float):
        return float(value) if finite(value) else RewardFailure("bad_value", f"the reward is {value}")
    if not isinstance(value, dict):
        return RewardFailure(
            "bad_value", f"the reward is {type(value).__name__} {value!r:.100}, not a number or a dict"
        )
    if why := unstorable(value):
        return RewardFailure("bad_value", f"the reward {value!r:.100} can't be stored: {why}")
    if key is None:
        hint = (
            f"the reward is a dict with {', '.join(map(str, value)) or 'nothing'}; name its number with --reward-key or"
            " --eval-reward-key"
        )
        return RewardFailure("bad_value", hint) if needs_key else value
    if key not in value:
        return RewardFailure(
            "bad_value", f"the reward has no {key!r}; it has {', '.join(map(str, value)) or 'nothing'}"
        )
    number = value[key]
    if not isinstance(number, bool | int | float) or not finite(number):
        return RewardFailure("bad_value", f"the reward's {key!r} is {number!r:.100}, not a finite number")
    return value


def without_stops(response: str, stops: Sequence[str]) -> str:
    """``response`` without the stop text at its end, and white space around it."""
    text = response.rstrip()
    found = max((stop.rstrip() for stop in stops if stop.strip() and text.endswith(stop.rstrip())), key=len, default="")
    return text.removesuffix(found) if found else response


def finite(value: bool | int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        return False


class RewardPool:
    """Scores samples in worker processes; ``async with`` or :meth:`close` ends them. Belongs to one event loop."""

    def __init__(self, workers: int = 4, timeout: float = 30.0, start_timeout: float = 180.0) -> None:
        """``timeout``: seconds for one call of a grader or function. ``start_timeout``: for loading it in a worker."""
        self.workers = WorkerPool(workers, timeout, start_timeout)
        self.failures: collections.Counter[str] = collections.Counter()
        """Failed samples by kind."""
        self._remote = RemoteRewards(timeout)

    @classmethod
    def from_args(cls, args: Any) -> "RewardPool":
        return cls(args.rm_workers, args.rm_timeout)

    async def __aenter__(self) -> "RewardPool":
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(self.workers.close(), self._remote.close())

    async def score(
        self, sample: Sample, args: Any, stops: Sequence[str] = (), evaluation: bool = False
    ) -> Reward | RewardFailure:
        """One sample's reward. Fields that a custom function changes in its copy are carried over to ``sample``.
        ``stops``: texts that the user named as the end of an answer."""
        try:
            result = self._judge(await self._outcome(sample, args, stops), [sample], args, evaluation)[0]
        except Exception as error:  # a sample or options of a shape nobody foresaw: still only this sample
            kind = "bad_value" if isinstance(error, NotPlain) else "error"
            said = str(error) if isinstance(error, SlimeError | NotPlain) else f"{type(error).__name__}: {error}"
            result = RewardFailure(kind, said)
        return self._counted(result)

    async def score_group(
        self, samples: list[Sample], args: Any, stops: Sequence[str] = (), evaluation: bool = False
    ) -> list[Reward | RewardFailure]:
        """Rewards of a group, one per sample and in order. With ``group_rm`` the function sees the whole group."""
        paths = [*dict.fromkeys(hooks.reward_path(sample, args) for sample in samples)]
        path = paths[0] if paths else None
        if not args.group_rm or not samples or paths == [None]:
            return list(await asyncio.gather(*(self.score(sample, args, stops, evaluation) for sample in samples)))
        if len(paths) > 1 or path is None:
            outcome = RewardFailure(
                "error", f"--group-rm: this group names several functions: {sorted(map(str, paths))}"
            )
        else:
            outcome = await self._group_outcome(path, samples, args)
        try:
            results = self._judge(outcome, samples, args, evaluation)
        except ValueError as error:  # a status that there is not
            results = [RewardFailure("bad_value", str(error))] * len(samples)
        return [self._counted(result) for result in results]

    async def _outcome(self, sample: Sample, args: Any, stops: Sequence[str]) -> Any:
        """``([value], [changed fields])`` or a failure."""
        path = hooks.reward_path(sample, args)
        if sample.reward is not None:
            outcome = plain(sample.reward), {}
        elif path:
            outcome = await self.workers.submit(Work("reward", path), pickle.dumps(sample.to_dict()), args)
        else:
            rm_type = hooks.named(sample, "rm_type") or args.rm_type
            if not rm_type:
                return RewardFailure(
                    "error", "no reward is set: pass --rm-type or --custom-rm-path, or metadata['rm_type']"
                )
            graders.check_rm_type(rm_type)
            if rm_type.removeprefix(graders.BOXED_PREFIX) == "remote_rm":
                outcome = await self._remote.ask(sample, rm_type, args)
            else:
                response = without_stops(sample.response, stops) if rm_type in graders.WHOLE_TEXT else sample.response
                payload = (rm_type, response, sample.label, sample.metadata, sample.index)
                outcome = await self.workers.submit(GRADE, pickle.dumps(payload))
        return outcome if isinstance(outcome, RewardFailure) else ([outcome[0]], [outcome[1]])

    async def _group_outcome(self, path: str, samples: list[Sample], args: Any) -> Any:
        try:
            payload = [pickle.dumps(sample.to_dict()) for sample in samples]
        except Exception as error:
            return RewardFailure("error", f"a sample of this group cannot be sent to a reward worker: {error!r}")
        outcome = await self.workers.submit(Work("group_reward", path), payload, args)
        if isinstance(outcome, RewardFailure):
            return outcome
        values = outcome[0]
        if not isinstance(values, list | tuple):
            return RewardFailure(
                "bad_value", f"--group-rm: {path} returned {type(values).__name__}, not a list of scores"
            )
        if len(values) != len(samples):
            return RewardFailure(
                "bad_value", f"--group-rm: {path} returned {len(values)} scores for {len(samples)} samples"
            )
        return outcome

    def _judge(self, outcome: Any, samples: list[Sample], args: Any, evaluation: bool) -> list[Reward | RewardFailure]:
        if isinstance(outcome, RewardFailure):
            return [outcome] * len(samples)
        key = args.eval_reward_key if evaluation else args.reward_key
        needs_key = evaluation or not getattr(args, "custom_reward_post_process_path", None)
        for sample, changed in zip(samples, outcome[1], strict=True):
            for name, value in changed.items():
                setattr(sample, name, Status(value) if name == "status" else value)
        return [checked_reward(value, key, needs_key) for value in outcome[0]]

    def _counted(self, result: Reward | RewardFailure) -> Reward | RewardFailure:
        if isinstance(result, RewardFailure):
            self.failures[result.kind] += 1
        return result


class RemoteRewards:
    """``remote_rm``: POSTs prompt, response and label to ``args.rm_url``; the JSON answer is the reward."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._clients: dict[bool, Any] = {}
        self._slots = asyncio.Semaphore(REMOTE_IN_FLIGHT)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    def _client(self, url: str) -> Any:
        local = is_local(url)
        if local not in self._clients:
            import httpx

            limits = httpx.Limits(max_connections=REMOTE_IN_FLIGHT, max_keepalive_connections=REMOTE_IN_FLIGHT)
            self._clients[local] = httpx.AsyncClient(trust_env=not local, timeout=None, limits=limits)
        return self._clients[local]

    async def ask(self, sample: Sample, rm_type: str, args: Any) -> Any:
        """``(reward, {})`` or a failure. Again after lost connections, time-outs, 429 and 5xx; not other 4xx."""
        if not args.rm_url:
            return RewardFailure("error", "rm_type remote_rm has no address to ask: pass --rm-url")
        response = sample.response
        if rm_type.startswith(graders.BOXED_PREFIX):
            response = graders.last_boxed(response) or ""
        body = {"prompt": sample.prompt, "response": response, "label": sample.label}
        attempt = 0
        while True:
            attempt += 1
            async with self._slots:
                outcome, again = await self._post(args.rm_url, body)
            if not again:
                return outcome
            if attempt == REMOTE_TRIES:
                return RewardFailure(outcome.kind, f"{outcome.detail} ({REMOTE_TRIES} tries)")
            await asyncio.sleep(REMOTE_BACKOFF * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[Any, bool]:
        """The outcome, and whether another try could help."""
        import httpx

        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._client(url).post(url, json=body)
        except TimeoutError:
            return RewardFailure("timeout", f"{url}: no answer in {self._timeout:g} s"), True
        except httpx.TransportError as error:
            return RewardFailure("error", f"{url}: {error!r}"), True
        except (httpx.InvalidURL, TypeError, ValueError) as error:
            return RewardFailure("error", f"{url}: {error!r}"), False
        if answer.status_code != 200:
            again = answer.status_code == 429 or answer.status_code >= 500
            return RewardFailure("error", f"{url}: HTTP {answer.status_code}: {answer.text[:200]}"), again
        try:
            return (answer.json(), {}), False
        except json.JSONDecodeError:
            return RewardFailure("bad_value", f"{url}: the answer is not JSON: {answer.text[:200]!r}"), False
