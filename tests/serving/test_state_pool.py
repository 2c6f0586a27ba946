"""State slots: owners, snapshots and who is given up first."""

import random

import pytest

from serving.state_pool import StatePool

A, B, C, D = (bytes([number]) for number in range(4))


def with_snapshots(size: int, *kept: bytes, regular: tuple[bytes, ...] = ()) -> StatePool:
    """Snapshots in the order given, regular ones after the others."""
    pool = StatePool(size)
    for prefix in (*kept, *regular):
        slot = pool.take()
        assert slot is not None
        pool.publish(slot, prefix, regular=prefix in regular)
    return pool


def test_slots_have_one_owner() -> None:
    pool = StatePool(2)
    first, second = pool.take(), pool.take()
    assert {first, second} == {0, 1} and pool.take() is None and pool.available == 0
    pool.give_back(0)
    with pytest.raises(AssertionError, match="slot 0 given back"):
        pool.give_back(0)
    with pytest.raises(AssertionError, match="slot 0 published"):
        pool.publish(0, A, regular=True)
    assert pool.take() == 0
    pool.check()


def test_regular_snapshots_are_given_up_first_and_the_oldest_of_a_kind() -> None:
    pool = with_snapshots(4, A, B, regular=(C, D))
    assert pool.available == 4 and pool.cached == 4
    gone = []
    for _ in range(4):
        before = {p for p in (A, B, C, D) if pool.has(p)}
        assert pool.take() is not None
        gone += before - {p for p in (A, B, C, D) if pool.has(p)}
    assert gone == [C, D, A, B] and pool.evictions == 4
    assert pool.take() is None


def test_a_hit_makes_a_snapshot_young() -> None:
    pool = with_snapshots(3, A, B, C)
    assert pool.find(A) is not None
    pool.take()
    assert (pool.has(A), pool.has(B)) == (True, False)
    assert pool.find(B) is None
    pool.check()


def test_blank_slots_go_before_snapshots() -> None:
    pool = with_snapshots(2, A)
    pool.take()
    assert pool.has(A) and pool.evictions == 0


def test_one_snapshot_a_prefix() -> None:
    """A second one is given back; one that is kept for good reason displaces a regular one."""
    pool = with_snapshots(3, A, regular=(B,))
    for prefix, regular in ((A, False), (A, True), (B, True)):
        before = pool.find(prefix)
        slot = pool.take()
        assert slot is not None
        pool.publish(slot, prefix, regular=regular)
        assert pool.find(prefix) == before and pool.available == 3 and pool.cached == 2
        pool.check()
    slot = pool.take()
    assert slot is not None
    pool.publish(slot, B, regular=False)
    assert pool.find(B) == slot and pool.cached == 2
    pool.check()
    # both are of the lasting kind now, so the one used least recently goes
    pool.find(A)
    pool.take()
    pool.take()
    assert (pool.has(A), pool.has(B)) == (True, False)


def test_dropping_and_forgetting() -> None:
    pool = with_snapshots(4, A, regular=(B, C))
    pool.drop(B)
    pool.drop(B)
    assert not pool.has(B) and pool.cached == 2
    pool.check()
    owned = pool.take()
    pool.forget_all()
    assert pool.cached == 0 and pool.available == 3
    assert owned is not None
    pool.give_back(owned)
    pool.check()


@pytest.mark.parametrize("seed", range(5))
def test_any_life(seed: int) -> None:
    """Every slot in exactly one place, and every prefix known until it is dropped or evicted."""
    chance = random.Random(seed)
    pool, owned, evictions = StatePool(6), set[int](), 0
    known: set[bytes] = set()
    for _ in range(500):
        action = chance.random()
        prefix = bytes([chance.randrange(10)])
        if action < 0.4:
            slot = pool.take()
            assert (slot is None) == (len(owned) == 6)
            if slot is not None:
                assert slot not in owned
                owned.add(slot)
            lost = {p for p in known if not pool.has(p)}
            assert len(lost) == pool.evictions - evictions <= 1
            evictions, known = pool.evictions, known - lost
        elif action < 0.6 and owned:
            slot = owned.pop()
            pool.publish(slot, prefix, regular=chance.random() < 0.5)
            known.add(prefix)
        elif action < 0.7 and owned:
            pool.give_back(owned.pop())
        elif action < 0.8:
            pool.drop(prefix)
            known.discard(prefix)
        else:
            assert (pool.find(prefix) is not None) == (prefix in known)
        pool.check()
        assert pool._owned == owned and pool.available == 6 - len(owned)
        assert pool.cached == len(known)
