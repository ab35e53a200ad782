"""A version's tensors, read against their sums. Torch-free."""

import hashlib
from collections.abc import Iterator

from slime_cli.errors import DataError
from slime_cli.weights.transport import Version


def checked(version: Version, tensor: str) -> Iterator[bytes]:
    """The tensor's bytes, a chunk at a time. Raises DataError behind the last one when they are not what was published.
    A tensor that is made of others has no sum of its own."""
    published = version.manifest.tensors[tensor].checksum
    found = hashlib.sha256()
    for chunk in version.chunks(tensor):
        if published:
            found.update(chunk)
        yield chunk
    if published and shortened(found) != published:
        raise DataError(
            f"{version.name}: {tensor} is not what was published, its bytes have changed since",
            "publish the version again",
        )


def shortened(hashed: "hashlib._Hash") -> str:
    """As manifests and the engines' weight checker write a sum: its first 8 bytes in hex."""
    return hashed.digest()[:8].hex()
