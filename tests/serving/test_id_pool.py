"""Places handed out one owner at a time."""

import numpy as np
import pytest

from serving.id_pool import IdPool


def test_all_or_nothing_and_the_last_one_freed_comes_first() -> None:
    pool = IdPool(4)
    assert pool.take(5) is None and pool.available == 4
    first = pool.take(3)
    assert first is not None and first.tolist() == [0, 1, 2] and first.dtype == np.int32
    assert pool.take(2) is None and pool.available == 1
    pool.give_back(first[1:2])
    again = pool.take(1)
    assert again is not None and again.tolist() == [1]
    rest = pool.take(1)
    assert rest is not None and rest.tolist() == [3] and pool.available == 0


def test_what_is_handed_out_is_the_callers() -> None:
    """Writing to the array that was returned leaves the pool alone."""
    pool = IdPool(2)
    ids = pool.take(2)
    assert ids is not None
    kept = ids.copy()
    ids[:] = 0
    pool.give_back(kept)
    again = pool.take(2)
    assert again is not None and again.tolist() == [0, 1]


@pytest.mark.parametrize("ids", [[2], [0, 0]])
def test_freeing_what_is_not_taken_is_an_error(ids: list[int]) -> None:
    pool = IdPool(3)
    pool.take(1)
    with pytest.raises(AssertionError, match="not taken"):
        pool.give_back(np.array(ids, np.int32))
    assert pool.available == 2
