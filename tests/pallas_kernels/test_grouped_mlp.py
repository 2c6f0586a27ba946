"""Routed experts: the XLA reference against numpy in float64, the kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_scaled, triton
from pallas_kernels import grouped_mlp as op
from pallas_kernels.expert_tiles import expert_tiles
from pallas_kernels.grouped_mlp_kernel import Plan, grouped_mlp_triton
from pallas_kernels.matmul_tile import Tile
from tests.pallas_kernels import expert_oracles as oracle
from tests.pallas_kernels.device import INTERPRET
from tests.pallas_kernels.lowering import lower

FLOAT32_TOLERANCE = 2e-5  # of outputs of order 1: two chained sums of a few dozen products
# bfloat16 keeps 8 bits; gate, up, their activation and every expert's output are each rounded once.
BFLOAT16_TOLERANCE = 2e-2
ROUTINGS = ["random", "one expert", "empty experts", "no expert", "some without"]


def problem(routing: str, tokens: int, dim: int, inner: int, experts: int, k: int, seed: int = 0):
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    if routing == "one expert":
        ids = np.full((tokens, k), experts - 1, np.int32)
        ids[:, 1:] = -1
    elif routing == "empty experts":
        ids = ids % 2 + np.arange(k, dtype=np.int32) % 2 * 2
    elif routing == "no expert":
        ids = np.full((tokens, k), -1, np.int32)
    elif routing == "some without":
        ids[random.random(ids.shape) < 0.4] = -1
        ids[::3] = -1
    x = random.normal(size=(tokens, dim)).astype(np.float32)
    weights = random.random((tokens, k)).astype(np.float32)
    gate_up = (random.normal(size=(experts, 2, inner, dim)) * dim**-0.5 * 2).astype(np.float32)
    down = (random.normal(size=(experts, dim, inner)) * inner**-0.5).astype(np.float32)
    return x, ids, weights, gate_up, down


compiled = jax.jit(op.grouped_mlp, static_argnames=("limit", "quantize_activations", "implementation"))
compiled_kernels = jax.jit(
    grouped_mlp_triton, static_argnames=("limit", "quantize_activations", "interpret", "plan")
)


def call(arguments, **options) -> jax.Array:
    return compiled(*map(jnp.asarray, arguments), implementation="xla", **options)


@pytest.mark.parametrize("experts", [5, 20])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_reference_against_numpy(routing: str, experts: int):
    """Five experts take the path over all of them, twenty the sorted one; dimensions are odd."""
    arguments = problem(routing, 37, 24, 13, experts, 3)
    out = call(arguments, limit=1.0)
    expected = oracle.grouped_mlp(*arguments, limit=1.0)
    np.testing.assert_allclose(out, expected, atol=FLOAT32_TOLERANCE, rtol=0)
    unclamped = oracle.grouped_mlp(*arguments, limit=1e9)
    assert routing == "no expert" or np.abs(unclamped - expected).max() > 0.1, "the clamp must bind"


@pytest.mark.parametrize("experts", [5, 20])
def test_tokens_without_expert_are_not_read(experts: int):
    x, ids, *rest = problem("some without", 20, 24, 13, experts, 3)
    x[ids.max(axis=1) < 0] = np.nan
    out = np.asarray(call((x, ids, *rest), limit=2.0))
    assert np.isfinite(out).all() and not out[::3].any()


@pytest.mark.parametrize("experts", [5, 20])
def test_earlier_tokens_do_not_see_later_ones(experts: int):
    x, ids, *rest = problem("random", 40, 24, 13, experts, 3)
    before = np.asarray(call((x, ids, *rest), limit=2.0))
    x, ids = x.copy(), ids.copy()
    x[17:], ids[17:] = x[17:][::-1], ids[17:][::-1]
    after = np.asarray(call((x, ids, *rest), limit=2.0))
    np.testing.assert_array_equal(after[:17], before[:17])
    assert not np.array_equal(after[17:], before[17:])


@pytest.mark.parametrize("experts", [5, 20])
def test_bfloat16(experts: int):
    arguments = [jnp.asarray(a) for a in problem("random", 30, 48, 32, experts, 3)]
    narrow = [a.astype(jnp.bfloat16) if i in (0, 3, 4) else a for i, a in enumerate(arguments)]
    out = call(narrow, limit=1.0)
    assert out.dtype == jnp.bfloat16
    expected = oracle.grouped_mlp(*narrow, limit=1.0)
    np.testing.assert_allclose(oracle.wide(out), expected, atol=BFLOAT16_TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("experts", [5, 20])
def test_gradients_agree_with_differences(experts: int):
    """A directional derivative in every input against a central difference in float32."""
    x, ids, weights, gate_up, down = map(jnp.asarray, problem("some without", 12, 10, 7, experts, 2))

    def loss(x, weights, gate_up, down):
        out = op.grouped_mlp(x, ids, weights, gate_up, down, limit=3.0, implementation="xla")
        return jnp.tanh(out).sum()

    inputs = (x, weights, gate_up, down)
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*inputs)
    evaluate = jax.jit(loss)
    for index, gradient in enumerate(gradients):
        direction = jax.random.normal(jax.random.key(index), gradient.shape)
        step = 1e-2 / float(jnp.linalg.norm(direction))
        moved = [
            evaluate(*(v + sign * step * direction if i == index else v for i, v in enumerate(inputs)))
            for sign in (1, -1)
        ]
        slope = float((moved[0] - moved[1]) / (2 * step))
        # The difference loses about 1e-6 / 1e-2 of a loss of order 10, beside its second-order term.
        np.testing.assert_allclose(float((gradient * direction).sum()), slope, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("experts", [5, 20])
def test_float8_weights_have_the_bits_of_plain_ones(experts: int):
    x, ids, weights, gate_up, down = map(jnp.asarray, problem("random", 21, 150, 140, experts, 2))
    gate_up, gate_up_scales = block_scaled.quantize_blocks(gate_up)
    down, down_scales = block_scaled.quantize_blocks(down)
    out = call(
        (x, ids, weights, gate_up, down), limit=1.0, gate_up_scales=gate_up_scales, down_scales=down_scales
    )
    plain = [
        block_scaled.dequantize_blocks(gate_up, gate_up_scales, jnp.float32),
        block_scaled.dequantize_blocks(down, down_scales, jnp.float32),
    ]
    np.testing.assert_array_equal(out, call((x, ids, weights, *plain), limit=1.0))


def test_expert_tiles_place_every_choice_once():
    for choices, experts, tile in ((1, 8, 16), (37, 8, 4), (700, 12, 8), (5, 3, 1), (520, 300, 16)):
        ids = np.random.default_rng(choices).integers(-1, experts, choices).astype(np.int32)
        tiles = jax.jit(lambda ids, e=experts, t=tile: expert_tiles(ids, e, t))(ids)
        sources, destinations = np.asarray(tiles.sources), np.asarray(tiles.destinations)
        owners = np.asarray(tiles.experts)
        assert (sources < choices).sum() == (ids >= 0).sum()
        for choice, expert in enumerate(ids):
            if expert < 0:
                assert destinations[choice] == len(sources)
            else:
                assert sources[destinations[choice]] == choice
                assert owners[destinations[choice] // tile] == expert
        used = (sources.reshape(-1, tile) < choices).any(axis=1)
        np.testing.assert_array_equal(used, owners >= 0)
        assert (np.diff(used.astype(int)) <= 0).all(), "empty tiles come last"


SMALL = Tile(16, 32, 128, 1, triton.Launch())
LARGE = Tile(64, 128, 64, 2, triton.Launch())
WIDE = Tile(64, 256, 64, 3, triton.Launch())


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tiles", [(SMALL, SMALL), (LARGE, WIDE)])
def test_bfloat16_kernels_against_reference(routing: str, tiles: tuple[Tile, Tile]):
    x, ids, weights, gate_up, down = map(jnp.asarray, problem(routing, 40, 256, 128, 6, 3))
    x, gate_up, down = (a.astype(jnp.bfloat16) for a in (x, gate_up, down))
    out = compiled_kernels(
        x,
        ids,
        weights,
        (gate_up, None),
        (down, None),
        limit=1.0,
        quantize_activations=False,
        interpret=INTERPRET,
        plan=Plan(*tiles),
    )
    expected = oracle.wide(call((x, ids, weights, gate_up, down), limit=1.0))
    # The same roundings of sums taken in another order: a neighbour now and then.
    np.testing.assert_allclose(oracle.wide(out), expected, atol=1e-2 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(SMALL, SMALL),
        Plan(LARGE, WIDE),
        Plan(SMALL, SMALL, "bfloat16"),
        Plan(LARGE, WIDE, "bfloat16"),
    ],
    ids=lambda plan: f"{plan.gate_up.rows}-{plan.operands}",
)
def test_float8_kernels_against_reference(plan: Plan, quantize: bool):
    x, ids, weights, gate_up, down = map(jnp.asarray, problem("some without", 40, 256, 128, 6, 3))
    x = x.astype(jnp.bfloat16)
    gate_up, gate_up_scales = block_scaled.quantize_blocks(gate_up)
    down, down_scales = block_scaled.quantize_blocks(down)
    out = compiled_kernels(
        x,
        ids,
        weights,
        (gate_up, gate_up_scales),
        (down, down_scales),
        limit=1.0,
        quantize_activations=quantize,
        interpret=INTERPRET,
        plan=plan,
    )
    expected = oracle.wide(
        call(
            (x, ids, weights, gate_up, down),
            limit=1.0,
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
            quantize_activations=quantize,
        )
    )
    # A bfloat16 neighbour may round to another float8, a sixteenth away, in a few of 128 channels.
    tolerance = (3e-2 if quantize else 1e-2) * np.abs(expected).max()
    np.testing.assert_allclose(oracle.wide(out), expected, atol=tolerance)


def test_quantised_activations_cost_what_float8_costs():
    """Against plain activations: off by float8's three bits, not by more."""
    x, ids, weights, gate_up, down = map(jnp.asarray, problem("random", 40, 256, 128, 6, 3))
    gate_up, gate_up_scales = block_scaled.quantize_blocks(gate_up)
    down, down_scales = block_scaled.quantize_blocks(down)
    scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
    plain = oracle.wide(call((x, ids, weights, gate_up, down), limit=10.0, **scales))
    rounded = oracle.wide(
        call((x, ids, weights, gate_up, down), limit=10.0, quantize_activations=True, **scales)
    )
    relative = np.linalg.norm(rounded - plain) / np.linalg.norm(plain)
    # Two roundings with a relative error of about 2**-5 rms each, averaged over independent channels.
    assert 5e-3 < relative < 6e-2


