"""Sampling a token from logits without a sort, also over a sharded vocabulary.

The token is argmax((logits - largest) / temperature + Gumbel noise) over the kept tokens; every filter keeps
the tokens at or above an edge, so all that min-p, top-k and top-p need is a threshold. A threshold is found
bit by bit on an order-preserving integer key, from counts and from probability masses in fixed point:
integer sums do not depend on their order, hence neither do tokens on how the vocabulary is split.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import resolve
from pallas_kernels.gumbel_noise import gumbel
from pallas_kernels.vocab_sampling_kernel import sample_tokens_triton, supports

__all__ = ["apply_bias", "apply_mask", "apply_penalties", "gumbel", "sample_tokens"]

GREEDY_TEMPERATURE = 1e-5  # below it a row is greedy
MASS_BITS = 28  # the most probable token weighs 2**28, one of e**-20.1 of its probability rounds to nothing
HALF_BITS = MASS_BITS // 2
LARGEST_VOCABULARY = 2**18 - 1  # the sum of the masses' upper halves has to fit uint32

_Reduction = Callable[[jax.Array], jax.Array]


def sample_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seeds: jax.Array,
    choices: jax.Array,
    positions: jax.Array,
    *,
    axis_name: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """One token a row.

    logits: [rows, vocabulary], penalties, biases and grammar already applied (-inf: impossible).
    temperature, top_p, min_p: [rows] floats; top_k: [rows] int32. Temperature 0 (below 1e-5) is greedy
    and ignores the filters. Filters in order: min-p keeps probabilities of at least min_p times the largest
    (0: off); top-k keeps the k largest (0 or less: off); top-p keeps, of what is left, the smallest set of
    the largest whose mass reaches top_p of it (1: off). Ties at an edge are all kept. seeds, choices,
    positions: [rows] integers keying the noise; position is that of the token being sampled.
    axis_name: under shard_map or vmap, the axis over which the vocabulary is split in equal parts, in order.
    Returns [rows] int32 ids in the whole vocabulary, replicated over the axis; ties of the score go to the
    lowest id. A probability mass is exact to 2**-29 of the largest probability a token.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be [rows, vocabulary], got {logits.shape}")
    shards = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    vocabulary = logits.shape[1] * shards
    if vocabulary > LARGEST_VOCABULARY:
        raise ValueError(f"the vocabulary must have at most {LARGEST_VOCABULARY} entries, got {vocabulary}")
    chosen = resolve(implementation, supported=supports(logits))
    parameters = (temperature, top_k, top_p, min_p, seeds, choices, positions)
    if chosen == "xla":
        return sample_tokens_reference(logits, *parameters, axis_name=axis_name)
    kernel = partial(_sample_rows, interpret=chosen == "interpret")
    if axis_name is None:
        return kernel(logits, *parameters)
    return over_rows(kernel, logits, parameters, axis_name)


def _sample_rows(logits: jax.Array, temperature: jax.Array, *rest: jax.Array, interpret: bool) -> jax.Array:
    greedy = temperature < GREEDY_TEMPERATURE
    return sample_tokens_triton(logits, temperature, greedy, *rest, interpret=interpret)


def over_rows(
    sample: Callable[..., jax.Array], logits: jax.Array, parameters: tuple[jax.Array, ...], axis_name: str
) -> jax.Array:
    """Turns a split of the vocabulary into a split of the rows: every shard samples whole rows.

    One exchange of a shard's logits instead of a collective for every pass over them. `sample` takes whole
    rows [rows, vocabulary] and their parameters.
    """
    rows, shards = logits.shape[0], jax.lax.axis_size(axis_name)
    own = -(-rows // shards)
    logits, *padded = (
        jnp.pad(x, [(0, own * shards - rows)] + [(0, 0)] * (x.ndim - 1)) for x in (logits, *parameters)
    )
    whole = jax.lax.all_to_all(logits, axis_name, split_axis=0, concat_axis=1, tiled=True)
    first = jax.lax.axis_index(axis_name) * own
    mine = (jax.lax.dynamic_slice_in_dim(x, first, own) for x in padded)
    return jax.lax.all_gather(sample(whole, *mine), axis_name, tiled=True)[:rows]


def sample_tokens_reference(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seeds: jax.Array,
    choices: jax.Array,
    positions: jax.Array,
    *,
    axis_name: str | None = None,
) -> jax.Array:
    """`sample_tokens` in plain XLA; over a sharded vocabulary every reduction becomes a collective."""
    accumulate = jnp.promote_types(logits.dtype, jnp.float32)
    logits = logits.astype(accumulate)
    reduce_max, reduce_min, reduce_sum = _reductions(axis_name)
    size = logits.shape[1]
    shards, shard = (
        (1, 0) if axis_name is None else (jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name))
    )
    ids = jnp.arange(size, dtype=jnp.int32) + shard * size

    largest = reduce_max(logits)
    greedy = temperature < GREEDY_TEMPERATURE
    inverse = jnp.where(greedy, 1, 1 / jnp.where(greedy, 1, temperature)).astype(accumulate)
    scaled = (logits - largest[:, None]) * inverse[:, None]
    kept = scaled >= jnp.log(min_p.astype(accumulate))[:, None]
    keys = ordered_keys(logits)

    def top_k_edge(_: None) -> jax.Array:
        wanted = top_k.astype(jnp.uint32)
        return descend(keys, lambda above: reduce_sum(above.astype(jnp.uint32)) >= wanted)

    def top_p_edge(kept: jax.Array) -> jax.Array:
        masses = jnp.where(kept, fixed_point_masses(scaled), 0)

        def mass(chosen: jax.Array) -> jax.Array:
            chosen_masses = jnp.where(chosen, masses, 0)
            low = reduce_sum(chosen_masses & jnp.uint32(2**HALF_BITS - 1))
            return mass_of_halves(reduce_sum(chosen_masses >> jnp.uint32(HALF_BITS)), low)

        wanted = mass(kept) * top_p.astype(jnp.float32)
        return descend(keys, lambda above: mass(above) >= wanted)

    nothing = jnp.zeros(logits.shape[0], keys.dtype)
    edge = jax.lax.cond(jnp.any(top_k > 0), top_k_edge, lambda _: nothing, None)
    kept &= keys >= jnp.where(top_k > 0, edge, 0)[:, None]
    edge = jax.lax.cond(jnp.any(top_p < 1), top_p_edge, lambda _: nothing, kept)
    kept &= keys >= jnp.where(top_p < 1, edge, 0)[:, None]

    noise = gumbel(seeds, choices, positions, ids).astype(accumulate)
    score = jnp.where(kept, scaled + noise, -jnp.inf)
    score = jnp.where(greedy[:, None], logits, score)
    best = score == reduce_max(score)[:, None]
    # A row with NaN has no best token; it still gets an id inside the vocabulary.
    return jnp.minimum(reduce_min(jnp.where(best, ids, size * shards)), size * shards - 1)


