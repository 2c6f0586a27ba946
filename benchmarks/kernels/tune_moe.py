"""Variants of the experts, the hyper-connections, sampling and the block-scaled matmul for `tune.py`."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import grouped_mlp, hyper_connection, vocab_sampling
from benchmarks.kernels.harness import Harness, Variant
from pallas_kernels import float8_blocks, hyper_connection_kernel
from pallas_kernels.block_scaled_kernel import Plan as MatmulPlan
from pallas_kernels.block_scaled_kernel import block_scaled_matmul_triton
from pallas_kernels.expert_tiles import expert_tiles
from pallas_kernels.grouped_mlp_kernel import Plan as ExpertPlan
from pallas_kernels.grouped_mlp_kernel import combine
from pallas_kernels.matmul_tile import Tile
from pallas_kernels.triton import Launch
from pallas_kernels.vocab_edge_kernel import Plan as SamplingPlan

SMALL = [
    ((16, 128, 128, 1, 4, 3), (16, 128, 128, 1, 4, 3)),
    ((16, 128, 128, 1, 4, 4), (16, 128, 128, 1, 4, 4)),
    ((16, 128, 128, 1, 8, 4), (16, 128, 128, 1, 4, 4)),
]
# Float8 products through Hopper's tensor cores. Best guess first: an H200's level-2 cache, not its tensor
# cores, binds a tile of 64 rows; sixteen warps spare the wide ones from spilling; two programs of four warps
# share a multiprocessor and hide each other's starts and ends.
LARGE = [
    ((128, 128, 128, 4, 16, 3), (128, 256, 128, 4, 16, 3)),
    ((64, 128, 128, 4, 8, 3), (64, 256, 128, 4, 8, 3)),
    ((128, 128, 128, 4, 8, 3), (128, 256, 128, 4, 8, 3)),
    ((128, 128, 128, 4, 8, 4), (128, 128, 128, 4, 8, 4)),
    ((64, 128, 128, 4, 4, 2), (64, 128, 128, 4, 4, 3)),
    ((128, 128, 128, 2, 16, 4), (128, 256, 128, 2, 16, 4)),
]


def expert_variants(harness: Harness) -> Iterator[Variant]:
    """(rows, columns, inner, group, warps, stages) of gate and up, then of down."""
    yield from _experts(harness, 8192, 2048, True, True, LARGE)


def few_expert_variants(harness: Harness) -> Iterator[Variant]:
    yield from _experts(harness, 32, 2048, True, True, SMALL)


def other_expert_variants(harness: Harness) -> Iterator[Variant]:
    """bfloat16 weights, an eighth of the experts' width, activations not quantised."""
    wide = [
        ((128, 128, 64, 2, 8, 3), (128, 256, 64, 2, 8, 3)),
        ((64, 128, 64, 4, 4, 3), (64, 256, 64, 4, 8, 3)),
    ]
    yield from _experts(harness, 8192, 2048, False, False, wide)
    yield from _experts(harness, 8192, 256, True, True, LARGE[:2])
    narrow = [SMALL[0], ((16, 32, 128, 1, 4, 4), (16, 32, 128, 1, 4, 5))]
    yield from _experts(harness, 32, 256, True, True, narrow)
    yield from _experts(harness, 32, 2048, False, False, [((16, 64, 64, 1, 4, 4), (16, 64, 64, 1, 4, 4))])
    yield from _experts(harness, 32, 2048, True, False, SMALL[:1])


def _experts(
    harness: Harness, tokens: int, inner: int, float8: bool, quantized: bool, shapes: list[tuple]
) -> Iterator[Variant]:
    large = tokens > 1000
    group = f"experts {'fp8' if float8 else 'bf16'}{'' if quantized else ' plain x'} {tokens} x {inner}"
    tokens = harness.size(tokens, 5)
    arrays = functools.cache(lambda: grouped_mlp.routing(harness, tokens))

    for gate_up_shape, down_shape in shapes:
        tiles = (Tile(*shape[:4], Launch(*shape[4:])) for shape in (gate_up_shape, down_shape))
        plan = ExpertPlan(*tiles)

        def measure(plan: ExpertPlan = plan) -> tuple[float, float]:
            gate_up, down = grouped_mlp.weights(harness, inner, float8)
            run = lambda *a: grouped_mlp.run(harness, a[:3], a[3], a[4], quantized, plan)  # noqa: E731
            out = harness.call(run, *arrays(), gate_up, down)
            error = grouped_mlp.error(out, arrays(), gate_up, down, quantized)
            return grouped_mlp.seconds(harness, arrays(), gate_up, down, quantized, plan), error

        yield Variant(group, f"{gate_up_shape} {down_shape}", measure)
        if large:

            def hidden(plan: ExpertPlan = plan) -> tuple[float, float]:
                gate_up, _ = grouped_mlp.weights(harness, inner, float8)
                return grouped_mlp.hidden_seconds(harness, arrays(), gate_up, quantized, plan), 0.0

            yield Variant(group, f"{gate_up_shape} gate and up", hidden)


