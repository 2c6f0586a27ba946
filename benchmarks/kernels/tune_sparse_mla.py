"""Variants of sparse MLA, causal MLA, the indexer and its selection for `tune.py`."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.kernels import causal_mla, pool_index, sparse_mla
from benchmarks.kernels.harness import Harness, Variant
from pallas_kernels import causal_mla_kernel, pool_index_kernel, select_kernel, sparse_mla_kernel, triton

# (queries, heads, float8, heads of a tile, keys, warps, stages, splits): the first of every question first
_ATTENTION = (
    (2048, 64, False, 64, 64, 8, 2, 1),
    (32, 64, False, 64, 32, 8, 3, 4),
    (2048, 64, True, 64, 64, 8, 2, 1),
    (2048, 64, False, 64, 32, 8, 4, 1),
    (32, 64, False, 64, 64, 8, 2, 4),
    (2048, 64, True, 64, 64, 8, 3, 1),
    (8192, 8, False, 8, 64, 8, 2, 1),
    (32, 64, True, 64, 32, 8, 3, 4),
    (32, 64, False, 64, 32, 8, 4, 4),
    (1, 64, False, 64, 32, 8, 3, 32),
    (2048, 64, True, 64, 32, 8, 4, 1),
    (32, 64, True, 64, 64, 8, 3, 4),
    (8192, 8, False, 8, 32, 4, 3, 1),
    (32, 8, False, 8, 32, 4, 3, 8),
    (2048, 64, False, 64, 32, 8, 3, 1),
    (1, 64, False, 32, 32, 4, 3, 32),
    (32, 8, False, 8, 64, 8, 2, 8),
)


def attention_variants(harness: Harness) -> Iterator[Variant]:
    """Tiles for each kind of problem, splits where there are few queries."""

    @functools.cache
    def arrays(queries: int, heads: int, float8: bool) -> tuple:
        return sparse_mla.problem(harness, queries, heads, float8)

    for queries, heads, float8, block, keys, warps, stages, splits in _ATTENTION:
        tiles = sparse_mla_kernel.Tiles(block, keys, splits, triton.Launch(warps, stages))
        queries = harness.size(queries, 2)
        given = functools.partial(arrays, queries, heads, float8)

        def step(q, latents, scales, indices, tiles=tiles):
            return sparse_mla_kernel.sparse_mla(
                q, latents, indices, sparse_mla.SCALE, 1, scales, interpret=harness.tiny, tiles=tiles
            )

        def measure(step=step, given=given, queries=queries) -> tuple[float, float]:
            seconds = harness.seconds(step, *given(), repeats=2 if queries > 1000 else 20)
            return seconds, sparse_mla.error(harness.call(step, *given()), *given())

        name = f"heads {block} keys {keys} warps {warps} stages {stages} splits {splits}"
        yield Variant(f"attention {queries} x {heads}{' fp8' if float8 else ''}", name, measure)


def score_variants(harness: Harness) -> Iterator[Variant]:
    """(tokens, pools, shares, warps, stages); the selection's time is in, the same for all."""
    prefill = [(8, 64, 1, 8, 2), (8, 64, 1, 8, 3), (8, 128, 1, 8, 2), (4, 64, 1, 4, 2), (4, 128, 1, 8, 3)]
    prefill += [(4, 64, 1, 4, 3), (8, 64, 2, 4, 2)]
    decode = [(2, 64, 32, 4, 2), (1, 64, 16, 4, 2), (1, 128, 16, 4, 2), (1, 64, 16, 4, 3), (1, 128, 8, 4, 3)]
    for requests, tokens, pools, shapes in ((1, 8192, 2048, prefill), (32, 1, 8192, decode)):
        requests, tokens = harness.size(requests, 2), harness.size(tokens, min(tokens, 5))
        pools, k = harness.size(pools, 48), harness.size(512, 16)
        arrays = functools.cache(functools.partial(pool_index.problem, harness, requests, tokens, pools))
        for tile_tokens, tile_pools, shares, warps, stages in shapes:
            tiles = pool_index_kernel.Tiles(tile_tokens, tile_pools, shares, triton.Launch(warps, stages))

            def run(q, head_weights, pooled, tables, rows, counts, tiles=tiles, k=k):
                return pool_index_kernel.select_paged(
                    q, head_weights, pooled, 1, tables, rows, counts, k, interpret=harness.tiny, tiles=tiles
                )

            def measure(run=run, arrays=arrays, k=k) -> tuple[float, float]:
                def step(counts, *rest):
                    return counts + jnp.minimum(run(*rest, counts)[:, 0], 0)

                seconds = harness.seconds(step, arrays()[5], *arrays()[:5], repeats=4)
                return seconds, pool_index.wrong_pools(harness.call(run, *arrays()), arrays(), k)

            name = f"tokens {tile_tokens} pools {tile_pools} shares {shares} warps {warps} stages {stages}"
            yield Variant(f"indexer {requests} x {tokens}, {pools} pools", name, measure)


def causal_variants(harness: Harness) -> Iterator[Variant]:
    """(rows, keys, warps, stages) from a prompt's start, masked and dense."""
    for tokens, heads, chosen in ((8192, 8, 512), (2048, 8, None), (2048, 64, None)):
        tokens, chosen = harness.size(tokens, 40), chosen and harness.size(chosen, 4)
        arrays = functools.cache(functools.partial(causal_mla.problem, harness, tokens, heads, chosen))
        for rows, keys, warps, stages in ((64, 64, 8, 2), (64, 32, 8, 4), (64, 32, 8, 3)):
            tiles = causal_mla_kernel.Tiles(rows, keys, triton.Launch(warps, stages))

            def step(q, latents, tables, row, positions, bits, tiles=tiles):
                return causal_mla_kernel.causal_mla(
                    q, latents, tables, row, positions, block_size=causal_mla.BLOCK, scale=causal_mla.SCALE,
                    layer=1, latent_scales=None, chosen=bits, kpool=causal_mla.KPOOL, interpret=harness.tiny,
                    tiles=tiles,
                )  # fmt: skip

            def measure(step=step, arrays=arrays) -> tuple[float, float]:
                seconds = harness.seconds(step, *arrays(), repeats=2)
                return seconds, causal_mla.error(harness.call(step, *arrays()), arrays())

            name = f"rows {rows} keys {keys} warps {warps} stages {stages}"
            yield Variant(f"causal {tokens} x {heads}{' masked' if chosen else ''}", name, measure)


def selection_variants(harness: Harness) -> Iterator[Variant]:
    k = harness.size(512, 16)
    for rows, pools in ((32, 8192), (8192, 2048), (32, 65536)):
        rows, pools = harness.size(rows, 4), harness.size(pools, 64)
        for longest in (8192, 4096, 2048):
            if longest > pools and longest > 2048:
                continue

            def measure(rows=rows, pools=pools, longest=longest) -> tuple[float, float]:
                scores = jax.random.normal(jax.random.key(0), (rows, pools))
                counts = jnp.full((rows,), pools, jnp.int32)
                run = functools.partial(
                    select_kernel.select, k=k, interpret=harness.tiny, longest_segment=longest
                )
                expected = jnp.sort(jax.lax.top_k(scores[:4], k)[1], axis=-1)
                wrong = float((harness.call(run, scores, counts)[:4] != expected).mean())
                step = lambda counts, scores: counts + jnp.minimum(run(scores, counts)[:, 0], 0)  # noqa: E731
                return harness.seconds(step, counts, scores), wrong

            yield Variant(f"top {k} of {rows} x {pools}", f"segments of {longest}", measure)
