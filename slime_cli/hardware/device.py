"""Which device this machine has, and everything that follows from it. The device is found, never asked for.

:func:`find` is torch-free (the command line uses it before any engine is imported). Processes that import torch call
:func:`prepare_trainer` first; servers are started with :func:`engine_environment` and :func:`engine_defaults`.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
import subprocess
from collections.abc import Collection, Mapping

from slime_cli.errors import UsageError
from slime_cli.hardware import adaptations, engine_kernels, transformer_engine

CPU_TOKENS = 65536
"""Tokens whose keys and values an engine on a CPU has room for, unless it is told another number."""
CPU_FOLDER = pathlib.Path(__file__).parent / "cpu"
ENGINES_FOLDER = pathlib.Path(__file__).parent / "engines"


@dataclasses.dataclass(frozen=True)
class Device:
    """What the engines run on."""

    kind: str
    """``cuda`` or ``cpu``."""
    count: int
    """GPUs that are visible, or CPU cores."""
    name: str

    @property
    def backend(self) -> str:
        """torch.distributed backend of the trainer."""
        return "nccl" if self.kind == "cuda" else "gloo"


@functools.cache
def find() -> Device:
    """The machine's device. ``CUDA_VISIBLE_DEVICES=""`` makes a GPU machine count as a CPU one, as it does for
    torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, check=False)
        gpus = [line for line in names.stdout.splitlines() if line.strip()]
        if names.returncode == 0 and gpus:
            return Device("cuda", len(visible.split(",")) if visible else len(gpus), gpus[0].strip())
    return Device("cpu", os.cpu_count() or 1, "cpu")


@functools.cache
def gpus() -> list[str]:
    """The UUID of each GPU of this machine, in the driver's order; empty without one."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return [gpu_name(line) for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []


def gpu_name(uuid: str) -> str:
    """A GPU's UUID as it is compared here: the driver and torch write it in different ways."""
    return uuid.strip().lower().removeprefix("gpu-")


@functools.cache
def memory() -> int | None:
    """Bytes of the first GPU; None on a CPU."""
    if find().kind == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return int(said) * 2**20 if said.isdigit() else None


def prepare_trainer() -> Device:
    """Makes this process able to run Megatron on what the machine has; call before anything imports megatron."""
    device = find()
    if device.kind == "cpu":
        # torch's threads sleep while they wait for one another: where a core is shared with other work, one that spins
        # takes it from the one that is waited for. Read when torch is loaded.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from slime_cli.hardware.cpu import redirect

        redirect.install()
    else:
        # Megatron refuses tensor and context parallelism without.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        broken = transformer_engine.problem(device.kind)  # which imports it, before anything imports Megatron
        from slime_cli.hardware.cuda import weight_gradients

        weight_gradients.stand_in()
        if broken is not None:
            transformer_engine.stand_in()
    return device


def check_engine(config: dict) -> None:
    """Raises UsageError for a model (its HF ``config.json``) that SGLang cannot serve on this device."""
    if find().kind == "cuda":
        return
    if config.get("quantization_config") or config.get("compression_config"):
        raise UsageError(
            "SGLang's stock wheel has no kernels for quantised weights on a CPU",
            "run the engines on a GPU (--rollout-endpoint can name them), or give a checkpoint of bfloat16 weights",
        )
    if "num_experts_per_tok" in config:
        raise UsageError(
            "SGLang's stock wheel has no kernels for mixtures of experts on a CPU",
            "run the engines on a GPU (--rollout-endpoint can name them); the trainer runs on either",
        )


def trainer_dtype(kind: str, megatron: dict[str, object]) -> str:
    """What the trainer computes in on a device of this kind, given its options. Engines that generate for it compute
    in the same.

    Left to itself, SGLang serves a float32 model in float16 on a GPU, where it is trained in bfloat16.
    """
    if megatron.get("fp16"):
        return "float16"
    return "bfloat16" if kind == "cuda" or megatron.get("bf16") else "float32"


def engine_dtype(kind: str, megatron: dict[str, object], config: dict[str, object]) -> str:
    """What engines of a model (its HF ``config.json``) are told to compute in: the trainer's type.

    Some kernels for quantised weights take one type alone, so there a GPU's engine chooses.
    """
    if kind == "cuda" and (config.get("quantization_config") or config.get("compression_config")):
        return "auto"
    return trainer_dtype(kind, megatron)


def dtype_words(megatron: dict[str, object], config: dict[str, object]) -> str | None:
    """One line where a GPU's trainer and engines compute in another type than the model (its HF ``config.json``) is
    stored in."""
    kind = find().kind
    stored = config.get("dtype") or config.get("torch_dtype")
    computed = trainer_dtype(kind, megatron)
    if kind == "cpu" or not stored or stored == computed or engine_dtype(kind, megatron, config) == "auto":
        return None
    other = "" if megatron.get("fp16") else " (--fp16: in float16)"
    return f"the model is stored in {stored}; it is trained and served in {computed}{other}"


