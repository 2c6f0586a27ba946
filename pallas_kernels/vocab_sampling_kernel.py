"""Sampling on Pallas-Triton: every pass reads the logits once, split over the vocabulary.

An edge (of top-k or top-p) is found in a few passes that each divide its bracket by eight; then the logits
left inside the bracket are gathered and one program a row bisects them exactly. A row with more equal or
nearly equal logits in its bracket than are gathered is bisected over its whole vocabulary: slow, but as
exact. A last pass draws. Rows without a filter leave its launches at once.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.gumbel_noise import noise_of_words, row_keys

_THRESHOLDS = 8
_PASSES = 3
# A depth below the largest scaled logit at which the whole vocabulary holds under 2e-8 of its probability.
_DEEPEST = 30.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """tile: logits a program; capacity: logits gathered from a bracket; both powers of two."""

    tile: int = 4096
    capacity: int = 4096
    launch: triton.Launch = triton.Launch(num_warps=4, num_stages=1)
    settle: triton.Launch = triton.Launch(num_warps=8, num_stages=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
    """What is kept of each row so far, [rows] float32: scaled = (logit - largest) * inverse must reach
    log_min_p, and the logit the floor."""

    largest: jax.Array
    inverse: jax.Array
    log_min_p: jax.Array
    floor: jax.Array

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.largest, self.inverse, self.log_min_p, self.floor


def supports(logits: jax.Array) -> bool:
    """float32 or bfloat16 logits."""
    return logits.dtype in (jnp.float32, jnp.bfloat16)


def sample_tokens_triton(
    logits: jax.Array,
    temperature: jax.Array,
    greedy: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seeds: jax.Array,
    choices: jax.Array,
    positions: jax.Array,
    *,
    interpret: bool = False,
    plan: Plan | None = None,
) -> jax.Array:
    """`sample_tokens` over whole rows; `greedy` [rows] bool says which of them take no noise."""
    plan = plan or Plan()
    wide = logits.astype(jnp.float32)
    largest = wide.max(axis=1)
    smallest = jnp.where(wide > -jnp.inf, wide, jnp.inf).min(axis=1)
    inverse = jnp.where(greedy, 1, 1 / jnp.where(greedy, 1, temperature)).astype(jnp.float32)
    floor = jnp.full_like(largest, -jnp.inf)
    rows = _Rows(largest, inverse, jnp.log(min_p.astype(jnp.float32)), floor)
    edge = partial(_edge, plan, logits, largest=largest, interpret=interpret)
    by_count = edge(rows, ~greedy & (top_k > 0), lowest=smallest, count=top_k.astype(jnp.float32), share=None)
    rows = dataclasses.replace(rows, floor=by_count)
    deepest = jnp.maximum(smallest, largest - _DEEPEST / inverse)
    by_mass = edge(rows, ~greedy & (top_p < 1), lowest=deepest, count=None, share=top_p.astype(jnp.float32))
    rows = dataclasses.replace(rows, floor=jnp.maximum(by_count, by_mass))
    return _draw(plan, logits, rows, greedy, row_keys(seeds, choices, positions), interpret)


def _edge(
    plan: Plan,
    logits: jax.Array,
    rows: _Rows,
    active: jax.Array,
    *,
    largest: jax.Array,
    lowest: jax.Array,
    count: jax.Array | None,
    share: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """The largest logit of each row whose kept set at or above it has `count` tokens, or `share` of the
    mass kept at or above `lowest`; -inf where there is none or the row is not active."""
    counting = share is None
    tiles = triton.cdiv(logits.shape[1], plan.tile)
    low, high = lowest, jnp.nextafter(largest, jnp.float32(jnp.inf))
    above = jnp.zeros_like(low)
    high_counts = jnp.zeros((logits.shape[0], tiles), jnp.int32)
    wanted = count
    steps = jnp.arange(_THRESHOLDS, dtype=jnp.float32) / _THRESHOLDS
    for _ in range(_PASSES):
        thresholds = low[:, None] + (high - low)[:, None] * steps
        weights, counts = _measure(plan, logits, rows, active, thresholds, counting, interpret)
        sums = weights.sum(axis=-1)
        if wanted is None:
            assert share is not None
            wanted = share * sums[:, 0]
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


def _load_tile(logits_ref: Any, row: jax.Array, tile: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(logits of a tile in float32 with -0.0 made +0.0, their ids); -inf past the vocabulary's end."""
    ids = tile * size + jnp.arange(size, dtype=jnp.int32)
    vocabulary = logits_ref.shape[1]
    safe = jnp.minimum(ids, vocabulary - 1)
    values = triton.load(logits_ref.at[row, safe]).astype(jnp.float32)
    return jnp.where(ids < vocabulary, jnp.where(values == 0, 0.0, values), -jnp.inf), ids


