"""How a rollout's samples are cut into optimizer steps and micro-batches."""

from typing import Literal

from slime_cli.options.declare import AT_LEAST_1, given, group, option


@group("batch")
class Batch:
    """How a rollout's samples are cut into optimizer steps and micro-batches."""

    num_steps_per_rollout: int = option(
        None, "Optimizer steps on each rollout; the global batch size follows from it.", bounds=AT_LEAST_1
    )
    use_dynamic_batch_size: bool = option(False, "Pack samples into micro-batches by their tokens.", resume="free")
    max_tokens_per_gpu: int | None = option(
        None,
        "Tokens that one rank takes in a packed micro-batch.",
        bounds=AT_LEAST_1,
        needs=given("use_dynamic_batch_size"),
        resume="free",
    )
    balance_data: bool = option(
        False, "Hand micro-batches out so that data-parallel ranks have even FLOPs (Karmarkar-Karp).", resume="free"
    )
    balance_by_flops: bool = option(
        False,
        "Pack for even FLOPs instead of full micro-batches; --max-tokens-per-gpu still holds.",
        needs=given("use_dynamic_batch_size"),
        resume="free",
    )
    log_probs_chunk_size: int | None = option(
        None,
        "Response tokens projected onto the vocabulary at once; as many as fit a sixteenth of the GPU's free memory, "
        "or 256 MiB on a CPU.",
        bounds=AT_LEAST_1,
        resume="free",
    )
    oversize: Literal["isolate", "drop", "fail"] = option(
        "isolate",
        "A sample above the token cap goes alone, is dropped, or ends the run.",
        needs=given("use_dynamic_batch_size"),
        resume="free",
    )
