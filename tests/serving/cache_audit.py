"""Whether everything an engine would let a request read is on the fake device, whole and right."""

from collections.abc import Iterable

import numpy as np

from serving.block_hash import BlockHash, chain
from serving.engine import Engine
from tests.serving.fake_device import FakeDevice


def audit(made: Engine, device: FakeDevice, roots: Iterable[BlockHash]) -> None:
    """AssertionError unless each cached block and snapshot holds the tokens that its hash names.

    `roots`: of the requests that ran (`request.root`). Between steps only: a plan publishes before it is run.
    """
    roots, size = set(roots), device.block_size
    for content, block in made._cache.blocks._block_of.items():
        for leg in (device.target, device.mtp):
            rows = [leg[block, offset] for offset in range(size)]
            whole = rows[-1]
            assert content in _names(roots, whole, size), f"block {block} holds other tokens than its hash"
            assert all(row == whole[: len(whole) - size + 1 + i] for i, row in enumerate(rows))
    states = made._cache.states
    for content, slot in (*states._kept.items(), *states._regular.items()):
        held = device.states[slot]
        assert content in _names(roots, held, size), f"state slot {slot} holds another prefix than its hash"


def published_boundaries(made: Engine, device: FakeDevice) -> list[tuple[int, ...]]:
    """The prefixes that have a snapshot, shortest first."""
    states = made._cache.states
    slots = (*states._kept.values(), *states._regular.values())
    return sorted((device.states[slot] for slot in slots), key=len)


def _names(roots: Iterable[BlockHash], tokens: tuple[int, ...], size: int) -> set[BlockHash]:
    assert len(tokens) % size == 0, f"{len(tokens)} tokens end on no boundary"
    row = np.array(tokens, np.int32)
    return {list(chain(root, row, size))[-1] for root in roots}
