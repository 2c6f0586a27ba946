"""The edge of top-k or top-p on Pallas-Triton, without a sort.

A few passes over the logits divide a bracket around the edge by eight each; then the logits left inside the
bracket are gathered and one program a row bisects them exactly. A row with more equal or nearly equal logits
in its bracket than are gathered is bisected over its whole vocabulary: slow, but as exact. Rows that are not
active leave every launch at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton

_THRESHOLDS = 8
_PASSES = 3
_LAUNCH = triton.Launch(num_warps=4, num_stages=1)
_SETTLE = triton.Launch(num_warps=8, num_stages=1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """tile: logits a program; capacity: logits gathered from a bracket; both powers of two."""

    tile: int = 4096
    capacity: int = 4096
    launch: triton.Launch = _LAUNCH
    settle: triton.Launch = _SETTLE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What is kept of each row so far, [rows] float32: scaled = (logit - largest) * inverse must reach
    log_min_p, and the logit the floor."""

    largest: jax.Array
    inverse: jax.Array
    log_min_p: jax.Array
    floor: jax.Array

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.largest, self.inverse, self.log_min_p, self.floor


def edge(
    plan: Plan,
    logits: jax.Array,
    rows: Rows,
    active: jax.Array,
    *,
    lowest: jax.Array,
    target: jax.Array,
    counting: bool,
    interpret: bool,
) -> jax.Array:
    """The largest logit of each row at or above which `target` tokens are kept (counting), or the share
    `target` of the probability mass kept at or above `lowest`; -inf where there is none or the row is not
    active."""
    tiles = triton.cdiv(logits.shape[1], plan.tile)
    low, high = lowest, jnp.nextafter(rows.largest, jnp.float32(jnp.inf))
    above = jnp.zeros_like(low)
    high_counts = jnp.zeros((logits.shape[0], tiles), jnp.int32)
    wanted = target
    steps = jnp.arange(_THRESHOLDS, dtype=jnp.float32) / _THRESHOLDS
    for narrowing in range(_PASSES):
        thresholds = low[:, None] + (high - low)[:, None] * steps
        weights, counts = _measure(plan, logits, rows, active, thresholds, counting, interpret)
        sums = weights.sum(axis=-1)
        if narrowing == 0 and not counting:
            wanted = target * sums[:, 0]
        last = (sums >= wanted[:, None]).sum(axis=1) - 1
        active = active & (last >= 0)
        inside = last < _THRESHOLDS - 1

        def pick(values: jax.Array, index: jax.Array) -> jax.Array:
            index = jnp.clip(index, 0, _THRESHOLDS - 1).reshape(-1, *[1] * (values.ndim - 1))
            return jnp.take_along_axis(values, index, axis=1)[:, 0]

        low = pick(thresholds, last)
        high = jnp.where(inside, pick(thresholds, last + 1), high)
        above = jnp.where(inside, pick(sums, last + 1), above)
        high_counts = jnp.where(inside[:, None], pick(counts, last + 1), high_counts)
        low_counts = pick(counts, last)
    inside_counts = jnp.where(active[:, None], low_counts - high_counts, 0)
    ends = jnp.cumsum(inside_counts, axis=1, dtype=jnp.int32)
    bracket = (low, high, ends[:, -1])
    gathered = _gather(plan, logits, active, bracket, ends - inside_counts, interpret)
    return _settle(plan, logits, rows, active, bracket, gathered, above, wanted, counting, interpret)


