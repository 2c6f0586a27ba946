"""KDA prefill's token-parallel kernel: everything of a chunk that does not need the state.

`kda_reference` has the chunk mathematics. Chunks of 16, 32 or 64 tokens are built from sub-blocks of 16:
inside a sub-block decays are measured from its start, so with log_decay >= -5 no exponent passes
16 x 5 = 80 nats and float32 holds; between sub-blocks every exponent is split at the first token of the
later half, which keeps both factors at most one. A pivot never depends on a later token, so earlier outputs
are bit-equal when later tokens change.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.kda_chunk_plan import ChunkPlan
from pallas_kernels.triton import Launch

SUB_BLOCK = 16
LOWEST_GATE = -5.0
LOG2_E = math.log2(math.e)
# Half of a sub-block's largest decay. Factors exp(G + shift) and exp(-G - shift) stay within e^-40..e^40, so
# float32 keeps its relative precision where the start alone would reach e^80. A constant, so still causal.
SHIFT = -SUB_BLOCK * LOWEST_GATE / 2


def _group_sums(sums: jax.Array, group: int, *, earlier: bool) -> jax.Array:
    """[blocks, K]: for each block the sum over the earlier (later) blocks of its group of `group` blocks."""
    ids = jnp.arange(sums.shape[0])
    block, other = ids[:, None], ids[None, :]
    mask = (block // group == other // group) & (other < block if earlier else other > block)
    return jnp.sum(jnp.where(mask[:, :, None], sums[None, :, :], 0.0), axis=1)


def _exp(x: jax.Array, shift: float = 0.0) -> jax.Array:
    """exp(x + shift) as exp2 of one multiply-add: exp is a library call on the GPU, exp2 one instruction."""
    return jnp.exp2(x * LOG2_E + shift * LOG2_E)


def _intra_kernel(
    start_ref: Any,
    length_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    decay_ref: Any,
    beta_ref: Any,
    values_ref: Any,
    weights_ref: Any,
    queries_ref: Any,
    keys_ref: Any,
    scores_ref: Any,
    total_ref: Any,
    *,
    size: int,
    precision: str,
) -> None:
    """One chunk of one head: everything of the chunk form that does not need the state."""
    blocks = size // SUB_BLOCK
    chunk, head = pl.program_id(0), pl.program_id(1)
    key_dim = q_ref.shape[-1]
    length = length_ref[chunk]
    dot = functools.partial(triton.dot, precision=precision)
    operand = weights_ref.dtype

    @pl.when(length > 0)
    def run() -> None:
        rows = jnp.arange(size)
        tokens = (start_ref[chunk] + rows)[:, None]
        valid = rows[:, None] < length

        def tile(ref: Any) -> jax.Array:
            index = ref.at[tokens, head, jnp.arange(ref.shape[-1])[None, :]]
            return triton.load(index, mask=valid, other=0.0)

        def expand(x: jax.Array) -> jax.Array:  # [blocks, K] -> [C, K]
            return jnp.broadcast_to(x[:, None, :], (blocks, SUB_BLOCK, key_dim)).reshape(size, key_dim)

        beta = triton.load(beta_ref.at[start_ref[chunk] + rows, head], mask=rows < length, other=0.0)
        beta = beta.astype(jnp.float32)
        log_decay = tile(decay_ref).astype(jnp.float32).reshape(blocks, SUB_BLOCK, key_dim)
        sums = jnp.sum(log_decay, axis=1)
        local = jnp.cumsum(log_decay, axis=1).reshape(size, key_dim)
        before, after = _group_sums(sums, blocks, earlier=True), _group_sums(sums, blocks, earlier=False)
        decayed, inverse = _exp(local, SHIFT), _exp(-local, -SHIFT)

        q_rows = tile(q_ref).astype(jnp.float32) * decayed
        before = expand(_exp(before, -SHIFT))
        queries_ref[...] = (q_rows * before).astype(operand)
        k = tile(k_ref).astype(jnp.float32)
        k_rows, k_columns = k * decayed, k * inverse
        decayed_k = (k_rows * before).astype(operand)
        keys_ref[...] = (k_columns * expand(_exp(sums + after, SHIFT))).astype(operand)
        q_rows, k_rows = q_rows.astype(operand), k_rows.astype(operand)

        row, column = rows[:, None], rows[None, :]
        apart = row ^ column  # its highest set bit names the level at which two tokens part
        scores = dot(q_rows, k_columns.astype(operand), trans_b=True)
        coupling = dot(k_rows, k_columns.astype(operand), trans_b=True)
        # k exp(G_end - G) of each sub-block; then halves of 32, 64: rows of the later half decay from the
        # start of their half, columns of the earlier half decay to its end.
        level = SUB_BLOCK.bit_length() - 1
        while 1 << level < size:
            group = (1 << level) // SUB_BLOCK
            q_half, k_half = q_rows, k_rows
            if group > 1:
                inside = expand(_exp(_group_sums(sums, group, earlier=True))).astype(operand)
                q_half, k_half = q_half * inside, k_half * inside
            to_end = sums + _group_sums(sums, group, earlier=False) if group > 1 else sums
            columns = (k_columns * expand(_exp(to_end))).astype(operand)
            parted = apart >> level == 1
            scores = jnp.where(parted, dot(q_half, columns, trans_b=True), scores)
            coupling = jnp.where(parted, dot(k_half, columns, trans_b=True), coupling)
            level += 1
        scores_ref[...] = jnp.where(row >= column, scores, 0.0).astype(operand)
        coupling = jnp.where(row > column, beta[:, None] * coupling, 0.0)

        # (I + A)^-1 by doubling the inverted diagonal blocks: every intermediate is the inverse of a
        # sub-block, so its entries stay moderate where powers of A would blow up on correlated keys.
        solved = jnp.where(row == column, 1.0, 0.0) - jnp.where(apart == 1, coupling, 0.0)
        for level in range(1, size.bit_length() - 1):
            off = jnp.where(apart >> level == 1, coupling, 0.0)
            solved -= dot(dot(solved, off), solved)
        solved = (solved * beta[None, :]).astype(operand)
        weights_ref[...] = (-dot(solved, decayed_k)).astype(operand)
        values_ref[...] = dot(tile(v_ref), solved, trans_a=True, trans_b=True).astype(operand)
        total_ref[...] = _exp(jnp.sum(sums, axis=0))


def intra(
    plan: ChunkPlan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    chunk: int,
    launch: Launch,
    precision: str,
    interpret: bool,
) -> list[jax.Array]:
    """Terms of every chunk, [H, N, ...], in v's dtype but for the last, which is float32.

    U transposed [V, C]; -W, Q exp(G) and K exp(G_C - G) [C, K]; P [C, C]; exp(G_C) [K]. Slots of the plan
    without tokens are not written.
    """
    heads, key_dim, value_dim = q.shape[1], q.shape[2], v.shape[2]
    chunks = plan.start.shape[0]
    tile = (chunk, key_dim)
    shapes: list[tuple[int, ...]] = [(value_dim, chunk), tile, tile, tile, (chunk, chunk), (key_dim,)]
    dtypes = [v.dtype] * 5 + [jnp.float32]

    def block(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda c, h: (h, c) + (0,) * len(shape))

    return triton.pallas_call(
        functools.partial(_intra_kernel, size=chunk, precision=precision),
        out_shape=[
            jax.ShapeDtypeStruct((heads, chunks, *shape), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ],
        grid=(chunks, heads),
        out_specs=[block(shape) for shape in shapes],
        cuda=launch,
        rocm=launch,
        interpret=interpret,
        name="kda_prefill_intra",
    )(plan.start, plan.length, q, k, v, log_decay, beta)
