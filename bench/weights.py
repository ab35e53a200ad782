"""The cost of a version on this disk: whole, and as a delta where some of a bf16 model's values have changed."""

import os
import pathlib
import time
from typing import Any, Literal

import msgspec
import torch

from slime_cli.weights import applying, publish
from slime_cli.weights.base import Base
from slime_cli.weights.folder import Folder, opened
from slime_cli.weights.transport import Writing

SHARES = (0.001, 0.01, 0.1)
TENSORS = 16


class Trainer:
    """One rank with random bf16 weights of ``size`` bytes."""

    def __init__(self, folder: pathlib.Path, hf_checkpoint: str, size: int) -> None:
        self.folder = folder
        self.model = hf_checkpoint
        self.size = size
        torch.manual_seed(0)
        rows = size // TENSORS // 2 // 1024
        self.weights = {f"t{i}": (torch.randn(rows, 1024) * 0.02).to(torch.bfloat16) for i in range(TENSORS)}
        self.base = Base()

    def step(self, share: float) -> None:
        """This share of the values moves by one to four units in the last place, at places that are drawn anew."""
        for tensor in self.weights.values():
            bits = tensor.view(torch.int16)
            moved = torch.randint(1, 5, bits.shape, dtype=torch.int16)
            bits += torch.where(torch.rand(bits.shape) < share, moved, torch.zeros_like(moved))

    def write(self, name: str, how: Writing) -> tuple[Folder, float, int]:
        """The version, the seconds until it is on the disk, and its bytes without the manifest's."""
        target = self.folder / name
        start = time.perf_counter()
        publish.prepare(target, self.model, delta=how.base is not None)
        part = self.base.write(self.weights.items(), target, "", how)
        fields = {"base": how.base, "base_digest": how.base_digest, "encoding": how.encoding}
        publish.seal(target, [part], msgspec.structs.replace(publish.described(name, 0, "bench"), **fields))
        files = [path for path in target.iterdir() if path.suffix in (".safetensors", ".patch")]
        for path in target.iterdir():
            with open(path, "rb") as written:
                os.fsync(written.fileno())
        return opened(target), time.perf_counter() - start, sum(path.stat().st_size for path in files)


def deltas(
    folder: pathlib.Path, hf_checkpoint: str, encoding: Literal["xor", "overwrite"], size: int = 256 << 20
) -> dict[str, Any]:
    """By the share of changed values: bytes of the delta ÷ a full version's, MB of model a second that are found,
    written and synced, MB a second that are applied and checked, and the seconds of both ÷ those of a full version."""
    trainer = Trainer(folder, hf_checkpoint, size)
    _, full_seconds, full_bytes = trainer.write("full", Writing())
    version, _, _ = trainer.write("v0", Writing(keep=True, scratch=str(folder)))
    copy = applying.Copy(folder / "applied", lambda text: None)
    chain = [version]
    copy.bring(chain)
    rows = {}
    for number, share in enumerate(SHARES, 1):
        trainer.step(share)
        digest = applying.identity(chain[-1].manifest)
        how = Writing(encoding=encoding, base=chain[-1].name, base_digest=digest, keep=True)
        version, wrote, written = trainer.write(f"v{number}", how)
        chain.append(version)
        start = time.perf_counter()
        copy.bring(chain)
        applied = time.perf_counter() - start
        rows[f"{100 * share:g}"] = {
            "bytes": written / full_bytes,
            "write_mb_s": size / wrote / 1e6,
            "apply_mb_s": size / applied / 1e6,
            "seconds": (wrote + applied) / full_seconds,
        }
    copy.close()
    return {"full_mb_s": size / full_seconds / 1e6, "shares": rows}
