"""Peak memory of the log-probability path, forward and backward, in multiples of one float32 copy of its logits.

Runs in a process of its own (``python -m bench.heads [VOCABULARY]``) and prints one JSON object. Plain means the same
functions over all rows at once, which is what the chunks are there to avoid.
"""

import json
import os
import sys
import types
from typing import Any

ROWS = 4096
HIDDEN = 256
VOCABULARY = 32768
CHUNK = 256


def main(vocabulary: int) -> None:
    from slime_cli.hardware import device as hardware

    device = hardware.prepare_trainer()
    import torch
    from megatron.core import mpu
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    from slime_cli.addresses import free_port
    from slime_cli.training.network import heads

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    torch.distributed.init_process_group(device.backend, rank=0, world_size=1)
    mpu.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, use_cpu_initialization=device.kind == "cpu"
    )
    layer = ColumnParallelLinear(
        HIDDEN,
        vocabulary,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        skip_bias_add=False,
        gather_output=False,
    )
    where = next(layer.parameters()).device
    hidden_SBH = torch.randn(ROWS, 1, HIDDEN, device=where, requires_grad=True)
    targets_R = torch.randint(0, vocabulary, (ROWS,), device=where)
    mb: Any = types.SimpleNamespace(where_R=torch.arange(ROWS, device=where), targets_R=targets_R, nucleus=None)
    given: dict[str, Any] = dict(
        hidden_states=hidden_SBH, output_layer=layer, output_weight=None, scale_logits=lambda x: x, config=config
    )

    def peak(chunk: int) -> float:
        """Bytes above what was there before, over bytes of the logits."""
        with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
            heads.log_probs(mb, temperature=1.0, entropy="gradient", chunk=chunk, **given).sum().backward()
        return highest(profile, device.kind) / (4 * ROWS * vocabulary)

    peak(CHUNK)  # the first call allocates the gradients
    print(
        json.dumps(
            {"chunked": peak(CHUNK), "plain": peak(ROWS), "rows": ROWS, "vocabulary": vocabulary, "chunk": CHUNK}
        )
    )


def highest(profile: Any, kind: str) -> int:
    """The most bytes that lived at once, from the profile's allocations and frees in order."""
    live = top = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]" and (kind == "cpu") == (event.device_type().name == "CPU"):
            live += event.nbytes()
            top = max(top, live)
    return top


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else VOCABULARY)
