"""FP8 versions as engines sum them up. The weight checker of SGLang (0.5.16) takes the sum of what FP8 in blocks stands
for, in bfloat16; so that is what :mod:`slime_cli.weights.verification` reads of such a version. Other formats are
summed up as the engine's kernels want them, which is not known here. Torch-free until a tensor is read.
"""

import dataclasses
from collections.abc import Iterator

import msgspec

from slime_cli import manifests
from slime_cli.models import architecture, schemes
from slime_cli.weights.folder import Folder
from slime_cli.weights.reading import checked
from slime_cli.weights.transport import Version


@dataclasses.dataclass(frozen=True)
class Dequantised:
    """A :class:`Version` whose weights in FP8 are in bfloat16, and whose scales are left out."""

    version: Version
    block: tuple[int, int]
    scales: dict[str, str]
    """Weight in FP8 -> its scale, where blocks divide it: SGLang takes blocks for squares by its width."""
    dtype: str
    """In which an engine computes that chooses for itself, and keeps what is not quantised: the config's."""

    @property
    def name(self) -> str:
        return self.version.name

    @property
    def manifest(self) -> manifests.Weights:
        found = self.version.manifest
        tensors = {name: tensor for name, tensor in found.tensors.items() if name not in self.scales.values()}
        tensors |= {
            name: msgspec.structs.replace(tensors[name], dtype="bfloat16", checksum="", digest="")
            for name in self.scales
        }
        return msgspec.structs.replace(found, tensors=tensors)

    def chunks(self, tensor: str) -> Iterator[bytes]:
        if tensor not in self.scales:
            yield from self.version.chunks(tensor)
            return
        shape, scale = self.version.manifest.tensors[tensor].shape, self.scales[tensor]
        grid = b"".join(checked(self.version, scale))
        step = self.block[0] * shape[1]
        rest = b""
        done = 0
        for chunk in checked(self.version, tensor):
            rest += chunk
            whole = len(rest) // step
            if whole:
                yield self._restored(rest[: whole * step], shape[1], grid, done)
                done, rest = done + whole, rest[whole * step :]

    def _restored(self, values: bytes, columns: int, grid: bytes, done: int) -> bytes:
        """Whole rows of blocks; ``done`` of them are behind."""
        import torch

        from slime_cli.models import quantise

        blocks = columns // self.block[1]
        weight = torch.frombuffer(bytearray(values), dtype=quantise.FP8).view(-1, columns)
        scales = torch.frombuffer(bytearray(grid), dtype=torch.float32).view(-1, blocks)
        part = scales[done : done + len(weight) // self.block[0]]
        return quantise.dequantise_fp8(weight, part, self.block).view(torch.uint8).numpy().tobytes()


def summed_up(version: Version) -> Version:
    """``version``, or what of it engines sum up where that is known to be another thing."""
    if not isinstance(version, Folder) or version.manifest.base is not None:
        return version
    there = (version.path / "config.json").is_file()
    config = architecture.read_config(str(version.path)) if there else {}
    scheme = schemes.of_config(config)
    if not isinstance(scheme, schemes.Fp8) or (scheme.strategy, scheme.suffix) != ("block", "_scale_inv"):
        return version
    held = version.manifest.tensors
    scales = {
        name: name + scheme.suffix
        for name, tensor in held.items()
        if tensor.dtype == "float8_e4m3fn" and _fits(tensor, held.get(name + scheme.suffix), scheme.block)
    }
    return Dequantised(version, scheme.block, scales, config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def _fits(weight: manifests.Tensor, scale: manifests.Tensor | None, block: tuple[int, int]) -> bool:
    squares = block[0] == block[1] and all(not length % block[0] for length in weight.shape)
    return scale is not None and scale.dtype == "float32" and squares and len(weight.shape) == 2
