"""Cache blocks: reference counts, content hashes and the order in which unused ones are given up."""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from serving.block_hash import BlockHash


class BlockPool:
    """The ids [0, size). A block is held by requests and transfers (references) or free.

    A free block may still be cached: its content stays readable under its hash until the block is needed,
    least recently used first. Blocks without content are handed out before cached ones. Published blocks are
    immutable: whoever holds one reads it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = np.zeros(size, np.int32)
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._blank = list(range(size - 1, -1, -1))  # a stack: the block freed last is handed out first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and cached, least recently used first
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that can be handed out."""
        return len(self._blank) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks readable under a hash, held or not."""
        return len(self._block_of)

    def take(self, count: int) -> tuple[list[int], list[BlockHash]] | None:
        """`count` blocks held once each, and the hashes that were evicted for them; None (and no change) if
        fewer are available."""
        if count > self.available:
            return None
        taken, evicted = [], []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                evicted.append(self._forget(block))
                self.evictions += 1
            self._references[block] = 1
            taken.append(block)
        return taken, evicted

    def hold(self, blocks: Iterable[int]) -> None:
        """Adds a reference to cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drops a reference of each block. Given in a sequence's order, the deepest block is evicted first: a
        prefix outlives what follows it."""
        for block in reversed(list(blocks)):
            if self._references[block] <= 0:
                raise AssertionError(f"block {block} released more often than held")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def publish(self, block: int, content: BlockHash) -> None:
        """Makes a held block readable under its content's hash, unless an equal block already is."""
        if self._references[block] <= 0:
            raise AssertionError(f"block {block} published while nobody holds it")
        if content not in self._block_of and block not in self._hash_of:
            self._block_of[content] = block
            self._hash_of[block] = content

    def withdraw(self, blocks: Iterable[int]) -> list[BlockHash]:
        """Drops the hashes of held blocks that nobody else holds; returns them."""
        alone = [b for b in blocks if b in self._hash_of and self._references[b] == 1]
        return [self._forget(block) for block in alone]

    def find(self, content: BlockHash) -> int | None:
        return self._block_of.get(content)

    def forget_all(self) -> None:
        """Drops every hash; held blocks stay held."""
        self._hash_of.clear()
        self._block_of.clear()
        self._blank.extend(reversed(self._cached))
        self._cached.clear()

    def check(self) -> None:
        """AssertionError unless every block is in exactly one place."""
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free)
        assert (self._references >= 0).all()
        assert set(free) == set(np.flatnonzero(self._references == 0).tolist())
        assert {block: content for content, block in self._block_of.items()} == self._hash_of
        assert set(self._cached) == {b for b in self._hash_of if self._references[b] == 0}

    def _forget(self, block: int) -> BlockHash:
        content = self._hash_of.pop(block)
        del self._block_of[content]
        return content