def _scaled(values: jax.Array, row: jax.Array, row_refs: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """((logit - largest) / temperature, whether the token is kept)."""
    largest, inverse, log_min_p, floor = (ref[row] for ref in row_refs)
    scaled = (values - largest) * inverse
    return scaled, (scaled >= log_min_p) & (values >= floor)


def _weights(values: jax.Array, row: jax.Array, row_refs: tuple[Any, ...], counting: bool) -> jax.Array:
    scaled, kept = _scaled(values, row, row_refs)
    return jnp.where(kept, 1.0 if counting else jnp.exp(scaled), 0.0)


def _measure(
    plan: Plan,
    logits: jax.Array,
    rows: _Rows,
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
            values, _ = _load_tile(logits_ref, row, tile, plan.tile)
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
            values, _ = _load_tile(logits_ref, row, tile, plan.tile)
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
    rows: _Rows,
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
                    values, _ = _load_tile(logits_ref, row, tile, plan.tile)
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


def _draw(
    plan: Plan,
    logits: jax.Array,
    rows: _Rows,
    greedy: jax.Array,
    words: tuple[jax.Array, jax.Array],
    interpret: bool,
) -> jax.Array:
    """The id with the largest score of each row, the lowest of equal ones."""
    vocabulary = logits.shape[1]
    tiles = triton.cdiv(vocabulary, plan.tile)

    def kernel(logits_ref: Any, *refs: Any) -> None:
        row_refs, (greedy_ref, first_ref, second_ref, score_ref, id_ref) = refs[:4], refs[4:]
        row, tile = triton.program_id(0), triton.program_id(1)
        values, ids = _load_tile(logits_ref, row, tile, plan.tile)
        scaled, kept = _scaled(values, row, row_refs)
        kept &= values > -jnp.inf

        def best(score: jax.Array) -> None:
            largest = jnp.max(score)
            score_ref[row, tile] = largest
            id_ref[row, tile] = jnp.min(jnp.where(score == largest, ids, vocabulary))

        @pl.when(greedy_ref[row] != 0)
        def _() -> None:
            best(values)

        @pl.when(greedy_ref[row] == 0)
        def _() -> None:
            triton.store(score_ref.at[row, tile], jnp.float32(-jnp.inf))
            triton.store(id_ref.at[row, tile], jnp.int32(vocabulary))

            @pl.when(jnp.max(jnp.where(kept, 1, 0)) > 0)
            def _() -> None:
                noise = noise_of_words(first_ref[row], second_ref[row], ids)
                best(jnp.where(kept, scaled + noise, -jnp.inf))

    shape = (logits.shape[0], tiles)
    scores, ids = triton.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        grid=shape,
        cuda=plan.launch,
        rocm=plan.launch,
        interpret=interpret,
        name="sampling_draw",
    )(logits, *rows.arrays, greedy.astype(jnp.int32), *words)
    best = scores == scores.max(axis=1, keepdims=True)
    # A row with NaN has no best token; it still gets an id inside the vocabulary.
    return jnp.minimum(jnp.where(best, ids, vocabulary).min(axis=1), vocabulary - 1)