def test_refuses_tiles_that_cannot_quantise_their_results():
    x, ids, weights, gate_up, down = map(jnp.asarray, problem("random", 4, 256, 128, 5, 3))
    pairs = block_scaled.quantize_blocks(gate_up), block_scaled.quantize_blocks(down)
    narrow = Tile(64, 64, 128, 1, triton.Launch())
    with pytest.raises(ValueError, match="64 columns"):
        grouped_mlp_triton(
            x.astype(jnp.bfloat16), ids, weights, *pairs, limit=1.0, quantize_activations=True,
            interpret=INTERPRET, plan=Plan(narrow, narrow),
        )  # fmt: skip


def test_refuses_what_does_not_fit():
    x, ids, weights, gate_up, down = map(jnp.asarray, problem("random", 4, 24, 13, 5, 3))
    with pytest.raises(ValueError, match="expert_weights"):
        op.grouped_mlp(x, ids, weights[:, :2], gate_up, down, limit=1.0)
    with pytest.raises(ValueError, match="down"):
        op.grouped_mlp(x, ids, weights, gate_up, down[:, :, :5], limit=1.0)
    with pytest.raises(ValueError, match="float8 weights"):
        op.grouped_mlp(x, ids, weights, gate_up, down, limit=1.0, quantize_activations=True)
    with pytest.raises(ValueError, match="does not support"):
        op.grouped_mlp(x, ids, weights, gate_up, down, limit=1.0, implementation="interpret")


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("inner", [2048, 256])
@pytest.mark.parametrize("tokens", [1, 32, 512, 8192])
def test_lowers(tokens: int, inner: int, platform: str):
    """The released model's widths, whole and split over eight devices."""
    experts, dim, k = 288, 4096, 8

    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    routing = (
        shape(jnp.bfloat16, tokens, dim),
        shape(jnp.int32, tokens, k),
        shape(jnp.float32, tokens, k),
    )
    blocks = dim // 128, inner // 128
    scales = (
        shape(jnp.float32, experts, 2, blocks[1], blocks[0]),
        shape(jnp.float32, experts, blocks[0], blocks[1]),
    )

    def run(x, ids, weights, gate_up, down, gate_up_scales=None, down_scales=None, quantize=False):
        return op.grouped_mlp(
            x,
            ids,
            weights,
            gate_up,
            down,
            limit=10.0,
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
            quantize_activations=quantize,
            implementation="triton",
        )

    for dtype, extra, quantize in (
        (jnp.bfloat16, (), False),
        (jnp.float8_e4m3fn, scales, False),
        (jnp.float8_e4m3fn, scales, True),
    ):
        weights = (shape(dtype, experts, 2, inner, dim), shape(dtype, experts, dim, inner))
        text = lower(lambda *a, q=quantize: run(*a, quantize=q), (*routing, *weights, *extra), platform)
        assert text.count("__gpu$xla.gpu.triton") == 3
