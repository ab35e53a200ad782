"""Checks of required options, of the sizes of a rollout and its optimizer steps, and of the tokens of a micro-batch."""

from collections.abc import Iterator

from slime_cli.options import derive
from slime_cli.options.checks.common import Problem, no_effect
from slime_cli.options.checks.placement import layout
from slime_cli.options.resolve import Resolved


def required(r: Resolved) -> Iterator[Problem | str]:
    if not r.slime.hf_checkpoint:
        yield "--hf-checkpoint is missing", "give the Hugging Face folder of the model"
    if r.command != "train":
        return
    dealt = r.slime.num_rollout != 0 and not r.slime.load_debug_rollout_data
    if dealt and not (r.slime.prompt_data or r.slime.data_source_path):
        yield "--prompt-data is missing", "give a file of prompts, or reasoning-gym:TASK"
    if r.slime.num_rollout is None and r.slime.num_epoch is None:
        yield "--num-rollout is missing", "say how many rollout steps to run, or give --num-epoch"
    if not r.slime.rollout_batch_size:
        yield "--rollout-batch-size is missing", "say how many prompts one rollout step takes"
    both = r.slime.num_epoch is not None and r.slime.num_rollout is not None
    if both and r.origins["slime.num_epoch"] == "flag":
        yield no_effect(["--num-epoch"], "beside --num-rollout, which says how many steps there are")


def batch(r: Resolved) -> Iterator[Problem | str]:
    prompts = r.slime.rollout_batch_size
    group = r.slime.n_samples_per_prompt
    steps = r.slime.num_steps_per_rollout
    batch = r.megatron.get("global_batch_size")
    if not prompts:
        return
    if steps is None or batch is None or prompts * group != batch * steps:
        yield (
            (
                f"--rollout-batch-size {prompts} x --n-samples-per-prompt {group} = {prompts * group} samples, but "
                f"--global-batch-size {batch or '?'} x --num-steps-per-rollout {steps or '?'}"
                f"{f' = {batch * steps}' if batch and steps else ''}"
            ),
            "make the products equal, or leave one of the last two out",
        )
        return
    dp = layout(r)["dp"]
    micro = r.megatron.get("micro_batch_size", 1)
    if not r.slime.use_dynamic_batch_size and dp and batch % (dp * micro):
        yield (
            f"--global-batch-size {batch} is not a multiple of data parallel {dp} x --micro-batch-size {micro}",
            "change one, or give --use-dynamic-batch-size with --max-tokens-per-gpu",
        )
    elif batch < dp:
        yield f"--global-batch-size {batch} is below data parallel {dp}: some ranks have nothing to do in every step"
    if dp == 1 and r.slime.balance_data and r.origins["slime.balance_data"] == "flag":
        yield "--balance-data has no effect with data parallel 1"
    over = r.slime.over_sampling_batch_size
    if over is not None and over < prompts:
        yield f"--over-sampling-batch-size {over} is below --rollout-batch-size {prompts}", "raise it, or leave it out"


def tokens(r: Resolved) -> Iterator[Problem | str]:
    dynamic = r.slime.use_dynamic_batch_size
    cap = r.slime.max_tokens_per_gpu
    if dynamic and not cap:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu", "give the tokens that one rank can take"
    answer = r.slime.rollout_max_response_len
    longest = derive.longest(r.slime)
    room = (cap or 0) * layout(r)["cp"]
    if dynamic and cap and answer and longest > room:
        policy = f"--oversize {r.slime.oversize} applies"
        yield f"samples can have {longest} tokens and a micro-batch takes {room}: {policy}"
    context = r.sglang.get("context_length")
    if isinstance(context, int) and answer and longest > context:
        parts = f"prompt {r.slime.rollout_max_prompt_len or 0} + answer {answer}"
        what = parts if r.slime.rollout_max_context_len is None else f"--rollout-max-context-len {longest}"
        yield f"--sglang-context-length {context} is below {what}", "raise it, or lower the lengths"
    prompt, together = r.slime.rollout_max_prompt_len, r.slime.rollout_max_context_len
    if prompt is not None and together is not None and prompt >= together:
        said = f"--rollout-max-prompt-len {prompt} leaves no room for an answer in --rollout-max-context-len {together}"
        yield said, "lower the first"


TRAIN = (batch, tokens)
