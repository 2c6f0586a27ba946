"""KDA prefill on Pallas-Triton: a token-parallel kernel, then one that is serial over a row's chunks.

`kda_reference` has the chunk mathematics. Chunks of 16, 32 or 64 tokens are built from sub-blocks of 16:
inside a sub-block decays are measured from its start, so with log_decay >= -5 no exponent passes
16 x 5 = 80 nats and float32 holds; between sub-blocks every exponent is split at the first token of the
later half, which keeps both factors at most one. A pivot never depends on a later token, so earlier outputs
are bit-equal when later tokens change.

The state kernel holds its state transposed, [columns, K], in registers: every product then has the state or
the update as its left operand, and no operand of the serial chain passes through shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.kda_chunk_plan import ChunkPlan, chunk_plan
from pallas_kernels.triton import Launch

SUB_BLOCK = 16
LOWEST_GATE = -5.0
# Half of a sub-block's largest decay: measured from its middle of the range, no factor leaves e^-40..e^40, so
# float32 keeps its relative precision where the start alone would reach e^80. A constant, so still causal.
LOG2_E = math.log2(math.e)
SHIFT = -SUB_BLOCK * LOWEST_GATE / 2
SKIP, ZERO = -1, -2  # of SequencePlan.target


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Tiles and launch parameters of the prefill kernels on one platform."""

    chunk: int  # tokens: 16, 32 or 64
    columns: int  # value columns of one program of the state kernel
    intra: Launch
    state: Launch
    precision: str  # of the dots of float32 operands when the inputs are bfloat16
    segments: int = 1  # parts of a row whose states run in parallel, joined by their affine maps


CUDA = PrefillConfig(
    chunk=32, columns=64, intra=Launch(4, 1), state=Launch(4, num_stages=2), precision="tf32"
)
ROCM = PrefillConfig(
    chunk=32, columns=64, intra=Launch(4, 1), state=Launch(4, num_stages=1), precision="ieee"
)


