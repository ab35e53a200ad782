"""``slime doctor function KIND PATH``: the contract test of a user's function.

The function is loaded as a run loads it and called as a run calls it, with samples made up here; what comes back goes
through the checks of the run. A finding says what was looked at. Options of ``slime train`` that follow make the
``args`` that the function gets.
"""

import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slime_cli.buffer.types import Group, PromptRow, Sample, Status
from slime_cli.commands import doctor_trainer_functions
from slime_cli.errors import SlimeError, UsageError
from slime_cli.findings import Finding
from slime_cli.hooks import batches, columns, kinds, raised, rollouts, text
from slime_cli.hooks.kinds import Hook
from slime_cli.hooks.protocols import Args
from slime_cli.hooks.table import KINDS
from slime_cli.models import tiny
from slime_cli.text import nearest

TINY = "tiny:qwen3?num_hidden_layers=1"
QUESTION = "What is 2 + 2?"
ANSWER = "4"
Said = Iterator[str]


def check(kind: str, path: str, words: Sequence[str]) -> Iterator[Finding]:
    """Findings in order; the last is a failure where something is wrong. Raises UsageError for a kind that there is
    not, or options that are none."""
    kind = _kind(kind)
    with contextlib.ExitStack() as stack:
        args = _args(words, stack)
        try:
            hook = Hook.load(path, kind)
            yield Finding("loads", "ok", f"{kinds.place_of(hook.function)} accepts {KINDS[kind]}")
            for said in CONTRACTS[kind](hook, args):
                yield Finding(kind, "ok", said)
        except SlimeError as error:
            yield Finding(kind, "fail", error.message, error.fix)
        except (Exception, SystemExit) as error:
            yield Finding(kind, "fail", f"it raised {raised.sentence(error)}", raised.trace(error))


def _kind(name: str) -> str:
    """A kind by its name, or by the option that it belongs to."""
    by_flag = {kind.flag: known for known, kind in reversed(list(KINDS.items()))}
    found = by_flag.get(name, name)
    if found not in KINDS:
        raise UsageError(f"no kind of function is called {name!r}{nearest(name, [*KINDS, *by_flag])}", ", ".join(KINDS))
    return found


def _args(words: Sequence[str], stack: contextlib.ExitStack) -> Args:
    """As a run makes them: slime's defaults, and the options that are given; a tiny model where none is."""
    from slime_cli.options.resolve import args_namespace, resolve

    args = args_namespace(resolve(list(words)))
    model = args.hf_checkpoint or TINY
    if model.startswith(tiny.PREFIX):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slime-"))
        model = str(tiny.make(model, pathlib.Path(folder) / "model"))
    known = {"hf_checkpoint": model, "rollout_max_response_len": args.rollout_max_response_len or 64}
    return types.SimpleNamespace(**vars(args) | known | {"rollout_batch_size": args.rollout_batch_size or 2})


def _prompt(args: Args, **more: Any) -> Sample:
    chat = text.tokenizer(args).chat_template
    messages = [{"role": "user", "content": QUESTION}] if chat else QUESTION
    return dataclasses.replace(text.new_sample(args, messages, ANSWER), **more)


def _answered(args: Args, index: int, response: str, reward: Any = None, group: int = 0) -> Sample:
    """A sample as the engines leave it."""
    sample = _prompt(args, index=index, group_index=group)
    ids = text.encode(args, response)
    sample.append(ids, log_probs=[-0.5] * len(ids), version="v000000", trained=True, text=response)
    return dataclasses.replace(sample, status=Status.COMPLETED, reward=reward, weight_versions=["v000000"])


def _group(args: Args, rewards: Sequence[float] = (1.0, 0.0), group: int = 0) -> list[Sample]:
    key = args.reward_key
    first = group * len(rewards)
    responses = [ANSWER if reward else "5" for reward in rewards]
    return [
        _answered(args, first + i, response, {key: reward} if key else reward, group)
        for i, (response, reward) in enumerate(zip(responses, rewards, strict=True))
    ]


# -- generation and rewards --------------------------------------------------------------------------------------------


def generate(hook: Hook, args: Args) -> Said:
    from slime_cli.commands.scripted_engine import ScriptedEngine

    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": args.rollout_max_response_len}
    if args.rollout_endpoint:
        from slime_cli.serving.attached import Attached

        attached = Attached(args.rollout_endpoint)
        attached.check()
        yield from _generated(hook, _at(args, attached.endpoint.router_url), params, None)
        return
    tokenizer = text.tokenizer(args)
    with ScriptedEngine([*text.encode(args, "2+3"), tokenizer.eos_token_id], "2+3") as engine:
        args = _at(args, "http://{}:{}".format(*engine.server_address[:2]))
        yield from _generated(hook, args, params, engine)
        engine.aborting = True
        found = kinds.siblings(hook.where, _prompt(args), _called(hook, args, _prompt(args), params))
        ended = {sample.status for sample in found}
        yield (
            "requests that end early: it says ABORTED, so a partial rollout can be continued"
            if ended == {Status.ABORTED}
            else f"requests that end early: it says {', '.join(sorted(s.value for s in ended)) or 'nothing'}"
        )


