"""Causal and pool-masked MLA, reference and kernel, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_mla as op
from pallas_kernels import causal_mla_kernel as kernel
from pallas_kernels import sparse_mla, triton
from tests.pallas_kernels import sparse_oracles as oracle
from tests.pallas_kernels.device import INTERPRET, KERNEL
from tests.pallas_kernels.lowering import lower

FLOAT32_TOLERANCE = 2e-5  # of outputs of order 1: sums of a few dozen float32 products
BLOCK = 8


def problem(seed: int, heads: int, kpool: int, dim: int = 128):
    """A ragged batch of chunks over shuffled blocks; what no token may see is NaN, padding at the end."""
    random = np.random.default_rng(seed)
    starts, sizes = [0, 30, 0, 7], [5, 9, 0, 6]
    tables = np.full((4, 6), -1, np.int32)
    owned = random.permutation(24).astype(np.int32)
    latents = np.full((2, 24 * BLOCK, dim), np.nan, np.float32)
    row_of_token, positions = [], []
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        blocks = -(-(start + size) // BLOCK)
        tables[row, :blocks] = owned[row * 6 : row * 6 + blocks]
        for position in range(start + size):
            at = tables[row, position // BLOCK] * BLOCK + position % BLOCK
            latents[1, at] = random.normal(size=dim)
        row_of_token += [row] * size
        positions += list(range(start, start + size))
    row_of_token, positions = (
        np.array(row_of_token + [-1] * 3, np.int32),
        np.array(positions + [0] * 3, np.int32),
    )
    q = random.normal(size=(len(positions), heads, dim)).astype(np.float32)
    counts = (positions + 1) // kpool
    ids = np.full((len(positions), 3), -1, np.int32)
    for token, count in enumerate(counts):
        picked = np.sort(random.permutation(count)[:3])
        ids[token, : len(picked)] = picked
    return q, latents, tables, row_of_token, positions, ids


def expected_rows(tables, row_of_token, positions, ids, kpool: int, masked: bool) -> np.ndarray:
    rows = np.full((len(positions), 48), -1, np.int32)
    for token, (row, position) in enumerate(zip(row_of_token, positions, strict=True)):
        if row >= 0:
            seen = oracle.member_tokens(ids[token], position, kpool) if masked else range(position + 1)
            physical = [tables[row, p // BLOCK] * BLOCK + p % BLOCK for p in seen]
            rows[token, : len(physical)] = physical
    return rows


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
@pytest.mark.parametrize(
    ("heads", "kpool", "masked"), [(8, 4, True), (16, 4, False), (2, 2, True), (64, 4, True)]
)
def test_matches_numpy(heads: int, kpool: int, masked: bool, implementation: str):
    q, latents, tables, row_of_token, positions, ids = problem(heads, heads, kpool)
    bits = op.pool_bits(jnp.asarray(ids), 24) if masked else None
    arrays = [jnp.asarray(x) for x in (q, latents, tables, row_of_token, positions)]
    run = jax.jit(
        lambda layer: op.causal_mla(
            *arrays, block_size=BLOCK, scale=0.2, layer=layer, chosen=bits, kpool=kpool,
            implementation=implementation,
        )
    )  # fmt: skip
    rows = expected_rows(tables, row_of_token, positions, ids, kpool, masked)
    out = np.asarray(run(1))
    np.testing.assert_allclose(
        out, oracle.attention(q, latents[1], rows, 0.2), atol=FLOAT32_TOLERANCE, rtol=0
    )
    assert not out[-3:].any()


def test_quantised_latents():
    q, latents, tables, row_of_token, positions, ids = problem(5, 8, 4, dim=256)
    quantized, scales = sparse_mla.quantize_latents(jnp.asarray(latents))
    tiles = kernel.Tiles(32, 16, triton.Launch())
    out = kernel.causal_mla(
        jnp.asarray(q, jnp.bfloat16), quantized, *map(jnp.asarray, (tables, row_of_token, positions)),
        block_size=BLOCK, scale=0.2, layer=1, latent_scales=scales, chosen=op.pool_bits(jnp.asarray(ids), 24),
        kpool=4, interpret=INTERPRET, tiles=tiles,
    )  # fmt: skip
    seen = np.asarray(sparse_mla.dequantize_latents(quantized, scales, jnp.float32))[1]
    rows = expected_rows(tables, row_of_token, positions, ids, 4, True)
    rounded = np.asarray(jnp.asarray(q, jnp.bfloat16).astype(jnp.float32))
    expected = oracle.attention(rounded, seen, rows, 0.2)
    # Weights and latents round to bfloat16's 8 bits before the second product, outputs of order 1 once more.
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=1.5e-2, rtol=0)


def test_bits():
    ids = jnp.array([[0, 31, 32], [-1, -1, -1], [5, 63, -1]])
    bits = np.asarray(op.pool_bits(ids, 70)).view(np.uint32)
    assert bits.tolist() == [[2**31 + 1, 1, 0], [0, 0, 0], [32, 2**31, 0]]


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize(
    ("heads", "masked", "quantized"), [(64, False, False), (8, True, False), (8, True, True)]
)
def test_lowers(platform: str, heads: int, masked: bool, quantized: bool):
    latents = jnp.float8_e4m3fn if quantized else jnp.bfloat16
    shapes = [((4096, heads, 512), jnp.bfloat16), ((12, 8192, 512), latents), ((8, 128), jnp.int32)]
    shapes += [
        ((4096,), jnp.int32),
        ((4096,), jnp.int32),
        ((4096, 64), jnp.int32),
        ((12, 8192, 4), jnp.float32),
    ]
    text = lower(
        lambda *x: op.causal_mla(
            *x[:5], block_size=64, scale=1 / 16, layer=3, chosen=x[5] if masked else None, kpool=4,
            latent_scales=x[6] if quantized else None, implementation="triton",
        ),
        [jax.ShapeDtypeStruct(*shape) for shape in shapes],
        platform,
    )  # fmt: skip
    assert text.count("__gpu$xla.gpu.triton") == 1
