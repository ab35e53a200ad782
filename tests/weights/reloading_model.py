"""``A B LACKING``: SGLang's own model, of its own layers, loads checkpoint A, then by slime's loader B, A again and, at
last, LACKING, which lacks a layer's weights. On a CPU, where such a model can be loaded and not computed with. Prints
JSON: what differs from models that SGLang loaded from A and B at the start, what lies elsewhere, the sums that SGLang's
weight checker takes of B, and the last's error.
"""

import json
import os
import subprocess
import sys
import types
from typing import Any

from slime_cli.addresses import free_port
from slime_cli.hardware import device


def fresh(path: str):
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import get_server_args

    config = ModelConfig.from_server_args(get_server_args(), model_path=path)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu", 0))


def prepare(path: str) -> None:
    """What an engine's process does before it loads a model."""
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # asked before a format is taken
    torch.cuda.synchronize = lambda *_: None
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.server_args import ServerArgs

    fp8._is_cpu = False  # blocks are prepared as on a Hopper GPU, which takes them as they are
    options = dict(attention_backend="torch_native", dtype="bfloat16", disable_overlap_schedule=True)
    args = ServerArgs(model_path=path, device="cpu", **options)
    runtime_context._CONTEXT.set_server_args(args)
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
    initialize_model_parallel()
    initialize_dp_attention(args, ModelConfig.from_server_args(args))


def reported(model: Any) -> dict[str, str]:
    """What SGLang's own weight checker says of the model."""
    from sglang.srt.utils.weight_checker import WeightChecker

    alone = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank"), 0)
    place = types.SimpleNamespace(**alone, **dict.fromkeys(("tp_size", "attn_dp_size", "pp_size"), 1))
    answer = WeightChecker(get_model=lambda: model, ps=place).handle("checksum")
    assert answer is not None
    return answer["checksums"]


def main(a: str, b: str, lacking: str) -> None:
    import torch

    from slime_cli.weights import reloading

    prepare(a)
    one = fresh(a)
    places = {name: tensor.data_ptr() for name, tensor in one.named_parameters()}

    def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().contiguous().clone() for name, tensor in model.named_parameters()}

    def load(path: str) -> dict[str, torch.Tensor]:
        reloading.load(one, [(reloading.described(path), torch.zeros(1))])
        return state(one)

    def differing(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> list[str]:
        assert x.keys() == y.keys()
        return [name for name in x if not torch.equal(x[name].view(torch.uint8), y[name].view(torch.uint8))]

    of_a, of_b = state(one), state(fresh(b))
    found = {"between": len(differing(of_a, of_b)), "tensors": len(of_a)}
    found["dtypes"] = sorted({str(tensor.dtype) for tensor in of_a.values()})
    found["after_b"] = differing(load(b), of_b)
    found["sums"] = reported(one)
    found["after_a"] = differing(load(a), of_a)
    found["moved"] = [name for name, tensor in one.named_parameters() if tensor.data_ptr() != places[name]]
    try:
        load(lacking)
    except ValueError as error:
        found["error"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    if os.environ.get("SGLANG_USE_CPU_ENGINE") is None:
        environment = device.engine_environment(dict(os.environ))
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    main(*sys.argv[1:])
