"""``--save-debug-train-data``: a rollout's file of what it is trained on, one row a sample, for a look from outside.

Written by :mod:`slime_cli.training.preparation` on one rank, before the first step, over the whole batch: whatever the
layout and the packing, the file is the same.
"""

import io
import pathlib
from collections.abc import Mapping

import numpy as np

from slime_cli import disk, manifests
from slime_cli.buffer.columns import TrainBatch


def write(template: str, rollout_id: int, batch: TrainBatch, columns_R: Mapping[str, np.ndarray | None]) -> None:
    """``columns_R``: by name, one number for each response token, 0 where it is masked; None for what there is not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def lists(values: np.ndarray, lengths_N: np.ndarray) -> pa.Array:
        ends_N = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(ends_N), pa.array(values))

    table = {
        "index": pa.array(batch.sample_index_N),
        "group_index": pa.array(batch.group_index_N),
        "reward": pa.array(batch.rewards_N),
        "truncated": pa.array(batch.truncated_N),
        "tokens": lists(batch.tokens_T, batch.lengths_N),
        "response_length": pa.array(batch.response_lengths_N),
        "loss_mask": lists(batch.loss_mask_R, batch.response_lengths_N),
    }
    table |= {name: lists(c_R, batch.response_lengths_N) for name, c_R in columns_R.items() if c_R is not None}
    out = io.BytesIO()
    pq.write_table(pa.table(table), out, compression="zstd")
    path = pathlib.Path(template.format(rollout_id=rollout_id)).expanduser()
    with disk.naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        manifests.write_bytes(path, out.getvalue())