def glue_variants(harness: Harness) -> Iterator[Variant]:
    """What surrounds the products: layout, activation quantisation, combine. Errors are not looked at."""
    experts = harness.size(288, 6)
    for tokens, tile in ((32, 16), (8192, 128)):
        count = harness.size(tokens, 5)
        arrays = functools.cache(functools.partial(grouped_mlp.routing, harness, count))

        def layout(arrays: Any = arrays, tile: int = tile) -> tuple[float, float]:
            def step(ids: jax.Array) -> jax.Array:
                tiles = expert_tiles(ids.reshape(-1), experts, tile)
                waits = tiles.destinations.max() + tiles.sources.min() + tiles.experts.min()
                return ids + jnp.minimum(waits, 0) * 0

            return harness.seconds(step, arrays()[1]), 0.0

        def quantize(arrays: Any = arrays) -> tuple[float, float]:
            def step(x: jax.Array) -> jax.Array:
                values, scales = float8_blocks.quantize_activations(x)
                return x + (values[:, :1].astype(x.dtype) + scales[:, :1].astype(x.dtype)) * 0

            return harness.seconds(step, arrays()[0]), 0.0

        def sum_up(arrays: Any = arrays, tile: int = tile) -> tuple[float, float]:
            x, ids, share = arrays()
            tiles = jax.jit(lambda ids: expert_tiles(ids.reshape(-1), experts, tile))(ids)
            out = jnp.ones((tiles.sources.shape[0], x.shape[1]), x.dtype)

            def step(x: jax.Array, out: jax.Array, rows: jax.Array, share: jax.Array) -> jax.Array:
                return combine(out, rows, share + x[:, :1] * 0, interpret=harness.tiny)

            rows = tiles.destinations.reshape(ids.shape)
            return harness.seconds(step, x, out, rows, share), 0.0

        for name, function in (("layout", layout), ("quantise x", quantize), ("combine", sum_up)):
            yield Variant(f"glue {tokens}", name, function)


def boundary_variants(harness: Harness) -> Iterator[Variant]:
    """(tokens, mix channels, mix splits, gate channels, gate splits), (warps, stages) of mix and of gates."""
    narrow = [
        ((16, 128, 32, 128, 32), (8, 1), (1, 1)),
        ((16, 128, 32, 128, 32), (4, 1), (1, 1)),
        ((16, 64, 32, 128, 32), (4, 3), (1, 1)),
        ((16, 64, 64, 128, 32), (4, 1), (1, 1)),
        ((16, 32, 32, 128, 32), (1, 3), (1, 1)),
    ]
    wide = [
        ((16, 64, 4, 128, 4), (4, 3), (4, 1)),
        ((16, 64, 4, 128, 4), (4, 2), (4, 1)),
        ((16, 32, 8, 128, 4), (1, 3), (4, 1)),
        ((16, 16, 8, 128, 4), (1, 4), (4, 1)),
        ((64, 16, 8, 128, 4), (4, 3), (4, 1)),
    ]
    for tokens, shapes in ((32, narrow), (8192, wide)):
        count = harness.size(tokens, 5)
        arrays = functools.cache(functools.partial(hyper_connection.problem, harness, count))
        for shape, mix, gates in shapes:
            sizes = (16, 128, 1, 128, 1) if harness.tiny else shape
            plan = hyper_connection_kernel.Plan(*sizes, Launch(*mix), Launch(*gates))

            def measure(plan: Any = plan, arrays: Any = arrays) -> tuple[float, float]:
                results = harness.call(lambda *a: hyper_connection.boundary(harness, a, plan), *arrays())
                error = hyper_connection.error(results, arrays())
                return hyper_connection.seconds(harness, arrays(), plan), error

            yield Variant(f"boundary {tokens}", f"{shape} {mix} {gates}", measure)


