"""State slots: running states, rolling snapshots and the snapshots that prefix hits resume from."""

from collections import OrderedDict

from serving.block_hash import BlockHash


class StatePool:
    """The ids [0, size). A slot is owned by a request (or a transfer), cached under a prefix hash, or blank.

    Cached snapshots are given up when a slot is needed: regular ones (on the spacing) before those at the end
    of a prompt or an answer or at a branch, each kind least recently used first. The device runs steps in
    order, so a slot that a dispatched step reads may be handed out for a later one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._blank = list(range(size - 1, -1, -1))
        self._owned: set[int] = set()
        self._regular: OrderedDict[BlockHash, int] = OrderedDict()
        self._kept: OrderedDict[BlockHash, int] = OrderedDict()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Slots that can be handed out."""
        return self.size - len(self._owned)

    @property
    def cached(self) -> int:
        return len(self._regular) + len(self._kept)

    def take(self) -> int | None:
        """A slot owned by the caller; None if every slot is owned."""
        if self._blank:
            slot = self._blank.pop()
        else:
            pool = self._regular or self._kept
            if not pool:
                return None
            _, slot = pool.popitem(last=False)
            self.evictions += 1
        self._owned.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        if slot not in self._owned:
            raise AssertionError(f"state slot {slot} given back while nobody owns it")
        self._owned.remove(slot)
        self._blank.append(slot)

    def publish(self, slot: int, prefix: BlockHash, *, regular: bool) -> None:
        """Turns an owned slot into the snapshot of a prefix; a prefix that has one keeps it, and the slot is
        blank again."""
        if prefix in self._kept or (regular and prefix in self._regular):
            self.find(prefix)
            self.give_back(slot)
            return
        if slot not in self._owned:
            raise AssertionError(f"state slot {slot} published while nobody owns it")
        self._owned.remove(slot)
        displaced = self._regular.pop(prefix, None)
        if displaced is not None:
            self._blank.append(displaced)
        (self._regular if regular else self._kept)[prefix] = slot

    def has(self, prefix: BlockHash) -> bool:
        return prefix in self._kept or prefix in self._regular

    def find(self, prefix: BlockHash) -> int | None:
        """The slot of a prefix's snapshot, which becomes the most recently used."""
        for pool in (self._kept, self._regular):
            if prefix in pool:
                pool.move_to_end(prefix)
                return pool[prefix]
        return None

    def drop(self, prefix: BlockHash) -> None:
        """Gives up a prefix's snapshot, if there is one: its blocks are gone."""
        for pool in (self._kept, self._regular):
            slot = pool.pop(prefix, None)
            if slot is not None:
                self._blank.append(slot)

    def forget_all(self) -> None:
        for pool in (self._kept, self._regular):
            self._blank.extend(pool.values())
            pool.clear()

    def check(self) -> None:
        """AssertionError unless every slot is in exactly one place."""
        everywhere = [*self._blank, *self._owned, *self._regular.values(), *self._kept.values()]
        assert sorted(everywhere) == list(range(self.size))
        assert not self._regular.keys() & self._kept.keys()
