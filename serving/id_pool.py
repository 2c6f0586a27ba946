"""Numbered places handed out one owner at a time: cache blocks, state slots, request slots."""

import numpy as np


class IdPool:
    """The ids [0, size), each free or taken. Handing out is all or nothing; freeing twice is an error.

    The id freed last is handed out first: its memory is the likeliest to be warm, and a stale read shows at
    once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = np.arange(size - 1, -1, -1, dtype=np.int32)  # a stack, its top at `_count`
        self._count = size
        self._taken = np.zeros(size, bool)

    @property
    def available(self) -> int:
        return self._count

    def take(self, count: int) -> np.ndarray | None:
        """`[count]` int32 ids, or None (and no change) if fewer are free."""
        if count > self._count:
            return None
        ids = self._free[self._count - count : self._count][::-1].copy()
        self._count -= count
        self._taken[ids] = True
        return ids

    def give_back(self, ids: np.ndarray) -> None:
        if not self._taken[ids].all() or len(np.unique(ids)) != len(ids):
            raise AssertionError(f"ids given back that were not taken: {ids.tolist()}")
        self._taken[ids] = False
        self._free[self._count : self._count + len(ids)] = ids[::-1]
        self._count += len(ids)