def check_trainer(megatron: Mapping[str, object]) -> None:
    """Raises UsageError for options of the trainer (Megatron's, by dest) that this device has no use for."""
    if find().kind != "cpu":
        return
    if megatron.get("optimizer_cpu_offload"):
        raise UsageError(
            "--optimizer-cpu-offload moves optimizer state off a GPU, and this machine has none",
            "leave it out here: the state is in the CPU's memory already",
        )
    if megatron.get("fp8"):
        raise UsageError("--fp8-format: a CPU has no FP8", "leave it out here")
    transformer_engine.layers("cpu", ["--transformer-impl", str(megatron.get("transformer_impl") or "local")])


def check_full_precision() -> None:
    """Raises UsageError where the trainer computes in bfloat16 whatever flag is taken back."""
    if find().kind == "cuda":
        raise UsageError("--bf16=false: a GPU's trainer computes in bfloat16", "leave it out, or give --fp16")


def engine_environment(environment: dict[str, str], *, rests: bool = False) -> dict[str, str]:
    """Environment of an SGLang server: on a CPU, its CPU engine and the stand-in for the CUDA-only kernel wheel.
    ``rests``: it gives its memory back now and then (``--offload-rollout``)."""
    out = dict(environment)
    # The server hangs up on connections that idle for 5 s (a training step), just when the router sends on one again.
    out.setdefault("SGLANG_TIMEOUT_KEEP_ALIVE", "7200")
    if rests:
        # The router asks every 2 s, and an engine that has given its memory back must not generate for the answer.
        out["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
        out.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")  # CUDA graphs stay, and their memory is given back too
    stand_ins = [adaptations.NO_MEGATRON_IN_ENGINES.stand_ins(ENGINES_FOLDER, "megatron")]
    if find().kind == "cpu":
        stand_ins.append(adaptations.KERNELS_ON_CPU.stand_ins(CPU_FOLDER, "sgl_kernel"))
    out["PYTHONPATH"] = os.pathsep.join(p for p in (*stand_ins, out.get("PYTHONPATH", "")) if p)
    if find().kind == "cpu":
        out["SGLANG_USE_CPU_ENGINE"] = "1"
        out.setdefault("OMP_NUM_THREADS", "1")
    else:
        out |= group_environment()
    return out


def group_environment() -> dict[str, str]:
    """Environment of processes that are in one group with an engine's."""
    # What SGLang's own processes use. Where it differs the engine fails ("invalid argument") and the sender waits.
    return {"NCCL_CUMEM_ENABLE": "0"} if find().kind == "cuda" else {}


SERVER_DEFAULTS: dict[str, object] = {
    # A request of n samples makes thousands of objects that live until its answer. By Python's own numbers the server
    # goes through all of them again and again meanwhile, for a third of its time.
    "gc_threshold": [50_000],
    "log_level_http": "warning",  # a line for each request costs more than the router's whole part in it
}
"""SGLang server arguments (by dest) for rollouts: many requests at once."""


def engine_defaults() -> dict[str, object]:
    """SGLang server arguments (by dest) that this device needs; a user's own ``--sglang-*`` option wins over them."""
    if find().kind == "cpu":
        return SERVER_DEFAULTS | {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
            "max_total_tokens": CPU_TOKENS,
            "lora_backend": "torch_native",  # of its four the one in plain torch; --sglang-enable-lora uses it
            "sleep_on_idle": True,  # an idle scheduler spins otherwise, on a core that the trainer needs
        }
    # Recording prefill's CUDA graphs takes most of a minute and ends an engine with small heads under FlashAttention 3
    # (CUBLAS_STATUS_EXECUTION_FAILED, sglang 0.5.16); a rollout spends its time in decoding.
    return SERVER_DEFAULTS | {"cuda_graph_backend_prefill": "disabled", **engine_kernels.find().defaults()}


def gives_memory_back() -> dict[str, object]:
    """SGLang server arguments (by dest) of an engine that can give its memory back and keep its addresses."""
    return {"enable_memory_saver": True} if find().kind == "cuda" else {}


def engine_words(given: Collection[str]) -> list[str]:
    """Sentences that tell the user about :func:`engine_defaults`. ``given``: options that they set themselves."""
    if find().kind == "cpu":
        return []
    graphs = "cuda_graph_backend_prefill"
    left_out = "engines record no CUDA graphs of prefill (--sglang-cuda-graph-backend-prefill breakable: they do)"
    return [*(() if graphs in given else (left_out,)), *engine_kernels.find().words(given)]