def _at(args: Args, url: str) -> Args:
    import urllib.parse

    parts = urllib.parse.urlsplit(url)
    return types.SimpleNamespace(**vars(args) | {"sglang_router_ip": parts.hostname, "sglang_router_port": parts.port})


def _called(hook: Hook, args: Args, sample: Sample, params: dict[str, Any], **more: Any) -> Any:
    return asyncio.run(hook.ask(args, sample, dict(params), **kinds.accepted(hook.function, **more)))


def _generated(hook: Hook, args: Args, params: dict[str, Any], engine: Any) -> Said:
    for evaluation in (False, True):
        leased = _prompt(args)
        given = dataclasses.replace(leased, tokens=list(leased.tokens), metadata={})
        found = kinds.siblings(hook.where, leased, _called(hook, args, given, params, evaluation=evaluation))
        if not found:
            raise hook.refuse("returned no sample", "return the sample, or a list of what it fanned out into")
        for sample in found:
            _fits(hook, args, leased, sample)
            if engine is not None and not evaluation:
                _as_sampled(hook, engine, sample)
    counts = collections.Counter(sample.status.value for sample in found)
    yield f"returns {len(found)} sample(s): {', '.join(f'{n} {status}' for status, n in counts.items())}"
    first = found[0]
    trained = sum(first.effective_mask())
    yield f"{first.response_length} response tokens, {trained} of them trained: {first.response!r:.80}"
    if engine is not None:
        yield "each trained token is one that the engine sampled there, with its log-probability"


def _fits(hook: Hook, args: Args, leased: Sample, sample: Sample) -> None:
    from slime_cli.models import architecture

    try:
        sample.check(architecture.vocabulary(args.hf_checkpoint))
    except (ValueError, TypeError) as error:
        raise hook.refuse(f"returned something unfit: {error}", "fix the function") from None
    if not sample.response_length or sample.response_length == len(sample.tokens):
        raise hook.refuse("returned no response token, or no prompt token", "tokens = prompt + response")
    if sample.status not in (Status.COMPLETED, Status.TRUNCATED, Status.PENDING):
        raise hook.refuse(f"ended as {sample.status.value}", "such a trajectory is dropped")
    if sample.response_length > args.rollout_max_response_len:
        said = f"returned {sample.response_length} response tokens of {args.rollout_max_response_len}"
        raise hook.refuse(
            said, 'sampling_params["max_new_tokens"] bounds all turns together; engine.generate keeps to it'
        )


def _as_sampled(hook: Hook, engine: Any, sample: Sample) -> None:
    begin = len(sample.tokens) - sample.response_length
    log_probs = sample.rollout_log_probs or [None] * sample.response_length
    for k, (trained, log_prob) in enumerate(zip(sample.effective_mask(), log_probs, strict=True)):
        place = begin + k
        token, expected = engine.given.get(tuple(sample.tokens[:place]), (None, None))
        if trained and token != sample.tokens[place]:
            said = f"trains token {sample.tokens[place]} at place {place}, which no engine sampled there"
            raise hook.refuse(said, "mask what you add with 0; never tokenise an answer's text again")
        if trained and log_prob is not None and abs(log_prob - expected) > 1e-6:
            said = f"gives token {place} the log-probability {log_prob}, and the engine said {expected}"
            raise hook.refuse(said, "keep them in step: engine.generate and sample.append do")


def reward(hook: Hook, args: Args) -> Said:
    for response in (ANSWER, "5"):
        value = asyncio.run(hook.ask(args, _answered(args, 0, response)))
        yield f"{response!r} to {QUESTION!r} with the label {ANSWER!r}: {_rewarded(hook, args, value)}"


def group_reward(hook: Hook, args: Args) -> Said:
    samples = [_answered(args, i, response) for i, response in enumerate((ANSWER, "5"))]
    values = kinds.plain_or_none(asyncio.run(hook.ask(args, samples)))
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        raise hook.refuse(
            f"returned {values!r:.100} for {len(samples)} samples", "return one reward a sample, in order"
        )
    yield f"{ANSWER!r} and '5': {', '.join(str(_rewarded(hook, args, value)) for value in values)}"


def _rewarded(hook: Hook, args: Args, value: Any) -> Any:
    from slime_cli.rewards.pool import RewardFailure
    from slime_cli.rewards.rewards import checked_reward

    found = checked_reward(kinds.plain_or_none(value), args.reward_key)
    if isinstance(found, RewardFailure):
        raise hook.refuse(f"is no reward: {found.detail}", "return a number, or a dict with one under --reward-key")
    return found


def dynamic_filter(hook: Hook, args: Args) -> Said:
    for what, rewards in {"equal rewards": (1.0, 1.0), "unlike rewards": (1.0, 0.0)}.items():
        reason = asyncio.run(batches.verdict(hook, args, _group(args, rewards)))
        yield f"a group with {what}: {'kept' if reason is None else f'dropped as {reason}'}"


def sample_hook(hook: Hook, args: Args) -> Said:
    sample = _answered(args, 0, ANSWER)
    made = asyncio.run(batches.prepared([hook], args, sample, rollout_id=0, evaluation=False))
    made.check()
    yield f"returns a sample of {made.response_length} response tokens: {made.response!r:.80}"


