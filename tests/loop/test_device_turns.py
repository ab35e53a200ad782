"""Who has the devices, state by state: engines and a learner that write down what they are asked.

1. A rollout's order: engines give all back, the trainer comes; its state leaves, engines' weights come, the sync; its
   weights leave, engines' caches come.
2. Without new weights engines keep theirs. What nobody asked to offload stays.
3. A wrong order is refused. Nothing is sent to the engines between train() and generate().
"""

import asyncio

import pytest

from slime_cli.loop.turns import Turn, Turns
from slime_cli.rollout.client import RouterClient
from slime_cli.serving.occupation import ALL, CACHE, GRAPHS, WEIGHTS, Occupation


class Side:
    """Learner and engines, as far as :class:`Turns` asks them."""

    def __init__(self):
        self.told: list = []
        self.away: frozenset[str] = frozenset()

    def offload(self, parts):
        self.told.append(("trainer gives", *parts))

    def onload(self, parts):
        self.told.append(("trainer takes", *parts))

    def release(self, tags):
        self.told.append(("engines give", *sorted(tags)))
        self.away |= {*tags}

    def resume(self, tags):
        self.told.append(("engines take", *sorted(tags)))
        self.away -= {*tags}


def turns(side: Side, *, learner: bool = True, engines: bool = True) -> Turns:
    occupation = Occupation(lambda: ["a", "b"])
    occupation.release = lambda tags: (side.release(tags), setattr(occupation, "away", side.away))[0]
    occupation.resume = lambda tags: (side.resume(tags), setattr(occupation, "away", side.away))[0]
    return Turns(side if learner else None, occupation if engines else None)


def driven(made: Turns, *verbs) -> RouterClient:
    """Each verb in turn: a name, or a name with what is given."""

    async def run() -> RouterClient:
        client = RouterClient("http://127.0.0.1:1", 4)
        for verb in verbs:
            name, given = verb if isinstance(verb, tuple) else (verb, {})
            method = getattr(made, name)
            await (method(client, **given) if name in ("rest", "train") else method())
        return client

    return asyncio.run(run())


FIRST = [("rest", {}), "sync", "generate"]
STATE = ("gradients", "optimizer")


def test_a_rollout():
    side = Side()
    driven(turns(side), *FIRST, "train", "sync", "generate")
    assert side.told == [
        ("engines give", *sorted(ALL)),
        ("trainer gives", *STATE),
        ("engines take", WEIGHTS),
        ("trainer gives", "weights"),
        ("engines take", *sorted((CACHE, GRAPHS))),
        ("engines give", *sorted(ALL)),
        ("trainer takes", *sorted((*STATE, "weights"))),
        ("trainer gives", *STATE),
        ("engines take", WEIGHTS),
        ("trainer gives", "weights"),
        ("engines take", *sorted((CACHE, GRAPHS))),
    ]


def test_engines_that_get_no_weights_keep_theirs():
    side = Side()
    driven(turns(side), *FIRST, ("train", {"new_weights": False}), "generate")
    assert side.told[5:] == [
        ("engines give", *sorted((CACHE, GRAPHS))),
        ("trainer takes", *sorted((*STATE, "weights"))),
        ("trainer gives", *STATE, "weights"),
        ("engines take", *sorted((CACHE, GRAPHS))),
    ]


def test_one_side_alone():
    side = Side()
    driven(turns(side, engines=False), *FIRST, "train")
    assert [who for who, *_ in side.told] == ["trainer gives", "trainer gives", "trainer takes"]
    side = Side()
    driven(turns(side, learner=False), *FIRST, "train")
    assert [who for who, *_ in side.told] == ["engines give", "engines take", "engines take", "engines give"]


def test_nothing_to_offload_has_no_order():
    side = Side()
    made = turns(side, learner=False, engines=False)
    driven(made, "generate", "train", "train", "sync", "generate")
    assert not side.told and not made.taken


def test_the_next_phase_begins_with_engines_that_rest():
    side = Side()
    made = turns(side)
    driven(made, *FIRST)
    side.told.clear()
    driven(made, *FIRST)
    assert side.told[0] == ("engines give", *sorted(ALL)) and made.turn is Turn.GENERATE


@pytest.mark.parametrize(
    "verbs, words",
    [
        ([("rest", {}), "generate"], "no weights to generate with"),
        ([("rest", {}), ("train", {})], "train comes after generate, and it is the turn of train"),
        ([*FIRST, "sync"], "sync comes after train, and it is the turn of generate"),
        ([*FIRST, "train", "train"], "train comes after generate"),
        ([*FIRST, "train", "generate"], "no weights to generate with"),
        ([*FIRST, "generate"], "generate comes after sync, and it is the turn of generate"),
    ],
)
def test_a_wrong_order_is_refused(verbs, words):
    with pytest.raises(RuntimeError, match=words):
        driven(turns(Side()), *verbs)


def test_nothing_is_sent_while_engines_rest():
    async def run() -> list[str]:
        client = RouterClient("http://127.0.0.1:1", 4)
        made = turns(Side())
        for verb in (lambda: made.rest(client), made.sync, made.generate, lambda: made.train(client)):
            await verb()
        seen = []

        async def request() -> None:
            async with client._request():
                seen.append("sent")

        task = asyncio.create_task(request())
        for verb in (lambda: asyncio.sleep(0.01), made.sync, made.generate):
            await verb()
            seen.append(made.turn.value)
        await task
        return seen

    assert asyncio.run(run()) == ["train", "sync", "generate", "sent"]
