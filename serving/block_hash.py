"""Content hashes of cache blocks: a chain, so that a block's hash names everything before it too."""

import hashlib
from collections.abc import Iterator

import numpy as np

BlockHash = bytes
DIGEST_BYTES = 16  # 128 bits: a collision among 2**40 blocks has probability 2**-49


def root_hash(fingerprint: str, salt: str = "") -> BlockHash:
    """The chain's start: what must be equal besides tokens for a cached block to serve a request.

    fingerprint: model, cache dtypes and layout; salt: the request's `cache_salt`. A keyed real hash: equal in
    every process, whatever PYTHONHASHSEED is.
    """
    parts = (len(fingerprint).to_bytes(8, "little"), fingerprint.encode(), salt.encode())
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def next_hash(previous: BlockHash, tokens: np.ndarray) -> BlockHash:
    """Hash of the block holding `tokens` ([block_size] int32) behind the block hashed `previous`."""
    return hashlib.blake2b(
        np.ascontiguousarray(tokens, np.int32).tobytes(), key=previous, digest_size=DIGEST_BYTES
    ).digest()


def chain(previous: BlockHash, tokens: np.ndarray, block_size: int) -> Iterator[BlockHash]:
    """Hashes of the full blocks of `tokens` in order; a last partial block has none."""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        previous = next_hash(previous, tokens[start : start + block_size])
        yield previous
