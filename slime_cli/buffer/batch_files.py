"""A batch's Parquet file: ``rollouts/NNNNNN/samples.parquet``, which anything that reads Parquet can read.

Written once by :mod:`slime_cli.buffer.batch`, and read again by a resumed run that trains the batch again.
"""

import io
import json
import os

from slime_cli.buffer.types import Sample


def to_parquet(samples: list[Sample]) -> bytes:
    """One row a sample, siblings too; nested fields as lists, free-form ones (reward, metadata, prompt) as JSON
    text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [s.to_dict() for s in samples]
    for row in rows:
        for name in ("reward", "metadata", "prompt"):
            row[name] = json.dumps(row[name])
        row["spans"] = [span._asdict() for span in row["spans"]]
    schema = pa.schema(
        [
            ("index", pa.int64()),
            ("group_index", pa.int64()),
            ("rollout_id", pa.int64()),
            ("part", pa.int64()),
            ("status", pa.string()),
            ("prompt", pa.string()),
            ("response", pa.string()),
            ("label", pa.string()),
            ("reward", pa.string()),
            ("tokens", pa.list_(pa.int64())),
            ("response_length", pa.int64()),
            ("loss_mask", pa.list_(pa.int8())),
            ("rollout_log_probs", pa.list_(pa.float32())),
            ("teacher_log_probs", pa.list_(pa.float32())),
            ("weight_versions", pa.list_(pa.string())),
            ("spans", pa.list_(pa.struct([("length", pa.int32()), ("version", pa.string())]))),
            ("rollout_top_p_token_ids", pa.list_(pa.int32())),
            ("rollout_top_p_token_offsets", pa.list_(pa.int32())),
            ("remove_sample", pa.bool_()),
            ("metadata", pa.string()),
            ("rollout_routed_experts", pa.binary()),
            ("routed_experts_shape", pa.list_(pa.int32())),
        ]
    )
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), out, compression="zstd")
    return out.getvalue()


def read_parquet(path: str | os.PathLike) -> list[Sample]:
    """Inverse of :func:`to_parquet`; older files have no ``part`` (no siblings) or no ``spans`` (not known)."""
    import pyarrow.parquet as pq

    samples = []
    for row in pq.read_table(path).to_pylist():
        for name in ("reward", "metadata", "prompt"):
            row[name] = json.loads(row[name])
        row["spans"] = [span.values() for span in row.get("spans") or ()]
        samples.append(Sample.from_dict(row))
    return samples
