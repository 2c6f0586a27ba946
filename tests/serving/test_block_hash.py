"""Content hashes: they name everything that a block's content depends on, in every process alike."""

import os
import subprocess
import sys

import numpy as np

from serving.block_hash import DIGEST_BYTES, chain, next_hash, root_hash

TOKENS = np.arange(12, dtype=np.int32)


def hashes(
    tokens: np.ndarray = TOKENS, fingerprint: str = "model", salt: str = "", size: int = 4
) -> list[bytes]:
    return list(chain(root_hash(fingerprint, salt), tokens, size))


def test_full_blocks_only() -> None:
    assert [len(hashes(TOKENS[:n])) for n in (0, 3, 4, 11, 12)] == [0, 0, 1, 2, 3]
    assert all(len(content) == DIGEST_BYTES for content in hashes())
    assert hashes(TOKENS[:8]) == hashes()[:2]


def test_a_hash_names_all_that_came_before() -> None:
    for position in range(12):
        changed = TOKENS.copy()
        changed[position] += 1
        same = [a == b for a, b in zip(hashes(), hashes(changed), strict=True)]
        assert same == [block < position // 4 for block in range(3)]


def test_equal_blocks_at_different_places_differ() -> None:
    assert len(set(hashes(np.zeros(12, np.int32)))) == 3


def test_model_salt_and_block_size_count() -> None:
    roots = {root_hash("model"), root_hash("model", "a"), root_hash("modela"), root_hash("mode", "la")}
    assert len(roots) == 4  # what belongs to the fingerprint never passes for salt
    assert hashes()[0] not in hashes(size=2)


def test_token_values_count_and_not_their_dtype_or_layout() -> None:
    root = root_hash("model")
    expected = next_hash(root, TOKENS[:4])
    assert next_hash(root, TOKENS[:4].astype(np.int64)) == expected
    assert next_hash(root, np.stack([TOKENS, TOKENS], 1)[:4, 0]) == expected
    assert next_hash(root, TOKENS[:4][::-1]) != expected
    assert next_hash(root, TOKENS[:4] + 2**16) != expected


def test_every_process_agrees() -> None:
    program = (
        "import numpy as np; from serving.block_hash import chain, root_hash;"
        "print([h.hex() for h in chain(root_hash('model'), np.arange(12, dtype=np.int32), 4)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str([content.hex() for content in hashes()])
