"""The indexer's kernels on a GPU, or in the Pallas interpreter, against numpy, and their lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels import pool_index as op
from pallas_kernels import pool_index_kernel as kernel
from pallas_kernels import select_kernel, triton
from tests.pallas_kernels import sparse_oracles as oracle
from tests.pallas_kernels.device import INTERPRET, KERNEL
from tests.pallas_kernels.lowering import lower
from tests.pallas_kernels.test_pool_index import paged_problem, tied_scores


def select(scores: np.ndarray, counts: np.ndarray, k: int, longest_segment: int = 8192) -> np.ndarray:
    run = jax.jit(
        lambda s, c: select_kernel.select(s, c, k, interpret=INTERPRET, longest_segment=longest_segment)
    )
    return np.asarray(run(jnp.asarray(scores), jnp.asarray(counts)))


@pytest.mark.parametrize("k", [1, 5, 16])
def test_selection_breaks_ties_to_the_lowest(k: int):
    random = np.random.default_rng(k)
    scores = tied_scores(random, (30, 29))
    counts = np.arange(30).astype(np.int32)
    scores[np.arange(29) >= counts[:, None]] = np.nan
    scores[counts <= k] = np.nan  # all are taken: no score is looked at
    expected = [oracle.select(scores[t], counts[t], k) for t in range(30)]
    np.testing.assert_array_equal(select(scores, counts, k), expected)


def test_selection_orders_every_kind_of_float():
    """Neighbouring floats, subnormals, infinities and both signs, shuffled."""
    random = np.random.default_rng(0)
    values = np.array([0.0, -0.0, 1e-45, -1e-45, 1e38, -1e38, np.inf, -np.inf, 1, -1, np.pi], np.float32)
    values = np.concatenate([values, np.nextafter(values[:-1], np.float32(2)), random.normal(size=42)])
    scores = np.stack([random.permutation(values.astype(np.float32)) for _ in range(8)])
    for k in (3, 20):
        expected = [oracle.select(row, len(values), k) for row in scores]
        np.testing.assert_array_equal(select(scores, np.full(8, len(values), np.int32), k), expected)


@pytest.mark.parametrize("width", [33, 256, 300])
def test_long_rows_in_segments(width: int):
    """Segments of 32: two and three levels; counts at every edge of a segment; ties across segments."""
    random = np.random.default_rng(width)
    counts = np.array([0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 96, 255, 256, 257, 299, 300], np.int32)
    counts = counts[counts <= width]
    scores = tied_scores(random, (len(counts), width))
    scores[np.arange(width) >= counts[:, None]] = np.nan
    expected = [oracle.select(scores[t], counts[t], 8) for t in range(len(counts))]
    np.testing.assert_array_equal(select(scores, counts, 8, longest_segment=32), expected)


@pytest.mark.parametrize(("tokens", "tile"), [(1, 1), (24, 1), (24, 8), (11, 4)])
@pytest.mark.parametrize("shares", [1, 3])
def test_paged_selection(tokens: int, tile: int, shares: int):
    """Tiles with tokens of several rows, of none and of padding; blocks that no table names are NaN."""
    q, head_weights, pooled, tables, row_of_token, counts = paged_problem(tokens, tokens, heads=16)
    tiles = kernel.Tiles(tile, 16, shares, triton.Launch())
    arrays = [jnp.asarray(x) for x in (q, head_weights, pooled, tables, row_of_token, counts)]

    def run(layer, q, head_weights, pooled, *rest):
        return kernel.select_paged(q, head_weights, pooled, layer, *rest, 6, interpret=INTERPRET, tiles=tiles)

    expected = op.select_paged_reference(*arrays[:3], 1, *arrays[3:], 6)
    np.testing.assert_array_equal(jax.jit(run)(1, *arrays), expected)


def test_public_op_in_pieces_of_bounded_scores(monkeypatch: pytest.MonkeyPatch):
    q, head_weights, pooled, tables, row_of_token, counts = paged_problem(5, 24, heads=16)
    arrays = [jnp.asarray(x) for x in (q, head_weights, pooled, 1, tables, row_of_token, counts)]
    expected = op.select_paged(*arrays, 6, implementation="xla")
    np.testing.assert_array_equal(op.select_paged(*arrays, 6, implementation=KERNEL), expected)
    monkeypatch.setattr(kernel, "SCORE_BYTES", 5 * 24 * 4)
    np.testing.assert_array_equal(op.select_paged(*arrays, 6, implementation=KERNEL), expected)


def test_other_rows_and_later_tokens_change_nothing():
    q, head_weights, pooled, tables, row_of_token, counts = paged_problem(6, 24, heads=16)
    row_of_token[:16], row_of_token[16:] = np.sort(row_of_token[:16]), -1
    counts = np.where(row_of_token == 0, 20, np.where(row_of_token == 1, 2, 0)).astype(np.int32)

    def run(q, rows):
        arrays = map(jnp.asarray, (q, head_weights, pooled, 1, tables, rows, counts))
        return np.asarray(op.select_paged(*arrays, 6, implementation=KERNEL))

    whole = run(q, row_of_token)
    q[16:] = 3
    row_of_token[16:] = 0
    np.testing.assert_array_equal(run(q, row_of_token)[:16], whole[:16])


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize(("tokens", "rows", "blocks"), [(4096, 16, 128), (32, 32, 2048), (4, 1, 16384)])
def test_lowers(platform: str, tokens: int, rows: int, blocks: int):
    shapes = [
        ((tokens, 32, 128), jnp.bfloat16),
        ((tokens, 32), jnp.float32),
        ((12, 4096, 16, 128), jnp.bfloat16),
        ((), jnp.int32),
        ((rows, blocks), jnp.int32),
        ((tokens,), jnp.int32),
        ((tokens,), jnp.int32),
    ]
    text = lower(
        lambda *arrays: op.select_paged(*arrays, 512, implementation="triton"),
        [jax.ShapeDtypeStruct(*shape) for shape in shapes],
        platform,
    )
    pools, kernels = blocks * 16, 2
    while pools > 8192:
        pools, kernels = -(-pools // 8192) * 512, kernels + 1
    assert text.count("__gpu$xla.gpu.triton") == kernels


def test_scores_never_exceed_a_gibibyte():
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [
            ((8192, 32, 128), jnp.bfloat16),
            ((8192, 32), jnp.float32),
            ((1, 64, 16, 128), jnp.bfloat16),
            ((), jnp.int32),
            ((2, 16384), jnp.int32),
            ((8192,), jnp.int32),
            ((8192,), jnp.int32),
        ]
    ]
    jaxpr = jax.make_jaxpr(lambda *x: op.select_paged(*x, 512, implementation="triton"))(*arrays)
    sizes = [int(size) for size in _buffer_sizes(jaxpr.jaxpr)]
    assert 2**29 < max(sizes) <= 2**30


def _buffer_sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.size * v.aval.dtype.itemsize for v in equation.outvars if hasattr(v.aval, "dtype"))
        if equation.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(equation.params):
                yield from _buffer_sizes(inner)
