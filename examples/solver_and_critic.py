"""Three agents of one model: a solver answers, a critic judges the answer, the solver revises it.

Each turn is a sample of its own, and all are siblings of one trajectory: it is kept, trained or dropped whole, and the
three share one denominator in the loss. Each has the reward of its own task: the solver's answer is right; the critic
said so; the revised answer is right. In an evaluation the revised answer alone counts.

Tokens go in and come out: what the critic reads of the solver are the ids that the engine sampled, put between encoded
texts of ours. They are the prompt there, so they are trained once, where they were sampled.
"""

import dataclasses
import re

from slime_cli import hooks

CRITIC = "Question: ", "\nProposed answer: ", "\nIs the answer right? Say yes or no, and why.\nCritic: "
REVISE = "\nThink again with the critic's words.\nFinal answer: "


async def generate(args, sample, sampling_params, evaluation=False):
    """``--custom-generate-function-path``; ``--custom-rm-path`` is not needed."""
    engine = hooks.engine(args)
    before, between, after = (hooks.encode(args, text) for text in CRITIC)

    async def turn(role, tokens):
        one = dataclasses.replace(sample, tokens=tokens, metadata=sample.metadata | {"role": role})
        return await engine.generate(one, sampling_params)

    question = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
    solver = await turn("solver", hooks.render(args, [{"role": "user", "content": question}]))
    answer = solver.tokens[len(solver.tokens) - solver.response_length :]
    critic = await turn("critic", [*before, *hooks.encode(args, question), *between, *answer, *after])
    revised = await turn("revised", [*critic.tokens, *hooks.encode(args, REVISE)])

    solver.reward = right(solver)
    critic.reward = float(verdict(critic) == ("yes" if solver.reward else "no"))
    revised.reward = right(revised)
    if evaluation:
        return revised
    return [one for one in (solver, critic, revised) if one.response_length]  # none is left where the context is full


def right(sample):
    """1 where the last number of the answer is the label's."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", sample.response)
    return float(bool(numbers) and numbers[-1] == str(sample.label).strip())


def verdict(critic):
    """The first of yes and no that the critic says; None where it says neither."""
    found = re.search(r"\b(yes|no)\b", critic.response.lower())
    return found and found[1]