# -- groups and batches ------------------------------------------------------------------------------------------------


def _dealt(index: int, rendered: Any, pending: list[Sample]) -> Group:
    row = PromptRow(QUESTION, ANSWER, {}, "made up", index + 1)
    return Group(index, row, rendered, [], pending)


def _whole(hook: Hook, args: Args, run: Callable[..., Any]) -> Any:
    """Calls a function for a whole rollout, or evaluation, with groups of two."""
    count = 0

    def lease(n: int) -> list[Group]:
        nonlocal count
        count += n
        return [
            _dealt(i, _prompt(args), [_prompt(args, index=2 * i + k, group_index=i) for k in range(2)])
            for i in range(count - n, count)
        ]

    async def call() -> Any:
        return await run(hook, args, 0, rollouts.Dealer(hook, lease, lambda groups: None))

    return asyncio.run(call())


def rollout(hook: Hook, args: Args) -> Said:
    rolled = _whole(hook, args, rollouts.rollout)
    sizes = [len(samples) for _, samples in rolled.groups]
    yield f"returns {len(sizes)} groups of {sum(sizes)} samples, leaves out {len(rolled.left_out)} that it was dealt"


def eval_rollout(hook: Hook, args: Args) -> Said:
    found, _ = _whole(hook, args, rollouts.evaluation)
    for name, one in found.items():
        yield f"{name}: rewards of {len(one.rewards_PN)} prompts"


def data_source(hook: Hook, args: Args) -> Said:
    from slime_cli.buffer.sources.users import UserSource

    sources = [UserSource(hook.path, args) for _ in range(2)]
    first, again = ([source[i] for i in range(min(3, len(source)))] for source in sources)
    if first != again:
        raise hook.refuse("deals other prompts when it is made again", "a run that resumes asks for the same ones")
    yield f"deals {len(sources[0])} prompts, the first: {first[0].prompt!r:.80}"


def buffer_filter(hook: Hook, args: Args) -> Said:
    groups = [_dealt(i, None, _group(args, group=i)) for i in range(3)]
    chosen, dropped = rollouts.choose(hook, args, groups, 2)
    yield f"of 3 groups, 2 asked for: chooses {len(chosen)}, drops {len(dropped)}"


def rollout_sample_filter(hook: Hook, args: Args) -> Said:
    groups = [_group(args), _group(args, (1.0, 1.0), 1)]
    batches.filter_samples(hook, args, groups)
    yield f"of 4 samples, {sum(sample.trained for group in groups for sample in group)} are still trained"


def all_samples_process(hook: Hook, args: Args) -> Said:
    batches.look_at_all(hook, args, [_group(args), _group(args, (1.0, 1.0), 1)])
    yield "saw 2 groups, and changed nothing"


def reward_post_process(hook: Hook, args: Args) -> Said:
    samples = _group(args)
    batches.post_process(hook, args, samples)
    yield f"rewards 1 and 0 are trained as {samples[0].reward:g} and {samples[1].reward:g}"


def convert_samples(hook: Hook, args: Args) -> Said:
    made = columns.convert(hook, args, _group(args))
    yield f"of 2 samples: {len(made)} rows"


def rollout_log(hook: Hook, args: Args) -> Said:
    quiet = batches.log_rollout(hook, 0, args, _group(args), {"rollout/dynamic_filter/drop_rejected": 1.0}, 1.0)
    yield f"slime's own line is {'left out' if quiet else 'shown too'}"


def eval_log(hook: Hook, args: Args) -> Said:
    quiet = batches.log_evaluation(hook, 0, args, {"held-out": _group(args)}, {})
    yield f"slime's own line is {'left out' if quiet else 'shown too'}"


def weight_post_write(hook: Hook, args: Args) -> Said:
    with tempfile.TemporaryDirectory(prefix="slime-") as folder:
        version = pathlib.Path(folder) / "v000001"
        version.mkdir()
        (version / "model-00001-of-00001.safetensors").write_bytes(b"\0" * 8)
        hook(args, str(version), ["http://127.0.0.1:30000"])
        if [path.name for path in version.iterdir()] != ["model-00001-of-00001.safetensors"]:
            raise hook.refuse("changed the version's folder", "copy it; engines here read it as it is")
    yield "was given a folder, and left it as it was"


CONTRACTS: dict[str, Callable[[Hook, Args], Said]] = {
    "generate": generate,
    "reward": reward,
    "group_reward": group_reward,
    "dynamic_filter": dynamic_filter,
    "sample_hook": sample_hook,
    "rollout": rollout,
    "eval_rollout": eval_rollout,
    "data_source": data_source,
    "buffer_filter": buffer_filter,
    "rollout_sample_filter": rollout_sample_filter,
    "all_samples_process": all_samples_process,
    "reward_post_process": reward_post_process,
    "convert_samples": convert_samples,
    "rollout_log": rollout_log,
    "eval_log": eval_log,
    "weight_post_write": weight_post_write,
    **doctor_trainer_functions.CONTRACTS,
}
