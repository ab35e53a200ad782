"""Which of the kernel libraries that SGLang prefers on a GPU load here, and what engines are told where one does not.

SGLang 0.5.16 chooses by the GPU and by which packages are installed: FlashAttention 3 for attention on Hopper,
FlashInfer elsewhere and for sampling. A package that is there and does not load (built for another torch, a library
missing) ends an engine half a minute into its start. So they are imported, once, in a process of its own, and what does
not load is said and not used: Triton's kernels and torch's come with torch. Torch-free; ``hardware.device`` asks.
"""

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Collection

from slime_cli import processes

ATTENTION = "sgl_kernel.flash_attn"
SAMPLING = "flashinfer.sampling"
_HOPPER = 9
_NAMES = {ATTENTION: "FlashAttention 3 (sglang-kernel)", SAMPLING: "FlashInfer"}
_ASK = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        lines = str(error).strip().splitlines()
        found[name] = f"{type(error).__name__}: {lines[0] if lines else ''}"
import torch
print(json.dumps({"problems": found, "major": torch.cuda.get_device_capability()[0]}))
"""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernel libraries that were found on this machine."""

    problems: dict[str, str]
    """Module -> why it does not load."""
    major: int
    """The GPU's compute capability, first digit."""

    def defaults(self) -> dict[str, str]:
        """SGLang's options (by dest) for what does not load; empty where its own choice will do."""
        out: dict[str, str] = {}
        if (ATTENTION if self.major == _HOPPER else SAMPLING) in self.problems:
            out["attention_backend"] = "triton"
        if SAMPLING in self.problems:
            out["sampling_backend"] = "pytorch"
        return out

    def words(self, given: Collection[str] = ()) -> list[str]:
        """One line an option that follows from what does not load; none for those that the user has ``given``."""
        missing = {"attention_backend": ATTENTION if self.major == _HOPPER else SAMPLING, "sampling_backend": SAMPLING}
        return [
            f"{_NAMES[missing[dest]]} does not load here ({self.problems[missing[dest]][:200]}), so engines get"
            f" --sglang-{dest.replace('_', '-')} {value}"
            for dest, value in self.defaults().items()
            if dest not in given
        ]


@functools.cache
def find() -> Kernels:
    """Asks the libraries that are installed. What cannot be asked counts as found: the engine then says itself."""
    command = [sys.executable, "-P", "-c", _ASK, ATTENTION, SAMPLING]
    try:
        ran = subprocess.run(
            command, env=processes.environment(), capture_output=True, text=True, timeout=300, check=True
        )
        told = json.loads(ran.stdout.strip().splitlines()[-1])
        return Kernels(told["problems"], told["major"])
    except (subprocess.SubprocessError, ValueError, IndexError, KeyError):
        return Kernels({}, _HOPPER)
