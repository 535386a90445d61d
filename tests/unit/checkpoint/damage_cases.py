"""Files of a checkpoint, forged: what checksums and digests vouch for, but nobody wrote."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import xxhash

from elasticzero.checkpoint.format.checksums import BlockSums, parse_sums
from elasticzero.checkpoint.format.names import MANIFEST_NAME, SUMS_SUFFIX


def signed(value: Any) -> bytes:
    """The JSON text of `value` with a digest that is right."""
    if not isinstance(value, dict):
        return json.dumps(value).encode()
    fields = {key: item for key, item in value.items() if key != "digest"}
    return sign(json.dumps(fields, separators=(",", ":")).encode())


def sign(text: bytes) -> bytes:
    """A JSON object with a digest that is right as its last key."""
    text = text.rstrip()[:-1]
    return text + b',"digest":"%s"}\n' % xxhash.xxh3_128_hexdigest(text).encode()


def forge_shard(step: Path, rank: int, data: bytes) -> str:
    """Put `data` in the place of a rank's shard, with checksums and a manifest that vouch for it;
    the shard's name."""
    manifest = json.loads((step / MANIFEST_NAME).read_bytes())
    file = manifest["files"][rank]
    old = parse_sums((step / (file["name"] + SUMS_SUFFIX)).read_bytes(), "forged")
    sums = BlockSums()
    assert sum(len(chunk) for chunk in sums.watch([data])) == len(data)
    contents, _ = sums.finish(file["name"], old.layout_digest)
    file |= {"bytes": len(data), "digest": xxhash.xxh3_128_hexdigest(contents)}
    (step / file["name"]).write_bytes(data)
    (step / (file["name"] + SUMS_SUFFIX)).write_bytes(contents)
    (step / MANIFEST_NAME).write_bytes(signed(manifest))
    return str(file["name"])


def header_of(shard: bytes) -> tuple[dict[str, Any], bytes]:
    """(the table, the tensors' bytes) of a safetensors file."""
    (length,) = struct.unpack_from("<Q", shard)
    return json.loads(shard[8 : 8 + length]), shard[8 + length :]


def with_header(text: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + data
