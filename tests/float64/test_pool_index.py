"""The k-pool indexer in float64, and a query's independence of its batch: not one bit may depend on it."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import pool_index as op
from tests.pallas_kernels import sparse_oracles as oracle

ROUNDING = 1e-13  # values of order 1 to 10, sums of tens of products


def test_pool_keys_are_float64():
    keys, gates, ape = np.random.default_rng(0).normal(size=(3, 4, 16))
    pooled = op.pool_keys(*map(jnp.asarray, (keys, gates, ape)))
    assert pooled.dtype == jnp.float64
    np.testing.assert_allclose(pooled, oracle.pool_key(keys, gates, ape), atol=ROUNDING, rtol=0)


def test_scores_are_float64():
    random = np.random.default_rng(1)
    q, head_weights, pooled = (random.normal(size=s) for s in ((6, 4, 16), (6, 4), (9, 16)))
    result = op.score_pools(*map(jnp.asarray, (q, head_weights, pooled)))
    assert result.dtype == jnp.float64
    np.testing.assert_allclose(result, oracle.scores(q, head_weights, pooled), atol=ROUNDING, rtol=0)


def test_selection_sees_differences_below_float32():
    scores = jnp.asarray([[1.0, 1.0 + 1e-12, 1.0 - 1e-12, 1.0 + 2e-12]])
    assert op.select_pools(scores, jnp.array([4]), 2).tolist() == [[1, 3]]


def test_a_query_selects_the_same_alone_and_in_a_batch():
    random = np.random.default_rng(2)
    q, head_weights = jnp.asarray(random.normal(size=(7, 4, 16))), jnp.asarray(random.normal(size=(7, 4)))
    pooled = jnp.asarray(random.normal(size=(1, 8, 4, 16)))
    tables = jnp.asarray(random.permutation(8).reshape(2, 4))
    rows, counts = jnp.array([0, 1, 1, 0, 0, -1, 1]), jnp.array([16, 3, 9, 0, 12, 5, 16])
    together = op.select_paged(q, head_weights, pooled, 0, tables, rows, counts, 5, implementation="xla")
    for t in range(7):
        one = slice(t, t + 1)
        alone = op.select_paged(
            q[one], head_weights[one], pooled, 0, tables, rows[one], counts[one], 5, implementation="xla"
        )
        np.testing.assert_array_equal(alone[0], together[t])