def load_tile(logits_ref: Any, row: jax.Array, tile: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(logits of a tile in float32 with -0.0 made +0.0, their ids); -inf past the vocabulary's end."""
    ids = tile * size + jnp.arange(size, dtype=jnp.int32)
    vocabulary = logits_ref.shape[1]
    safe = jnp.minimum(ids, vocabulary - 1)
    values = triton.load(logits_ref.at[row, safe]).astype(jnp.float32)
    return jnp.where(ids < vocabulary, jnp.where(values == 0, 0.0, values), -jnp.inf), ids


def scale(values: jax.Array, row: jax.Array, row_refs: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """((logit - largest) / temperature, whether the token is kept)."""
    largest, inverse, log_min_p, floor = (ref[row] for ref in row_refs)
    scaled = (values - largest) * inverse
    return scaled, (scaled >= log_min_p) & (values >= floor)


def _weights(values: jax.Array, row: jax.Array, row_refs: tuple[Any, ...], counting: bool) -> jax.Array:
    scaled, kept = scale(values, row, row_refs)
    return jnp.where(kept, 1.0 if counting else jnp.exp(scaled), 0.0)


def _measure(
    plan: Plan,
    logits: jax.Array,
    rows: Rows,
    active: jax.Array,
    thresholds: jax.Array,
    counting: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Weights and numbers of the logits at or above each threshold, [rows, thresholds, tiles]; anything in
    rows that are not active."""
    tiles = triton.cdiv(logits.shape[1], plan.tile)

    def kernel(logits_ref: Any, *refs: Any) -> None:
        row_refs, (active_ref, thresholds_ref, weights_ref, counts_ref) = refs[:4], refs[4:]
        row, tile = triton.program_id(0), triton.program_id(1)

        @pl.when(active_ref[row] != 0)
        def _() -> None:
            values, _ = load_tile(logits_ref, row, tile, plan.tile)
            weights = _weights(values, row, row_refs, counting)
            for index in range(_THRESHOLDS):
                above = values >= thresholds_ref[row, index]
                weights_ref[row, index, tile] = jnp.sum(jnp.where(above, weights, 0.0))
                counts_ref[row, index, tile] = jnp.sum(jnp.where(above, 1, 0).astype(jnp.int32))

    shape = (logits.shape[0], _THRESHOLDS, tiles)
    return triton.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        grid=(logits.shape[0], tiles),
        cuda=plan.launch,
        rocm=plan.launch,
        interpret=interpret,
        name="sampling_measure",
    )(logits, *rows.arrays, active.astype(jnp.int32), thresholds)


def _gather(
    plan: Plan,
    logits: jax.Array,
    active: jax.Array,
    bracket: tuple[jax.Array, ...],
    starts: jax.Array,
    interpret: bool,
) -> jax.Array:
    """The logits in [low, high), [rows, capacity], in vocabulary order; a row that has more gets none."""

    def kernel(
        logits_ref: Any,
        active_ref: Any,
        low_ref: Any,
        high_ref: Any,
        size_ref: Any,
        starts_ref: Any,
        out_ref: Any,
    ) -> None:
        row, tile = triton.program_id(0), triton.program_id(1)

        @pl.when((active_ref[row] != 0) & (size_ref[row] <= plan.capacity))
        def _() -> None:
            values, _ = load_tile(logits_ref, row, tile, plan.tile)
            inside = (values >= low_ref[row]) & (values < high_ref[row])
            place = starts_ref[row, tile] + jnp.cumsum(inside.astype(jnp.int32)) - 1
            # Past the end where it is not inside: masked, and dropped by the interpreter.
            place = jnp.where(inside, place, plan.capacity)
            triton.store(out_ref.at[row, place], values, mask=inside)

    return triton.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((logits.shape[0], plan.capacity), jnp.float32),
        grid=(logits.shape[0], starts.shape[1]),
        cuda=plan.launch,
        rocm=plan.launch,
        interpret=interpret,
        name="sampling_gather",
    )(logits, active.astype(jnp.int32), *bracket, starts)


def _settle(
    plan: Plan,
    logits: jax.Array,
    rows: Rows,
    active: jax.Array,
    bracket: tuple[jax.Array, ...],
    gathered: jax.Array,
    above: jax.Array,
    wanted: jax.Array,
    counting: bool,
    interpret: bool,
) -> jax.Array:
    """The exact edge of each row by bisection of its bracket in the order of the floats' bits."""
    tiles = triton.cdiv(logits.shape[1], plan.tile)

    def kernel(logits_ref: Any, gathered_ref: Any, *refs: Any) -> None:
        row_refs = refs[:4]
        active_ref, low_ref, high_ref, size_ref, above_ref, wanted_ref, edge_ref = refs[4:]
        row = triton.program_id(0)
        low, high, size = low_ref[row], high_ref[row], size_ref[row]

        def bisect(mass_from: Any) -> jax.Array:
            def step(keys: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                lower, upper = keys
                middle = (lower & upper) + ((lower ^ upper) >> 1)
                reached = mass_from(_float_of_key(middle)) + above_ref[row] >= wanted_ref[row]
                return jnp.where(reached, middle, lower), jnp.where(reached, upper, middle)

            ends = (_key_of_float(low), _key_of_float(high))
            lower, _ = jax.lax.while_loop(lambda keys: keys[0] + 1 < keys[1], step, ends)
            return _float_of_key(lower)

        triton.store(edge_ref.at[row], jnp.float32(-jnp.inf))

        @pl.when((active_ref[row] != 0) & (size <= plan.capacity))
        def _() -> None:
            lane = jnp.arange(plan.capacity)
            values = jnp.where(lane < size, gathered_ref[row, :], -jnp.inf)
            weights = _weights(values, row, row_refs, counting)
            edge_ref[row] = bisect(lambda edge: jnp.sum(jnp.where(values >= edge, weights, 0.0)))

        @pl.when((active_ref[row] != 0) & (size > plan.capacity))
        def _() -> None:
            def mass_from(edge: jax.Array) -> jax.Array:
                def add(tile: jax.Array, total: jax.Array) -> jax.Array:
                    values, _ = load_tile(logits_ref, row, tile, plan.tile)
                    chosen = (values >= edge) & (values < high)
                    return total + jnp.sum(jnp.where(chosen, _weights(values, row, row_refs, counting), 0.0))

                return jax.lax.fori_loop(0, tiles, add, jnp.float32(0))

            edge_ref[row] = bisect(mass_from)

    return triton.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((logits.shape[0],), jnp.float32),
        grid=(logits.shape[0],),
        cuda=plan.settle,
        rocm=plan.settle,
        interpret=interpret,
        name="sampling_settle",
    )(logits, gathered, *rows.arrays, active.astype(jnp.int32), *bracket, above, wanted)


def _key_of_float(value: jax.Array) -> jax.Array:
    """int32 in the order of float32; its own inverse but for the types."""
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _float_of_key(key: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)
