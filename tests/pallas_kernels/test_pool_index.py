"""The k-pool indexer's XLA reference against numpy in float64: ties, counts, tails, the ring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pool_index as op
from tests.pallas_kernels import sparse_oracles as oracle
from tests.pallas_kernels.pool_replay import Batch, Replay

FLOAT32_TOLERANCE = 2e-6  # relative to the largest value: a few dozen float32 operations


def close(actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=FLOAT32_TOLERANCE * max(1, abs(expected).max()))


@pytest.mark.parametrize("kpool", [4, 16])
def test_pool_keys(kpool: int):
    random = np.random.default_rng(kpool)
    keys, gates = random.normal(size=(2, 5, 3, kpool, 32)).astype(np.float32)
    gates *= 20  # a saturated softmax as well as a flat one
    ape = random.normal(size=(kpool, 32)).astype(np.float32)
    pooled = np.asarray(op.pool_keys(jnp.asarray(keys), jnp.asarray(gates), jnp.asarray(ape)))
    for i in range(5):
        for j in range(3):
            close(pooled[i, j], oracle.pool_key(keys[i, j], gates[i, j], ape))


def test_pool_keys_rounds_once_at_the_end():
    random = np.random.default_rng(0)
    keys, gates, ape = (jnp.asarray(random.normal(size=(4, 64)), jnp.bfloat16) for _ in range(3))
    expected = oracle.pool_key(*(np.asarray(x.astype(jnp.float32)) for x in (keys, gates, ape)))
    pooled = op.pool_keys(keys, gates, ape)
    assert pooled.dtype == jnp.bfloat16
    # At most one unit in the last of bfloat16's 8 significant bits from the true value.
    np.testing.assert_allclose(pooled.astype(jnp.float32), expected, rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_scores(batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    random = np.random.default_rng(1)
    q = random.normal(size=(*batch, 11, 4, 16)).astype(np.float32)
    head_weights = random.normal(size=(*batch, 11, 4)).astype(np.float32)
    pooled = random.normal(size=(*batch, 9, 16)).astype(np.float32)
    whole = np.asarray(op.score_pools(*map(jnp.asarray, (q, head_weights, pooled))))
    for i in np.ndindex(batch):
        close(whole[i], oracle.scores(q[i], head_weights[i], pooled[i]))
    monkeypatch.setattr(op, "_TILE_BYTES", 4 * 4 * 9 * 4)
    close(op.score_pools(*map(jnp.asarray, (q, head_weights, pooled))), whole)


def test_scores_have_no_negative_zero():
    q = -jnp.ones((2, 3, 8))
    scores = op.score_pools(q, -jnp.ones((2, 3)), jnp.ones((5, 8)))
    assert not np.asarray(scores).any() and not np.signbit(scores).any()


def tied_scores(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Few distinct values, half of them zeros of either sign."""
    scores = random.integers(-3, 4, size=shape).astype(np.float32)
    return np.where(random.random(shape) < 0.5, random.choice([0.0, -0.0], size=shape), scores).astype(
        np.float32
    )


@pytest.mark.parametrize("k", [1, 4, 7, 40])
@pytest.mark.parametrize("pools", [1, 5, 33])
def test_selection_breaks_ties_to_the_lowest(pools: int, k: int):
    random = np.random.default_rng(100 * pools + k)
    scores = tied_scores(random, (pools + 1, pools))
    counts = np.arange(pools + 1).astype(np.int32)
    scores[np.arange(pools) >= counts[:, None]] = np.nan
    ids = op.select_pools(jnp.asarray(scores), jnp.asarray(counts), k)
    expected = [oracle.select(scores[t], counts[t], k) for t in range(pools + 1)]
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, expected)


def test_selection_in_batches_and_of_nothing():
    random = np.random.default_rng(5)
    scores, counts = tied_scores(random, (2, 3, 12)), random.integers(0, 13, size=(2, 3)).astype(np.int32)
    ids = op.select_pools(jnp.asarray(scores), jnp.asarray(counts), 5)
    for i in np.ndindex(2, 3):
        assert ids[i].tolist() == oracle.select(scores[i], counts[i], 5)
    assert op.select_pools(jnp.zeros((2, 0)), jnp.zeros(2, jnp.int32), 3).tolist() == [[-1] * 3] * 2