def choose(config: PrefillConfig, tokens: int, rows: int, heads: int) -> PrefillConfig:
    """Narrower tiles, then segments, where rows and heads alone leave most of the GPU idle."""
    if rows * heads >= 64:
        return config
    narrow = dataclasses.replace(config, columns=32, state=dataclasses.replace(config.state, num_warps=2))
    if rows * heads > 16 or tokens < 4096:
        return narrow
    return dataclasses.replace(narrow, segments=min(16, tokens // 2048))


def supported(q: jax.Array, v: jax.Array, gate_lower_bound: float | None) -> bool:
    """Whether the kernels take these shapes, dtypes and gates."""
    dims = (q.shape[-1], v.shape[-1])
    return (
        gate_lower_bound is not None
        and gate_lower_bound >= LOWEST_GATE
        and all(dim >= 16 and dim & (dim - 1) == 0 for dim in dims)
        and all(x.dtype in (jnp.float32, jnp.bfloat16) for x in (q, v))
        and q.shape[0] > 0
    )


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
    start_ref, count_ref, q_ref, k_ref, v_ref, decay_ref, beta_ref,
    values_ref, weights_ref, queries_ref, keys_ref, scores_ref, total_ref, *, config, precision,
):  # fmt: skip
    """One chunk of one head: everything of the chunk form that does not need the state."""
    size, blocks = config.chunk, config.chunk // SUB_BLOCK
    chunk, head = pl.program_id(0), pl.program_id(1)
    key_dim = q_ref.shape[-1]
    count = count_ref[chunk]
    dot = functools.partial(triton.dot, precision=precision)
    operand = weights_ref.dtype

    @pl.when(count > 0)
    def _():
        rows = jnp.arange(size)
        tokens = (start_ref[chunk] + rows)[:, None]
        valid = rows[:, None] < count

        def tile(ref):
            index = ref.at[tokens, head, jnp.arange(ref.shape[-1])[None, :]]
            return triton.load(index, mask=valid, other=0.0)

        def expand(x):  # [blocks, K] -> [C, K]
            return jnp.broadcast_to(x[:, None, :], (blocks, SUB_BLOCK, key_dim)).reshape(size, key_dim)

        beta = triton.load(beta_ref.at[start_ref[chunk] + rows, head], mask=rows < count, other=0.0)
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


def _intra(
    config: PrefillConfig, plan: ChunkPlan, q, k, v, log_decay, beta, *, operand, precision, interpret
):
    """Terms of every chunk, [H, N, ...].

    U transposed [V, C]; -W, Q exp(G) and K exp(G_C - G) [C, K]; P [C, C]; exp(G_C) [K].
    """
    heads, key_dim, value_dim = q.shape[1], q.shape[2], v.shape[2]
    chunks, size = plan.start.shape[0], config.chunk
    shapes = [(value_dim, size), (size, key_dim), (size, key_dim), (size, key_dim), (size, size), (key_dim,)]
    dtypes = [operand] * 5 + [jnp.float32]

    def block(shape):
        return pl.BlockSpec((None, None, *shape), lambda c, h: (h, c) + (0,) * len(shape))

    return triton.pallas_call(
        functools.partial(_intra_kernel, config=config, precision=precision),
        out_shape=[
            jax.ShapeDtypeStruct((heads, chunks, *shape), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ],
        grid=(chunks, heads),
        out_specs=[block(shape) for shape in shapes],
        cuda=config.intra,
        rocm=config.intra,
        interpret=interpret,
        name="kda_prefill_intra",
    )(plan.start, plan.count, q, k, v, log_decay, beta)


def _advance(state, chunk, head, values, total, refs, dot):
    """One chunk of the transposed state [width, K]: (state after it, its output transposed [width, C]).

    `values` [width, C] is U transposed, `total` [K] the chunk's decay.
    """
    weights_ref, queries_ref, keys_ref, scores_ref = refs
    operand = weights_ref.dtype
    narrow = state.astype(operand)
    update = (values + dot(narrow, weights_ref[head, chunk], trans_b=True)).astype(operand)
    out = dot(narrow, queries_ref[head, chunk], trans_b=True) + dot(
        update, scores_ref[head, chunk], trans_b=True
    )
    return state * total[None, :] + dot(update, keys_ref[head, chunk]), out


def _state_kernel(
    bounds_ref, target_ref, final_ref, start_ref, count_ref, initial_ref, values_ref, *refs,
    size, width, marks, carried, precision,
):  # fmt: skip
    """Some value columns of one head over the chunks of one sequence, with the state in registers."""
    *refs, total_ref, out_ref, states_ref, snapshots_ref = refs
    sequence, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    columns = pl.ds(block * width, width)
    dot = functools.partial(triton.dot, precision=precision)
    if carried:
        state = initial_ref[sequence, head, columns, :]
    else:
        state = initial_ref[sequence, head, :, columns].astype(jnp.float32).T

    def fetch(chunk):  # what a step needs outside its dots, loaded one step ahead of its use
        chunk = jnp.minimum(chunk, start_ref.shape[0] - 1)
        return total_ref[head, chunk], start_ref[chunk], count_ref[chunk]

    def step(chunk, carry):
        state, (total, start, count) = carry
        following = fetch(chunk + 1)
        values = values_ref[head, chunk, columns, :].astype(jnp.float32)
        state, out = _advance(state, chunk, head, values, total, refs, dot)
        rows = jnp.arange(size)
        tokens, channels = start + rows, block * width + jnp.arange(width)
        index = out_ref.at[tokens[:, None], head, channels[None, :]]
        triton.store(index, out.T.astype(out_ref.dtype), mask=rows[:, None] < count)
        return state, following

    def until_bound(bound, state):
        first, stop = bounds_ref[sequence, bound], bounds_ref[sequence, bound + 1]
        state, _ = jax.lax.fori_loop(first, stop, step, (state, fetch(first)))
        target, row = target_ref[sequence, bound], final_ref[sequence]

        @pl.when(target != SKIP)
        def _():
            slot = jnp.where(target >= 0, target, ZERO - target)
            snapshots_ref[slot, head, :, columns] = jnp.where(target >= 0, state, 0.0).T

        @pl.when((bound == marks) & (row >= 0))
        def _():
            states_ref[row, head, :, columns] = state.T

        return state

    # One loop over bounds, the end included, so that the chunk loop is compiled once.
    jax.lax.fori_loop(0, marks + 1, until_bound, state)


def _segment_kernel(bounds_ref, values_ref, *refs, width, precision):
    """The affine map of one segment: S_after = M S_before + b, as rows [b^T; M^T] of the output."""
    *refs, total_ref, maps_ref = refs
    sequence, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    value_dim, key_dim = values_ref.shape[2], maps_ref.shape[3]
    dot = functools.partial(triton.dot, precision=precision)
    row = block * width
    offset = row + jnp.arange(width) - value_dim  # row of M^T, negative in b^T
    state = jnp.where(offset[:, None] == jnp.arange(key_dim)[None, :], 1.0, 0.0)
    columns = pl.ds(jnp.where(row < value_dim, row, 0), width)

    def fetch(chunk):
        return total_ref[head, jnp.minimum(chunk, total_ref.shape[1] - 1)]

    def step(chunk, carry):
        state, total = carry
        following = fetch(chunk + 1)
        values = values_ref[head, chunk, columns, :].astype(jnp.float32)
        values = jnp.where(row < value_dim, values, 0.0)
        return _advance(state, chunk, head, values, total, refs, dot)[0], following

    first, stop = bounds_ref[sequence, 0], bounds_ref[sequence, 1]
    state, _ = jax.lax.fori_loop(first, stop, step, (state, fetch(first)))
    maps_ref[sequence, head, pl.ds(row, width), :] = state


def _join_kernel(initial_ref, maps_ref, carried_ref, *, width, segments, precision):
    """Transposed states before each segment of a row, from its initial state and its segments' maps."""
    row, head, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    value_dim, key_dim = carried_ref.shape[2], carried_ref.shape[3]
    columns = pl.ds(block * width, width)

    def step(segment, state):
        sequence = row * segments + segment
        carried_ref[sequence, head, columns, :] = state
        transposed_map = maps_ref[sequence, head, pl.ds(value_dim, key_dim), :]
        return triton.dot(state, transposed_map, precision=precision) + maps_ref[sequence, head, columns, :]

    state = initial_ref[row, head, :, columns].astype(jnp.float32).T
    jax.lax.fori_loop(0, segments, step, state)


class SequencePlan(NamedTuple):
    """Chunk ranges of the state kernel's sequences: Q = R rows times their segments, in order."""

    bounds: jax.Array  # [Q, M + 2] first chunk, the ends of the row's checkpoints in order, last chunk's end
    target: (
        jax.Array
    )  # [Q, M + 1] flat snapshot r * M + m to write at a bound, ZERO - that for zeros, or SKIP
    final: jax.Array  # [Q] row whose final state this sequence ends with, or -1


def sequence_plan(plan: ChunkPlan, segments: int) -> SequencePlan:
    rows, marks = plan.checkpoint_end.shape
    first, length = plan.first[:-1, None], (plan.first[1:] - plan.first[:-1])[:, None]
    part = jnp.arange(segments + 1, dtype=jnp.int32)[None, :]
    edges = first + (length * part + segments - 1) // segments
    start, stop = edges[:, :-1, None], edges[:, 1:, None]
    order = jnp.argsort(plan.checkpoint_end, axis=1).astype(jnp.int32)
    end = jnp.take_along_axis(plan.checkpoint_end, order, axis=1)[:, None, :]
    slot = (jnp.arange(rows, dtype=jnp.int32)[:, None] * marks + order)[:, None, :]
    unused = (end < 0) & (part[..., :-1, None] == 0)
    target = jnp.where((start < end) & (end <= stop), slot, jnp.where(unused, ZERO - slot, SKIP))
    bounds = jnp.concatenate([start, jnp.clip(end, start, stop), stop], axis=2)
    last = part[:, :-1] == segments - 1
    final = jnp.where(last, jnp.arange(rows, dtype=jnp.int32)[:, None], -1)
    return SequencePlan(
        bounds=bounds.reshape(rows * segments, marks + 2),
        target=jnp.pad(target.reshape(rows * segments, marks), ((0, 0), (0, 1)), constant_values=SKIP),
        final=final.reshape(rows * segments),
    )


def prefill(q, k, v, log_decay, beta, initial_state, cu_seqlens, checkpoints, *, config, interpret=False):
    """The kernels' `kda.kda_prefill`: out, final states and snapshots [R, M, H, K, V] (M may be 0)."""
    tokens, heads, key_dim = q.shape
    rows, marks = checkpoints.shape
    value_dim, width, segments = v.shape[2], min(config.columns, v.shape[2]), config.segments
    wide = v.dtype == jnp.float32
    operand = jnp.float32 if wide else v.dtype
    precision = "ieee" if wide else config.precision
    plan = chunk_plan(cu_seqlens, checkpoints, tokens, config.chunk)
    values, *terms = _intra(
        config, plan, q, k, v, log_decay, beta, operand=operand, precision=precision, interpret=interpret
    )
    sequences = sequence_plan(plan, segments)
    count = rows * segments
    launch = {"cuda": config.state, "rocm": config.state, "interpret": interpret}
    initial = initial_state
    if segments > 1:
        if width > key_dim:
            raise ValueError(f"columns {width} of the state kernel exceed the key dimension {key_dim}")
        maps = triton.pallas_call(
            functools.partial(_segment_kernel, width=width, precision="ieee"),
            out_shape=jax.ShapeDtypeStruct((count, heads, value_dim + key_dim, key_dim), jnp.float32),
            grid=(count, heads, (value_dim + key_dim) // width),
            name="kda_prefill_segment",
            **launch,
        )(sequences.bounds[:, :: marks + 1], values, *terms)
        initial = triton.pallas_call(
            functools.partial(_join_kernel, width=width, segments=segments, precision="ieee"),
            out_shape=jax.ShapeDtypeStruct((count, heads, value_dim, key_dim), jnp.float32),
            grid=(rows, heads, value_dim // width),
            name="kda_prefill_join",
            **launch,
        )(initial_state, maps)
    out, states, snapshots = triton.pallas_call(
        functools.partial(
            _state_kernel, size=config.chunk, width=width, marks=marks, carried=segments > 1, precision="ieee"
        ),
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
            jax.ShapeDtypeStruct((max(rows * marks, 1), heads, key_dim, value_dim), jnp.float32),
        ],
        grid=(count, heads, value_dim // width),
        name="kda_prefill_state",
        **launch,
    )(*sequences, plan.start, plan.count, initial, values, *terms)
    real = jnp.arange(tokens) < cu_seqlens[-1]
    out = jnp.where(real[:, None, None], out, 0)  # nothing wrote the padding; this fuses with what reads it
    return out, states, snapshots[: rows * marks].reshape(rows, marks, heads, key_dim, value_dim)
