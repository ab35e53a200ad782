"""Options without effect because of another value at hand: what each needs is declared with it.

Only flags are named: a profile may hold what another's value leaves idle. Nothing is generated in a supervised phase,
so the engines' options idle there too.
"""

import collections
from collections.abc import Iterator

from slime_cli.options import catalogue, own
from slime_cli.options.checks.common import NoEffect, no_effect
from slime_cli.options.declare import POLICY, Need
from slime_cli.options.groups import SlimeOptions
from slime_cli.options.resolve import Resolved


def needs(r: Resolved) -> Iterator[NoEffect]:
    idle: dict[Need, list[str]] = collections.defaultdict(list)
    for option in own.OPTIONS:
        lacking = next((need for need in option.needs if not need.met(r.slime)), None)
        if lacking and r.origins[f"slime.{option.dest}"] == "flag":
            idle[lacking].append(option.flag)
    if not POLICY.met(r.slime) and (flags := _of_engines(r)):
        idle[POLICY] += flags
    for need, flags in idle.items():
        yield no_effect(flags, _lack(need, r.slime))


def _of_engines(r: Resolved) -> list[str]:
    return [
        catalogue.PREFIXES[section] + catalogue.load(section).by_dest[dest][0].flag[2:]
        for section in ("sglang", "router")
        for dest in r.values(section)
        if r.origins[f"{section}.{dest}"] == "flag"
    ]


def _lack(need: Need, s: SlimeOptions) -> str:
    """Completes "has no effect"."""
    if not need.values:
        return f"without {' or '.join(map(own.flag, need.options))}"
    (name,) = need.options
    return f"with {own.flag(name)} {getattr(s, name)}, only with {', '.join(need.values)}"


TRAIN = (needs,)
