"""Exact top-k of score rows as a Pallas-Triton kernel, without a sort.

A score becomes an int32 key that orders as the scores do. The k-th largest key is found from its highest
bit down, by counting keys at or above a threshold; running counts then give every chosen entry its place.
Entries equal to the k-th are taken from the lowest index on, and the output is ascending by index. Rows too
long for one program are cut into segments: the best k of all the segments' best k are the row's, and
candidates keep their order, so ties do too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton

LONGEST_SEGMENT = 8192
_MASKED = -(2**31)  # below every score's key
_SIGN_BIT = -(2**31)


def supported(k: int) -> bool:
    """A segment must be longer than what it keeps."""
    return 0 < k <= LONGEST_SEGMENT // 4


def select(
    scores: jax.Array,
    counts: jax.Array,
    k: int,
    ids: jax.Array | None = None,
    *,
    interpret: bool = False,
    longest_segment: int = LONGEST_SEGMENT,
) -> jax.Array:
    """The best min(k, counts) of a row's first `counts` entries, as `pool_index.select_pools` gives them.

    scores: [at least tokens, width] float32, anything past `counts` and in rows with counts <= k; counts:
    [tokens] int32; ids: [tokens, width] int32, what the entries stand for (their index without it). Returns
    [tokens, k] int32.
    """
    tokens, width = counts.shape[0], scores.shape[1]
    segment = min(longest_segment, _power_of_two(max(width, 16)))
    segments = -(-width // segment)
    inputs = (counts, scores) if ids is None else (counts, scores, ids)
    # The interpreter writes back what lay where a masked entry points: there, they get a place of their own.
    shape = (tokens, segments * k + (1 if interpret else 0))
    kernel = functools.partial(
        _select, width=width, segment=segment, segments=segments, k=k, has_ids=ids is not None
    )
    selected = jax.ShapeDtypeStruct(shape, jnp.int32)
    launch = triton.Launch(num_warps=8 if segment > 2048 else 4, num_stages=1)
    # A mask is a pair of scalar registers for every eight entries of a wave's lane: more entries spill them.
    waves = triton.Launch(num_warps=max(1, min(16, segment // 512)), num_stages=1)
    out = triton.pallas_call(
        kernel,
        out_shape=selected if segments == 1 else [selected, jax.ShapeDtypeStruct(shape, jnp.float32)],
        grid=(tokens, segments),
        cuda=launch,
        rocm=waves,
        interpret=interpret,
        name="select",
    )(*inputs)
    if segments == 1:
        return out[:, :k]
    # All segments but the last that holds anything are full: the candidates lie side by side from the start.
    kept = counts // segment * k + jnp.minimum(counts % segment, k)
    return select(
        out[1][:, : segments * k], kept, k, out[0], interpret=interpret, longest_segment=longest_segment
    )


def _select(
    counts_ref: Any,
    scores_ref: Any,
    *refs: Any,
    width: int,
    segment: int,
    segments: int,
    k: int,
    has_ids: bool,
) -> None:
    out_ref = refs[1] if has_ids else refs[0]
    token, part = triton.program_id(0), triton.program_id(1)
    begin = part * segment
    count = jnp.clip(counts_ref[token] - begin, 0, segment)
    place = jnp.arange(segment, dtype=jnp.int32)
    index = begin + place
    visible = place < count
    wanted = jnp.minimum(count, k)
    final = segments == 1

    @pl.when((count > 0) | final)
    def _() -> None:
        scores = triton.load(scores_ref.at[token, index], mask=visible & (index < width), other=0.0)
        keys = jnp.where(visible, _ordered_key(scores), _MASKED)
        everything = count <= k
        threshold = _kth_largest(keys, wanted, 32 * (count > k).astype(jnp.int32))
        above = visible & (everything | (keys > threshold))
        equal = visible & ~everything & (keys == threshold)
        spare = wanted - above.sum(dtype=jnp.int32)
        chosen = above | (equal & (jnp.cumsum(equal, dtype=jnp.int32) <= spare))
        slot = jnp.where(chosen, part * k + jnp.cumsum(chosen, dtype=jnp.int32) - 1, segments * k)
        chosen_ids = triton.load(refs[0].at[token, index], mask=chosen, other=0) if has_ids else index
        triton.store(out_ref.at[token, slot], chosen_ids, mask=chosen)
        if final:
            rest = jnp.arange(_power_of_two(k), dtype=jnp.int32)
            missing = (rest >= wanted) & (rest < k)
            triton.store(out_ref.at[token, rest], jnp.full_like(rest, -1), mask=missing)
        else:
            triton.store(refs[-1].at[token, slot], scores, mask=chosen)


def _power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def _ordered_key(scores: jax.Array) -> jax.Array:
    """int32 keys in the order of float32 scores, -0.0 equal to +0.0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


_Descent = tuple[jax.Array, jax.Array, jax.Array]
"""The next bit's number, the threshold so far, how many keys reach it."""


def _kth_largest(keys: jax.Array, k: jax.Array, bits: jax.Array) -> jax.Array:
    """A threshold that at least k keys reach and at most k exceed, built from the highest bit down.

    In unsigned order the threshold's bits are set one by one; the sign bit's flip maps signed order onto it.
    Without ties a threshold that exactly k keys reach is usually found before the last bit.
    """

    def unfinished(carry: _Descent) -> jax.Array:
        step, _, reached = carry
        return (step < bits) & (reached != k)

    def descend(carry: _Descent) -> _Descent:
        step, found, reached = carry
        candidate = found | jnp.left_shift(jnp.int32(1), 31 - step)
        count = (keys >= (candidate ^ _SIGN_BIT)).astype(jnp.int32).sum(dtype=jnp.int32)
        enough = count >= k
        return step + 1, jnp.where(enough, candidate, found), jnp.where(enough, count, reached)

    start = (jnp.int32(0), jnp.int32(0), jnp.int32(-1))
    return jax.lax.while_loop(unfinished, descend, start)[1] ^ _SIGN_BIT
