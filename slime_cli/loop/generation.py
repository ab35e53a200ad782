"""The parts that a phase generates with, made once the run's engines are there. Called by
:mod:`slime_cli.loop.phase`."""

import dataclasses
import types

from slime_cli.loop.evaluating import Answering
from slime_cli.loop.opening import Opened
from slime_cli.loop.shared import Shared
from slime_cli.loop.users import Users
from slime_cli.models import architecture
from slime_cli.options.evaluations import KEYS, EvaluationSet
from slime_cli.options.groups import SlimeOptions
from slime_cli.rollout.boundary import Boundary
from slime_cli.rollout.chat import RenderOptions
from slime_cli.rollout.client import RouterClient
from slime_cli.rollout.collector import Collector
from slime_cli.rollout.generate import Generator, Lent
from slime_cli.rollout.teacher import Teacher


@dataclasses.dataclass(frozen=True)
class Generation:
    """``args``: what users' functions get, with where the engines and the tokenizer's files are."""

    args: types.SimpleNamespace
    client: RouterClient
    generator: Generator
    users: Users
    collector: Collector


async def prepare(
    s: SlimeOptions, args: types.SimpleNamespace, shared: Shared, opened: Opened, teacher: Teacher | None
) -> Generation:
    """Waits for the engines."""
    client = await shared.serving()
    shape = _routed_experts_shape(s, shared.model)
    named = s.lora_rank is not None and s.lora_sync == "adapter"
    client.engines = shared.engine_urls if shape or named else None
    client.adapter = None
    ip, port = client.address()
    known = {"sglang_router_ip": ip, "sglang_router_port": port, "hf_checkpoint": str(shared.model)}
    known["sglang_context_length"] = opened.renderer.options.context
    args = types.SimpleNamespace(**vars(args) | known)
    assert shared.rewards is not None
    generator = Generator(
        args,
        client,
        shared.rewards,
        shape,
        teacher,
        boundary=opened.boundary,
        failures=opened.failures,
        watch=shared.watch,
        span=shared.tracer.span,
    )
    users = Users.of(args, Lent(client, generator.evidence(training=True)))
    over = s.over_sampling_batch_size if s.partial_rollout or s.dynamic_sampling_filter_path else None
    collector = Collector(
        generator,
        opened.buffer,
        client,
        batch=s.rollout_batch_size,
        burst=over or s.rollout_batch_size,
        slots=max(1, -(-client.in_flight // s.n_samples_per_prompt)),
        keep_partial=s.partial_rollout,
    )
    return Generation(args, client, generator, users, collector)


def answering(made: Generation, opened: Opened, one: EvaluationSet) -> Answering:
    """The phase's generator and renderer, or such with what the set has otherwise."""
    args = types.SimpleNamespace(**vars(made.args) | {dest: getattr(one.options, dest) for dest in KEYS.values()})
    renderer = opened.renderer.having(RenderOptions.of(one.options, opened.renderer.options.context))
    boundary = opened.boundary
    if args == made.args:
        return made.generator, boundary.checked(renderer.eval_prompt)
    own = Boundary.of(renderer.tokenizer, args.hf_checkpoint, boundary.rows, args, boundary.columns)
    return made.generator.having(args, own), own.checked(renderer.eval_prompt)


def _routed_experts_shape(s: SlimeOptions, model: str) -> list[int] | None:
    """[layers, experts a token] with ``--use-rollout-routing-replay``."""
    if not s.use_rollout_routing_replay:
        return None
    where = f"--use-rollout-routing-replay: {model}"
    return list(architecture.routed_experts(architecture.read_config(model), where))
