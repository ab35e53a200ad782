"""Functions in place of a whole rollout or evaluation, and the choice among unfinished groups.

1. What comes back is what was dealt, each group once. 2. A function that blocks runs in a thread, and what it asks for
is done in the event loop's. 3. Whatever else it returns is named.
"""

import threading
import types
from collections.abc import Callable

import pytest

from slime_cli.buffer.types import Group, PromptRow, Sample
from slime_cli.errors import UsageError
from slime_cli.hooks import rollouts
from slime_cli.hooks.kinds import Hook

Make = Callable[..., Hook]
HEAD = """
import dataclasses
from slime_cli import hooks

def answered(sample, reward=1.0):
    return dataclasses.replace(sample, tokens=sample.tokens + [5], response_length=1, reward=reward)
"""


class Deck:
    """Deals groups of two, and notes in which thread."""

    def __init__(self) -> None:
        self.next = 0
        self.back: list[int] = []
        self.threads: set[int] = set()

    def lease(self, count: int) -> list[Group]:
        self.threads.add(threading.get_ident())
        made = [self._group(index) for index in range(self.next, self.next + count)]
        self.next += count
        return made

    def _group(self, index: int) -> Group:
        pending = [Sample(2 * index + k, index, prompt="p") for k in range(2)]
        return Group(index, PromptRow("p", None, {}, "here", 1), types.SimpleNamespace(tokens=[1, 2]), [], pending)

    def release(self, groups: list[Group]) -> None:
        self.threads.add(threading.get_ident())
        self.back += [group.index for group in groups]


def args(batch: int = 2) -> types.SimpleNamespace:
    return types.SimpleNamespace(rollout_batch_size=batch, reward_key=None, threads=set())


SYNC = """
import threading
def f(args, rollout_id, data_source, evaluation=False):
    args.threads.add(threading.get_ident())
    groups = data_source.get_samples(3)
    data_source.add_samples(groups[:1])
    groups = groups[1:] + data_source.get_samples(2)
    made = [[answered(s, rollout_id) for s in group] for group in groups]
    made[0] = [[made[0][0], made[0][0]], made[0][1]]
    return hooks.RolloutFnTrainOutput(samples=[made[1][:1], made[0]], metrics={"mine": 3})
"""
ASYNC = SYNC.replace("def f", "async def f")


@pytest.mark.parametrize(("code", "in_thread"), [(SYNC, True), (ASYNC, False)])
async def test_a_rollout_of_a_users_own(hook: Make, code: str, in_thread: bool):
    deck = Deck()
    mine = hook("rollout", HEAD + code)
    given = args()
    dealer = rollouts.Dealer(mine, deck.lease, deck.release)
    rolled = await rollouts.rollout(mine, given, 7, dealer)
    assert deck.threads == {threading.get_ident()} and (given.threads != deck.threads) is in_thread
    assert deck.back == [0] and [group.index for group in rolled.left_out] == [3, 4]
    found = [(group.index, [(s.index, s.part, s.tokens, s.reward) for s in made]) for group, made in rolled.groups]
    assert found == [
        (2, [(4, 0, [1, 2, 5], 7)]),
        (1, [(2, 0, [1, 2, 5], 7), (2, 1, [1, 2, 5], 7), (3, 0, [1, 2, 5], 7)]),
    ]
    assert rolled.metrics == {"mine": 3.0} and all(s.status.value == "completed" for _, m in rolled.groups for s in m)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("None", "returned NoneType"),
        ("[]", "returned list"),
        ("made[:1]", "returned 1 groups"),
        ("[made[0], made[0]]", "returned group 0 twice"),
        ("[made[0], made[0][:1] + made[1][:1]]", "a group of samples of group 0 that it was not dealt so"),
        ("[made[0], [dataclasses.replace(made[1][0], index=77)]]", "returned sample 77, which group 1 has not"),
        ("[made[0], ['text']]", "returned a group that holds str"),
        ("[made[0], []]", "returned an empty group"),
        ("[made[0], [dataclasses.replace(made[1][0], reward=None)]]", "returned something unfit"),
        ("[made[0], [dataclasses.replace(made[1][0], reward=float('inf'))]]", "its reward is inf"),
        ("[made[0], [dataclasses.replace(made[1][0], status='aborted')]]", "sample 2 is aborted"),
        ("[made[0], [dataclasses.replace(made[1][0], response_length=9)]]", "response_length 9 of 3 tokens"),
        ("hooks.RolloutFnTrainOutput(made, {'x': 'text'})", "metrics that are no numbers"),
        ("data_source.add_samples([[hooks.Sample(0, 9)]])", "gave back group 9, which it was not dealt"),
        ("made[5]", "raised IndexError: list index out of range at .*mine1.py:11"),
    ],
)
async def test_what_a_rollout_may_not_return_is_named(hook: Make, line: str, said: str):
    code = f"""
def f(args, rollout_id, data_source, evaluation=False):
    made = [[answered(s) for s in group] for group in data_source.get_samples(2)]

    return {line}
"""
    mine = hook("rollout", HEAD + code)
    deck = Deck()
    with pytest.raises(UsageError, match=said):
        await rollouts.rollout(mine, args(), 0, rollouts.Dealer(mine, deck.lease, deck.release))


