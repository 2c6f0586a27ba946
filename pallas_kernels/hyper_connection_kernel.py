"""Hyper-connections on Pallas-Triton, Sinkhorn's iteration in registers.

Two launches a boundary. `mix` reads the streams once, applies the previous block's output to them when there
is one, and leaves partial sums of squares and of the projection by fn; it is split over channels so that a
few tokens still fill the device. `gates` adds the partial sums, computes gates and comb for one token a lane
(n x n entries are n x n vectors) and collapses the streams.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.triton_layout import compute_once

STREAMS = 4
_MIXES = STREAMS * (2 + STREAMS)
_PADDED_MIXES = 32  # a dot's columns are a power of two


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tokens and channels of one step of either launch, and into how many parts the channels are split."""

    tokens: int
    mix_channels: int
    mix_splits: int
    gate_channels: int
    gate_splits: int
    mix: triton.Launch
    gates: triton.Launch


def supports(streams: jax.Array, fn: jax.Array) -> bool:
    """Four bfloat16 streams of a multiple of 128 channels, projected by bfloat16 rows."""
    _, n, dim = streams.shape
    return n == STREAMS and dim % 128 == 0 and streams.dtype == jnp.bfloat16 and fn.dtype == jnp.bfloat16


def cuda_plan(tokens: int, dim: int) -> Plan:
    """Tiles for NVIDIA: 16 tokens of as many channels as give every warp whole cache lines.

    The update is computed once (`compute_once`), so that warps divide it by channels or by tokens alike. Four
    programs of four warps fit in a multiprocessor with two steps of loads on their way. A program of few
    tokens has one step, whose loads all start at once.
    """
    many = tokens >= 1024
    splits = min(4, (dim & -dim) // 128) if many else _splits(tokens, dim)[1]
    gates = triton.Launch(4 if many else 1, 1)
    if dim // splits == 128:
        return Plan(16, 128, splits, 128, splits, triton.Launch(8, 1), gates)
    return Plan(16, 64, splits, 128, splits, triton.Launch(4, 3), gates)


def rocm_plan(tokens: int, dim: int) -> Plan:
    """Tiles for AMD."""
    mix_splits, gate_splits = _splits(tokens, dim)
    return Plan(16, 64, mix_splits, 128, gate_splits, triton.Launch(4, 1), triton.Launch(4, 1))


def _splits(tokens: int, dim: int) -> tuple[int, int]:
    """Parts that bring the number of programs to some hundreds, each at least 128 channels."""
    most = (dim & -dim) // 128
    token_tiles = -(-tokens // 16)
    wanted = 1 << max(0, (256 // token_tiles).bit_length() - 1)
    return min(most, wanted, 16), min(most, wanted)


def hyper_connection_triton(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    update: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
    interpret: bool = False,
    plan: Plan | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`hyper_connection_pre` of the streams, or of `hyper_connection_post(streams, *update)` if given.

    update: (out, post, comb). Returns (streams after the update, hidden, post, comb).
    """
    run = partial(
        _run,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        sinkhorn_iterations=sinkhorn_iterations,
        interpret=interpret,
    )
    arrays: tuple[Any, ...] = (streams, fn, base, scale, update)
    sizes = (streams.shape[0], streams.shape[2])
    if plan is not None or interpret:
        return run(plan or cuda_plan(*sizes), *arrays)
    return triton.per_platform(run, *arrays, cuda=cuda_plan(*sizes), rocm=rocm_plan(*sizes))


def hyper_connection_post_triton(
    streams: jax.Array,
    out: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    *,
    interpret: bool = False,
    plan: Plan | None = None,
) -> jax.Array:
    """`hyper_connection_post` alone, for the boundary after which nothing is collapsed."""
    sizes = (streams.shape[0], streams.shape[2])

    def run(plan: Plan, *arrays: jax.Array) -> jax.Array:
        return _mix(plan, arrays[0], arrays[1:], None, interpret)[0]

    arrays = (streams, out, post, comb)
    if plan is not None or interpret:
        return run(plan or cuda_plan(*sizes), *arrays)
    return triton.per_platform(run, *arrays, cuda=cuda_plan(*sizes), rocm=rocm_plan(*sizes))


def _run(
    plan: Plan,
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    update: tuple[jax.Array, jax.Array, jax.Array] | None,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    tokens, _, dim = streams.shape
    mixed = _mix(plan, streams, update, fn, interpret)
    if update is not None:
        streams = mixed[0]
    kernel = partial(
        _gates_kernel, plan, norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iterations=sinkhorn_iterations
    )
    wide = jnp.float32
    hidden, post, comb = triton.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((tokens, dim), streams.dtype),
            jax.ShapeDtypeStruct((tokens, STREAMS), wide),
            jax.ShapeDtypeStruct((tokens, STREAMS, STREAMS), wide),
        ),
        grid=(triton.cdiv(tokens, plan.tokens), plan.gate_splits),
        cuda=plan.gates,
        rocm=plan.gates,
        interpret=interpret,
        name="hyper_connection_gates",
    )(streams, *mixed[-2:], base.astype(wide), scale.astype(wide))
    return streams, hidden, post, comb


def _mix(
    plan: Plan,
    streams: jax.Array,
    update: tuple[jax.Array, ...] | None,
    fn: jax.Array | None,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """(updated streams if there is an update, partial projections [splits, mixes, tokens] and sums of
    squares [splits, tokens] if there is an fn)."""
    tokens, n, dim = streams.shape
    inputs = {"streams": streams}
    outputs = {}
    if update is not None:
        inputs |= dict(zip(("out", "post", "comb"), update, strict=True))
        outputs["updated"] = jax.ShapeDtypeStruct(streams.shape, streams.dtype)
    if fn is not None:
        inputs["fn"] = fn.reshape(_MIXES, n, dim)
        outputs["mixes"] = jax.ShapeDtypeStruct((plan.mix_splits, _PADDED_MIXES, tokens), jnp.float32)
        outputs["squares"] = jax.ShapeDtypeStruct((plan.mix_splits, tokens), jnp.float32)
    return triton.pallas_call(
        partial(_mix_kernel, plan, (*inputs, *outputs)),
        out_shape=tuple(outputs.values()),
        grid=(triton.cdiv(tokens, plan.tokens), plan.mix_splits),
        cuda=plan.mix,
        rocm=plan.mix,
        interpret=interpret,
        name="hyper_connection_mix",
    )(*inputs.values())


def _mix_kernel(plan: Plan, names: tuple[str, ...], *refs: Any) -> None:
    ref = dict(zip(names, refs, strict=True))
    tokens, _, dim = ref["streams"].shape
    index = triton.program_id(0) * plan.tokens + jnp.arange(plan.tokens)
    real = index < tokens
    safe = jnp.minimum(index, tokens - 1)
    split = triton.program_id(1)
    channels = dim // plan.mix_splits
    if "out" in ref:
        post = [ref["post"][safe, k][:, None] for k in range(STREAMS)]
        comb = [[ref["comb"][safe, j, k][:, None] for k in range(STREAMS)] for j in range(STREAMS)]
    outputs = jnp.arange(_PADDED_MIXES)

    def step(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        mixes, squares = sums
        start = split * channels + i * plan.mix_channels
        span = pl.ds(start, plan.mix_channels)
        column = (start + jnp.arange(plan.mix_channels))[None, :]
        streams = [ref["streams"][safe, k, span] for k in range(STREAMS)]
        if "fn" in ref:
            row = outputs[:, None]
            at = jnp.minimum(row, _MIXES - 1)
            rows = [
                triton.load(ref["fn"].at[at, k, column], mask=row < _MIXES, other=0.0) for k in range(STREAMS)
            ]
        if "out" in ref:
            wide = [stream.astype(jnp.float32) for stream in streams]
            out = ref["out"][safe, span].astype(jnp.float32)
            for k in range(STREAMS):
                total = post[k] * out
                for j in range(STREAMS):
                    total += comb[j][k] * wide[j]
                streams[k] = compute_once(total.astype(ref["streams"].dtype))  # stored, and in a dot
                triton.store(ref["updated"].at[index[:, None], k, column], streams[k], mask=real[:, None])
        if "fn" in ref:
            for k in range(STREAMS):
                # Products of two bfloat16 are exact in float32. Streams are the left operand: warps divide
                # its rows, whereas each holds all of the right one. A program of a single step has no loop
                # that would keep the right one's change of layout from moving up to its load.
                weights = compute_once(rows[k]) if channels == plan.mix_channels else rows[k]
                mixes += triton.dot(streams[k], weights, trans_b=True)
            squares += sum(jnp.square(stream.astype(jnp.float32)) for stream in streams)
        return mixes, squares

    zeros = tuple(
        jnp.zeros((plan.tokens, width), jnp.float32) for width in (_PADDED_MIXES, plan.mix_channels)
    )
    mixes, squares = jax.lax.fori_loop(0, channels // plan.mix_channels, step, zeros)
    if "fn" in ref:
        triton.store(ref["mixes"].at[split, outputs[None, :], index[:, None]], mixes, mask=real[:, None])
        triton.store(ref["squares"].at[split, index], jnp.sum(squares, axis=1), mask=real)


def _gates_kernel(
    plan: Plan,
    streams_ref: Any,
    mixes_ref: Any,
    squares_ref: Any,
    base_ref: Any,
    scale_ref: Any,
    hidden_ref: Any,
    post_ref: Any,
    comb_ref: Any,
    *,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iterations: int,
) -> None:
    tokens, n, dim = streams_ref.shape
    index = triton.program_id(0) * plan.tokens + jnp.arange(plan.tokens)
    real = index < tokens
    safe = jnp.minimum(index, tokens - 1)
    channels = dim // plan.gate_splits
    tiles = channels // plan.gate_channels
    # What `mix` wrote last is still in the cache: it is read first.
    begin = (plan.gate_splits - 1 - triton.program_id(1)) * channels

    def load_streams(tile: int | jax.Array) -> tuple[jax.Array, ...]:
        span = pl.ds(begin + tile * plan.gate_channels, plan.gate_channels)
        return tuple(streams_ref[safe, k, span] for k in range(n))

    first = load_streams(0)  # on its way while the gates are computed
    parts = jnp.arange(plan.mix_splits)[:, None]

    def total(ref: Any, *row: int) -> jax.Array:
        if plan.mix_splits > 8:
            return jnp.sum(ref[(parts, *row, safe[None, :])], axis=0)
        # One by one: a sum over a tile's rows goes through shared memory once for each of the mixes.
        return functools.reduce(jnp.add, [ref[(part, *row, safe)] for part in range(plan.mix_splits)])

    norm = jax.lax.rsqrt(total(squares_ref) / (n * dim) + norm_eps)

    def mix(row: int, kind: int) -> jax.Array:
        return total(mixes_ref, row) * norm * scale_ref[kind] + base_ref[row]

    pre = [jax.nn.sigmoid(mix(k, 0)) + hc_eps for k in range(n)]

    @pl.when(triton.program_id(1) == 0)
    def _() -> None:
        for k in range(n):
            triton.store(post_ref.at[index, k], 2 * jax.nn.sigmoid(mix(n + k, 1)), mask=real)
        rows = [_softmax([mix(2 * n + j * n + k, 2) for k in range(n)]) for j in range(n)]
        comb = tuple(entry + hc_eps for row in rows for entry in row)

        def step(_: jax.Array, comb: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return _divide_columns(_divide_rows(comb, n, hc_eps), n, hc_eps)

        comb = jax.lax.fori_loop(0, sinkhorn_iterations - 1, step, _divide_columns(comb, n, hc_eps))
        for j in range(n):
            for k in range(n):
                triton.store(comb_ref.at[index, j, k], comb[j * n + k], mask=real)

    def collapse(tile: jax.Array, streams: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        following = load_streams(jnp.minimum(tile + 1, tiles - 1))
        hidden = jnp.zeros((plan.tokens, plan.gate_channels), jnp.float32)
        for k in range(n):
            hidden += pre[k][:, None] * streams[k].astype(jnp.float32)
        column = begin + tile * plan.gate_channels + jnp.arange(plan.gate_channels)
        place = (index[:, None], column[None, :])
        triton.store(hidden_ref.at[place], hidden.astype(hidden_ref.dtype), mask=real[:, None])
        return following

    jax.lax.fori_loop(0, tiles, collapse, first)


def _softmax(entries: list[jax.Array]) -> list[jax.Array]:
    largest = entries[0]
    for entry in entries[1:]:
        largest = jnp.maximum(largest, entry)
    powers = [jnp.exp(entry - largest) for entry in entries]
    total = sum(powers[1:], powers[0])
    return [power / total for power in powers]


def _divide_rows(comb: tuple[jax.Array, ...], n: int, eps: float) -> tuple[jax.Array, ...]:
    inverse = [1 / (sum(comb[j * n + 1 : (j + 1) * n], comb[j * n]) + eps) for j in range(n)]
    return tuple(comb[j * n + k] * inverse[j] for j in range(n) for k in range(n))


def _divide_columns(comb: tuple[jax.Array, ...], n: int, eps: float) -> tuple[jax.Array, ...]:
    inverse = [1 / (sum(comb[k + n :: n], comb[k]) + eps) for k in range(n)]
    return tuple(comb[j * n + k] * inverse[k] for j in range(n) for k in range(n))