def sampling_variants(harness: Harness) -> Iterator[Variant]:
    """(tile, capacity, warps, warps of the last bisection)."""
    cases = (
        ("128 top-p", (128, 3.0, 1.0, 0, 0.95), [(4096, 4096, 4, 8), (2048, 4096, 4, 8), (8192, 4096, 8, 8)]),
        ("128 top-p", (128, 3.0, 1.0, 0, 0.95), [(4096, 2048, 8, 4), (4096, 4096, 4, 16)]),
        ("128 top-p flat", (128, 1.0, 1.0, 0, 0.95), [(4096, 4096, 4, 8)]),
        ("128 top-k 50 top-p", (128, 3.0, 0.7, 50, 0.95), [(4096, 4096, 4, 8)]),
        ("1 top-p", (1, 3.0, 1.0, 0, 0.95), [(4096, 4096, 4, 8), (1024, 2048, 4, 8)]),
    )
    for name, case, shapes in cases:
        rows = harness.size(case[0], 2)
        arrays = functools.cache(functools.partial(vocab_sampling.problem, harness, rows, *case[1:]))
        for tile, capacity, warps, settle in shapes:
            plan = SamplingPlan(tile, capacity, Launch(warps, 1), Launch(settle, 1))

            def measure(plan: SamplingPlan = plan, arrays: Any = arrays) -> tuple[float, float]:
                tokens = harness.call(lambda *a: vocab_sampling.draw(harness, a, plan), *arrays())
                return vocab_sampling.seconds(harness, arrays(), plan), vocab_sampling.wrong(tokens, arrays())

            yield Variant(f"sampling {name}", f"{(tile, capacity, warps, settle)}", measure)


def matmul_variants(harness: Harness) -> Iterator[Variant]:
    """(rows, columns, inner, group, warps, stages) of the matmul, 4096 to 12288; None: XLA's own, of the
    dequantised weight."""
    shapes = {
        8192: [
            (128, 256, 128, 8, 16, 3),
            None,
            (128, 256, 128, 8, 8, 3),
            (128, 128, 128, 8, 8, 4),
            (64, 128, 128, 8, 4, 4),
        ],
        512: [(64, 128, 128, 4, 4, 4), None, (128, 128, 128, 4, 8, 4), (64, 64, 128, 4, 4, 4)],
        32: [(32, 32, 128, 1, 2, 5), (32, 32, 128, 1, 2, 6)],
        1: [(16, 32, 128, 1, 2, 5), (16, 32, 128, 1, 4, 4), (16, 32, 128, 1, 2, 6)],
    }
    dim, columns = harness.size(4096, 128), harness.size(12288, 256)

    @functools.cache
    def weight() -> tuple[jax.Array, jax.Array]:
        w = jax.random.normal(jax.random.key(0), (columns, dim), jnp.bfloat16) * dim**-0.5
        return jax.jit(float8_blocks.quantize_blocks)(w)

    for tokens, tiles in shapes.items():
        x = jax.random.normal(jax.random.key(1), (harness.size(tokens, min(tokens, 5)), dim), jnp.bfloat16)
        for shape in tiles:
            plan = MatmulPlan(None if shape is None else Tile(*shape[:4], Launch(*shape[4:])))

            def measure(plan: MatmulPlan = plan, x: jax.Array = x) -> tuple[float, float]:
                def run(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
                    return block_scaled_matmul_triton(
                        x, values, scales, quantized=True, interpret=harness.tiny, plan=plan
                    )

                def step(x: jax.Array, *weight: jax.Array) -> jax.Array:
                    return x + run(x, *weight)[:, :1] * 0

                error = grouped_mlp.matmul_error(harness.call(run, x, *weight()), x, *weight())
                return harness.seconds(step, x, *weight(), repeats=5 if len(x) > 1000 else 40), error

            yield Variant(f"block-fp8 matmul {tokens}", f"{shape}", measure)