async def test_an_evaluation_of_a_users_own(hook: Make):
    code = """
def f(args, rollout_id, data_source, evaluation=False):
    samples = [hooks.Sample(i, i // 2, reward=1.0) for i in range(4)]
    two = {"rewards": [1, 0.5, 0, 0.5], "truncated": [0, 0, 0, 1], "samples": samples}
    return hooks.RolloutFnEvalOutput(data={"one": {"rewards": [1, 0]}, "two": two}, metrics={"evaluation": evaluation})
"""
    mine = hook("eval_rollout", HEAD + code)
    deck = Deck()
    found, metrics = await rollouts.evaluation(mine, args(), 3, rollouts.Dealer(mine, deck.lease, deck.release))
    assert metrics == {"evaluation": 1.0}
    assert found["one"].rewards_PN == [[1.0], [0.0]] and found["two"].rewards_PN == [[1.0, 0.5], [0.0, 0.5]]
    assert found["two"].truncated == [False, False, False, True] and len(found["two"].samples) == 4
    for value, said in (
        ("{'one': {}}", "no rewards of 'one'"),
        ("{'one': {'rewards': [None]}}", "no finite numbers"),
        ("{'one': {'rewards': [1], 'truncated': [0, 1]}}", "2 truncated of 'one' for 1 rewards"),
        ("None", "returned NoneType"),
    ):
        wrong = hook("eval_rollout", f"def f(args, rollout_id, data_source, evaluation=False): return {value}")
        with pytest.raises(UsageError, match=said):
            await rollouts.evaluation(wrong, args(), 3, rollouts.Dealer(wrong, deck.lease, deck.release))


def test_a_filter_of_the_buffer_chooses_and_drops(hook: Make):
    groups = Deck().lease(4)
    code = """
def f(args, rollout_id, buffer, num_samples):
    buffer.pop(0)
    taken = [buffer.pop(-1)]
    return taken + buffer[:1]
"""
    chosen, dropped = rollouts.choose(hook("buffer_filter", code), args(), groups, 2)
    assert [group.index for group in chosen] == [3, 1] and [group.index for group in dropped] == [0]
    for value, said in (
        ("buffer", "returned 4 groups where 2 were asked for"),
        ("[buffer[0], buffer[0]]", "returned 2 groups where 2"),
        ("3", "returned int"),
        ("[['x']]", "a group that holds str"),
    ):
        wrong = hook("buffer_filter", f"def f(args, rollout_id, buffer, num_samples): return {value}")
        with pytest.raises(UsageError, match=said):
            rollouts.choose(wrong, args(), groups, 2)
