"""Cache blocks: references, hashes and who is given up first; a random life against a plain model of it."""

import random

import pytest

from serving.block_pool import BlockPool


def hashes(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def filled(count: int, size: int) -> tuple[BlockPool, list[int]]:
    """A pool whose first `count` blocks are published under hashes 0, 1, ... and held."""
    pool = BlockPool(size)
    taken = pool.take(count)
    assert taken is not None
    for block, content in zip(taken[0], hashes(*range(count)), strict=True):
        pool.publish(block, content)
    return pool, taken[0]


def test_taking_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.take(4) is None and pool.available == 3
    assert pool.take(0) == ([], [])
    first, evicted = pool.take(2)
    assert len({*first}) == 2 and evicted == []
    assert pool.take(2) is None and pool.available == 1
    pool.check()


def test_a_released_block_stays_readable_until_it_is_needed() -> None:
    pool, blocks = filled(2, 3)
    pool.release(blocks)
    assert pool.available == 3 and pool.cached == 2
    assert [pool.find(content) for content in hashes(0, 1)] == blocks
    (blank,), evicted = pool.take(1)
    assert blank not in blocks and evicted == []  # blank blocks go first
    (_,), evicted = pool.take(1)
    assert evicted == hashes(1) and pool.find(hashes(1)[0]) is None
    assert pool.evictions == 1
    pool.check()


def test_the_end_of_a_sequence_is_given_up_first_and_the_oldest_sequence_before_it() -> None:
    pool, blocks = filled(6, 6)
    pool.release(blocks[:3])  # one sequence
    pool.release(blocks[3:])  # a later one
    _, evicted = pool.take(6)
    assert evicted == hashes(2, 1, 0, 5, 4, 3)


def test_holding_saves_a_block_and_makes_it_young() -> None:
    pool, blocks = filled(3, 3)
    pool.release(blocks)
    pool.hold(blocks[2:])
    assert pool.available == 2
    taken, evicted = pool.take(2)
    assert evicted == hashes(1, 0) and pool.take(1) is None
    pool.release(taken)
    pool.release(blocks[2:])
    pool.check()
    assert pool.cached == 1


def test_a_block_held_twice_is_free_after_the_second_release() -> None:
    pool, blocks = filled(1, 1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.available == 0
    pool.release(blocks)
    assert pool.available == 1
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(blocks)


def test_one_hash_one_block() -> None:
    pool, blocks = filled(1, 2)
    twin = pool.take(1)
    assert twin is not None
    pool.publish(twin[0][0], hashes(0)[0])  # the same content again: the first block keeps the hash
    pool.publish(blocks[0], hashes(7)[0])  # published blocks are immutable
    assert pool.find(hashes(0)[0]) == blocks[0] and pool.find(hashes(7)[0]) is None
    pool.release(twin[0])
    assert pool.available == 1 and pool.cached == 1
    pool.release(blocks)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.publish(blocks[0], hashes(8)[0])
    pool.check()


def test_withdrawing_spares_what_others_hold() -> None:
    pool, blocks = filled(3, 3)
    pool.hold(blocks[:1])
    assert pool.withdraw(blocks) == hashes(1, 2)
    assert [pool.find(content) for content in hashes(0, 1, 2)] == [blocks[0], None, None]
    pool.check()


def test_forgetting_keeps_what_is_held() -> None:
    pool, blocks = filled(3, 4)
    pool.release(blocks[1:])
    pool.forget_all()
    assert pool.cached == 0 and pool.available == 3
    pool.check()
    pool.release(blocks[:1])
    assert pool.available == 4 and pool.cached == 0
    pool.check()


@pytest.mark.parametrize("seed", range(5))
def test_any_life(seed: int) -> None:
    """References and hashes as a dictionary would keep them, after each of 500 operations."""
    chance = random.Random(seed)
    pool, references, content_of = BlockPool(8), dict.fromkeys(range(8), 0), dict[int, bytes]()
    for _ in range(500):
        held = [block for block, count in references.items() if count]
        action = chance.random()
        if action < 0.4:
            count = chance.randint(0, 4)
            result = pool.take(count)
            assert (result is None) == (count > len(references) - len(held))
            for block in result[0] if result else ():
                assert references[block] == 0
                references[block] = 1
                content_of.pop(block, None)
        elif action < 0.6 and held:
            block, content = chance.choice(held), bytes([chance.randrange(12)])
            pool.publish(block, content)
            if block not in content_of and content not in content_of.values():
                content_of[block] = content
        elif action < 0.7 and content_of:
            block = chance.choice(list(content_of))
            pool.hold([block])
            references[block] += 1
        elif held:
            block = chance.choice(held)
            pool.release([block])
            references[block] -= 1
        pool.check()
        assert {block: pool.find(content) for block, content in content_of.items()} == {
            b: b for b in content_of
        }
        assert pool.cached == len(content_of)
        assert pool.available == sum(count == 0 for count in references.values())