def paged_problem(seed: int, tokens: int, *, heads: int = 4, dim: int = 16, pools_per_block: int = 4):
    """Three rows with shuffled blocks at the top of the pool, NaN in all that no token may see."""
    random = np.random.default_rng(seed)
    q = np.round(random.normal(size=(tokens, heads, dim)), 1).astype(np.float32)
    q[::3] = -abs(q[::3])  # with keys made positive below, all scores of these queries are exact zeros
    head_weights = random.normal(size=(tokens, heads)).astype(np.float32)
    lengths = [5 * pools_per_block, 2, 0]
    tables = np.full((3, 6), -1, np.int32)
    owned = random.permutation(np.arange(8, 20))
    tables[0, :5], tables[1, :1] = owned[:5], owned[5:6]
    pooled = np.full((2, 20, pools_per_block, dim), np.nan, np.float32)
    for row, length in enumerate(lengths):
        for pool in range(length):
            block = tables[row, pool // pools_per_block]
            pooled[1, block, pool % pools_per_block] = abs(random.integers(1, 4, size=dim))
    row_of_token = random.integers(-1, 3, size=tokens).astype(np.int32)
    counts = np.array([random.integers(0, lengths[r] + 1) if r >= 0 else 3 for r in row_of_token], np.int32)
    return q, head_weights, pooled, tables, row_of_token, counts


@pytest.mark.parametrize(("tokens", "k"), [(1, 3), (24, 6), (24, 40)])
def test_paged_selection(tokens: int, k: int, monkeypatch: pytest.MonkeyPatch):
    q, head_weights, pooled, tables, row_of_token, counts = paged_problem(tokens, tokens)
    inputs = [jnp.asarray(x) for x in (tables, row_of_token, counts)]

    def run(layer):
        return op.select_paged(
            jnp.asarray(q), jnp.asarray(head_weights), jnp.asarray(pooled), layer, *inputs, k
        )

    expected = np.full((tokens, k), -1)
    for t, row in enumerate(row_of_token):
        keys = pooled[1, tables[row]].reshape(-1, q.shape[-1])[: counts[t]]
        if row >= 0 and counts[t]:
            # Small integers and tenths: equal pools score equally, others differ by far more than rounding.
            scores = oracle.scores(q[t : t + 1], head_weights[t : t + 1], keys)[0].astype(np.float32)
            expected[t] = oracle.select(scores, counts[t], k)
    np.testing.assert_array_equal(jax.jit(run)(1), expected)
    monkeypatch.setattr(op, "_TILE_BYTES", 5 * 24 * (4 + 16) * 4)
    np.testing.assert_array_equal(run(1), expected)


@pytest.mark.parametrize("kpool", [4, 16])
def test_short_contexts_select_everything(kpool: int):
    """Up to topk tokens and the tail, the selected tokens are exactly 0..position (PITFALLS B03)."""
    topk = 4 * kpool
    for position in range(topk + kpool - 1):
        count = (position + 1) // kpool
        ids = op.select_pools(jnp.zeros((1, 8)), jnp.array([count]), topk // kpool)
        tokens = op.expand_pools(ids, jnp.array([position]), kpool)
        assert tokens.shape == (1, topk + kpool - 1)
        assert sorted(t for t in tokens[0].tolist() if t >= 0) == list(range(position + 1))


def test_expansion():
    ids = np.array([[[0, 3, -1], [-1, -1, -1], [2, 5, 6]]], np.int32)
    positions = np.array([[17, 2, 31]], np.int32)
    tokens = op.expand_pools(jnp.asarray(ids), jnp.asarray(positions), 4)
    assert tokens.shape == (1, 3, 15) and tokens.dtype == jnp.int32
    for i in range(3):
        assert [t for t in tokens[0, i].tolist() if t >= 0] == oracle.member_tokens(
            ids[0, i], positions[0, i], 4
        )
    assert op.expand_pools(jnp.full((1, 2), -1), jnp.array([-1]), 4).tolist() == [[-1] * 11]


def test_physical_rows():
    tables = jnp.array([[7, 2, -1], [5, -1, -1]])
    tokens = jnp.array([[0, 9, 16, -1], [8, 7, 24, 1000], [3, 4, -1, 0]])
    rows = op.physical_rows(tokens, jnp.array([0, 1, -1]), tables, 8)
    assert rows.tolist() == [[56, 17, -1, -1], [-1, 47, -1, -1], [-1] * 4]


@pytest.mark.parametrize(
    ("kpool", "ring_rows", "pools_per_block"), [(4, 4, 4), (4, 16, 16), (16, 16, 1), (16, 32, 2)]
)
def test_pools_written_by_any_cutting_of_a_prompt(kpool: int, ring_rows: int, pools_per_block: int):
    """Pools straddle batches, rows share a batch, padding sits between: pools equal the whole prompt's."""
    replay = Replay(
        kpool, ring_rows, pools_per_block, lengths=(5 * kpool + 3, 2 * kpool, 3 * kpool - 1), seed=kpool
    )
    random = np.random.default_rng(ring_rows)
    while not replay.finished():
        sizes = [int(random.integers(0, 2 * kpool)) for _ in range(3)]
        replay.step(Batch(sizes=sizes, padding=int(random.integers(0, 3)), order=random.permutation(3)))
    replay.check()


def test_a_token_at_a_time():
    replay = Replay(4, 4, 4, lengths=(37, 0, 2), seed=1)
    while not replay.finished():
        replay.step(Batch(sizes=[1, 1, 1], padding=1, order=np.array([2, 0, 1])))
    replay.check()


@pytest.mark.parametrize(("drafts", "ring_rows"), [(1, 8), (3, 16)])
def test_rejected_drafts_never_reach_a_pool(drafts: int, ring_rows: int):
    """Windows of wrong drafts with 0..drafts accepted, at every residue of the position (PITFALLS B01)."""
    random = np.random.default_rng(drafts)
    replay = Replay(4, ring_rows, 4, lengths=(71, 64, 50), seed=drafts)
    replay.step(Batch(sizes=[5, 2, 3], padding=0, order=np.arange(3)))
    while not replay.finished():
        replay.verify(drafts + 1, accepted=random.integers(1, drafts + 2, size=3))
    replay.check()


def test_a_long_row_stays_in_its_ring():
    """Thousands of positions: ring rows are positions modulo the ring, never block indices (PITFALLS B02)."""
    replay = Replay(4, 8, 4, lengths=(2200, 3, 1), seed=3)
    while not replay.finished():
        replay.step(Batch(sizes=[173, 1, 1], padding=2, order=np.array([1, 0, 2])))
    replay.check()


def test_padding_and_missing_blocks_write_nothing():
    ring = jnp.full((1, 2, 4, 2, 8), jnp.nan)
    pooled = jnp.full((1, 3, 1, 8), jnp.nan)
    keys = jnp.ones((12, 8))
    arguments = (keys, keys, jnp.zeros((4, 8)))
    rows = jnp.array([-1] * 4 + [0] * 8)
    positions = jnp.array([0, 1, 2, 3, *range(8)])
    run = jax.jit(op.write_pools)
    new_ring, new_pooled = run(
        ring, pooled, 0, *arguments, rows, positions, jnp.array([0]), jnp.array([1]), jnp.array([[2, -1]])
    )
    assert np.isnan(new_ring[0, 0]).all() and np.isfinite(new_ring[0, 1]).all()
    assert np.isnan(new_pooled[0, :2]).all() and np.isfinite(new_pooled[0, 2]).all()


def test_a_ring_shorter_than_a_pool_is_refused():
    ring, pooled, keys = jnp.zeros((1, 1, 8, 2, 8)), jnp.zeros((1, 1, 1, 8)), jnp.zeros((1, 8))
    row = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="8 rows cannot hold an open pool of 16"):
        op.write_pools(ring, pooled, 0, keys, keys, jnp.zeros((16, 8)), row, row, row, row, row[None])
