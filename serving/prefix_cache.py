"""Prefix caching over a recurrent hybrid: which boundary a request resumes at, and what becomes readable.

A hit ends at one block boundary at which every leg exists: the blocks below it (latents and pooled index keys
of every MLA layer, the MTP layer's included) and a snapshot of all KDA states exactly there. A missing leg
makes the hit shorter, never partial.

Everything is published when the step that computes it is dispatched (or when decode's outcome is read):
the device runs steps in order, so whatever is dispatched later reads finished content.
"""

import dataclasses

from serving.block_hash import BlockHash, next_hash
from serving.block_pool import BlockPool
from serving.request import Answer
from serving.state_pool import StatePool


@dataclasses.dataclass(frozen=True)
class Match:
    """The best resume point: `blocks` lie below `boundary`.

    `chained`: tokens whose blocks are cached, which may reach past the last snapshot.
    """

    boundary: int
    blocks: tuple[int, ...]
    state_slot: int
    chained: int


NO_MATCH = Match(0, (), -1, 0)


class PrefixCache:
    def __init__(self, blocks: BlockPool, states: StatePool, block_size: int, *, spacing: int) -> None:
        """`spacing`: tokens between regular snapshots, a multiple of block_size."""
        self.blocks = blocks
        self.states = states
        self.block_size = block_size
        self.spacing = spacing

    def hashes(self, answer: Answer, count: int) -> list[BlockHash]:
        """Hashes of the answer's first `count` blocks, all of whose tokens are known."""
        size = self.block_size
        chain = answer.hashes
        while len(chain) < count:
            start = len(chain) * size
            previous = chain[-1] if chain else answer.request.root
            chain.append(next_hash(previous, answer.tokens(start, start + size)))
        return chain[:count]

    def match(self, answer: Answer) -> Match:
        """The deepest boundary to resume at: at most the last known token's position, decided before any
        rounding, because that token must be run to draw the next."""
        chain = self.hashes(answer, (answer.known_tokens - 1) // self.block_size)
        blocks: list[int] = []
        for content in chain:
            block = self.blocks.find(content)
            if block is None:
                break
            blocks.append(block)
        for depth in range(len(blocks), 0, -1):
            if self.states.has(chain[depth - 1]):
                slot = self.states.find(chain[depth - 1])
                assert slot is not None
                return Match(
                    depth * self.block_size, tuple(blocks[:depth]), slot, len(blocks) * self.block_size
                )
        return Match(0, (), -1, len(blocks) * self.block_size)

    def snapshot_boundaries(self, start: int, target: int, match: Match) -> tuple[tuple[int, bool], ...]:
        """Boundaries in (start, target] whose state a prefill keeps, ascending; True marks regular ones.

        Those on the spacing, the deepest at most target - 1 and target itself (where the next turn of a chat
        resumes), and the point where this prompt left a cached one.
        """
        regular = range((start // self.spacing + 1) * self.spacing, target + 1, self.spacing)
        deepest = (target - 1) // self.block_size * self.block_size
        special = {deepest, match.chained}
        if target % self.block_size == 0:
            special.add(target)
        wanted = dict.fromkeys(regular, True) | dict.fromkeys(special, False)
        return tuple(sorted((b, r) for b, r in wanted.items() if b > start))

    def publish_blocks(self, answer: Answer, complete: int) -> None:
        """Makes the answer's blocks below `complete` tokens readable."""
        placement = answer.placement
        assert placement is not None
        count = min(complete // self.block_size, len(placement.blocks))
        chain = self.hashes(answer, count)
        for index in range(placement.published, count):
            self.blocks.publish(placement.blocks[index], chain[index])
        placement.published = max(placement.published, count)

    def publish_state(self, answer: Answer, boundary: int, slot: int, *, regular: bool) -> None:
        """Turns a slot the caller owns into the snapshot of the answer's first `boundary` tokens."""
        content = self.hashes(answer, boundary // self.block_size)[-1]
        self.states.publish(slot, content, regular=regular)

    def withdraw(self, answer: Answer) -> None:
        """Makes the answer's own blocks and snapshots unreadable: what it computed cannot be trusted."""
        placement = answer.placement
        assert placement is not None
        for content in self.blocks.withdraw(placement.blocks):
            self.states.drop(content)

    def take_blocks(self, count: int) -> list[int] | None:
        """New blocks; snapshots of evicted ones are given up, since no chain leads to them any more."""
        result = self.blocks.take(count)
        if result is None:
            return None
        taken, evicted = result
        for content in evicted:
            self.states.drop(content)
        return taken