def ordered_keys(values: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floats, -0.0 equal to +0.0; every key is above 0."""
    bits = jnp.finfo(values.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    raw = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0, values), unsigned)
    sign = unsigned.type(1 << (bits - 1))
    return jnp.where(raw >= sign, ~raw, raw | sign)


def descend(keys: jax.Array, reaches: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest key t of each row for which reaches(keys >= t) holds; 0 if it never does.

    keys: [rows, size] unsigned; reaches: [rows, size] bool -> [rows] bool, monotone: true for a larger set
    when it is for a smaller. One pass over the keys for each of their bits.
    """
    bits = jnp.iinfo(keys.dtype).bits
    one = jnp.ones((), keys.dtype)

    def step(i: jax.Array, edge: jax.Array) -> jax.Array:
        candidate = edge | (one << (bits - 1 - i).astype(keys.dtype))
        return jnp.where(reaches(keys >= candidate[:, None]), candidate, edge)

    return jax.lax.fori_loop(0, bits, step, jnp.zeros(keys.shape[0], keys.dtype))


def fixed_point_masses(scaled: jax.Array) -> jax.Array:
    """exp(scaled) for scaled <= 0 as uint32 in units of 2**-28, rounded to nearest."""
    return (jnp.exp(scaled) * 2.0**MASS_BITS + 0.5).astype(jnp.uint32)


def mass_of_halves(high: jax.Array, low: jax.Array) -> jax.Array:
    """Sums of the upper and of the lower halves of masses (uint32) -> float32, monotone in the mass."""
    high = high + (low >> jnp.uint32(HALF_BITS))
    low = low & jnp.uint32(2**HALF_BITS - 1)
    return high.astype(jnp.float32) * 2.0**HALF_BITS + low.astype(jnp.float32)


def _reductions(axis_name: str | None) -> tuple[_Reduction, _Reduction, _Reduction]:
    """Maximum, minimum and sum over the vocabulary, [rows, size] -> [rows]."""
    if axis_name is None:
        return (
            lambda x: x.max(axis=-1),
            lambda x: x.min(axis=-1),
            lambda x: x.sum(axis=-1, dtype=x.dtype),
        )
    return (
        lambda x: jax.lax.pmax(x.max(axis=-1), axis_name),
        lambda x: jax.lax.pmin(x.min(axis=-1), axis_name),
        lambda x: jax.lax.psum(x.sum(axis=-1, dtype=x.dtype), axis_name),
    )


def apply_penalties(
    logits: jax.Array,
    prompt_mask: jax.Array,
    output_counts: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """Repetition penalty over prompt and output, then frequency and presence penalties over the output.

    logits: [rows, vocabulary]; prompt_mask: the same shape, whether the token occurs in the prompt;
    output_counts: the same shape, how often it was generated; the penalties: [rows], 1, 0 and 0 being off. A
    token seen has a positive logit divided by `repetition` and a negative one multiplied by it.
    """
    penalties = (repetition, frequency, presence)
    repetition, frequency, presence = (x.astype(logits.dtype)[:, None] for x in penalties)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(prompt_mask | (output_counts > 0), repeated, logits)
    return logits - frequency * output_counts.astype(logits.dtype) - presence * (output_counts > 0)


def apply_bias(logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Adds values [rows, entries] to the logits of ids [rows, entries] (-1: none; -inf forbids a token)."""
    rows = jnp.arange(logits.shape[0])[:, None]
    target = jnp.where(ids >= 0, ids, logits.shape[1])
    return logits.at[rows, target].add(values.astype(logits.dtype), mode="drop")


def apply_mask(logits: jax.Array, words: jax.Array) -> jax.Array:
    """Forbids tokens whose bit is 0. words: [rows, ceil(vocabulary / 32)] uint32, lowest bit first."""
    ids = jnp.arange(logits.shape[1])
    allowed = (words[:, ids // 32] >> (ids % 32).astype(jnp.uint32)) & jnp.uint32(1)
    return jnp.where(allowed == 1, logits, -jnp.inf)
