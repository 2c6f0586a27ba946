"""Sampling on Pallas-Triton: every pass reads the logits once, split over the vocabulary."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.gumbel_noise import noise_of_words, row_keys
from pallas_kernels.vocab_edge_kernel import Plan, Rows, edge, load_tile, scale

# A depth below the largest scaled logit at which the whole vocabulary holds under 2e-8 of its probability.
_DEEPEST = 30.0


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
    rows = Rows(largest, inverse, jnp.log(min_p.astype(jnp.float32)), floor)
    find = partial(edge, plan, logits, interpret=interpret)
    by_count = find(
        rows, ~greedy & (top_k > 0), lowest=smallest, target=top_k.astype(jnp.float32), counting=True
    )
    rows = dataclasses.replace(rows, floor=by_count)
    deepest = jnp.maximum(smallest, largest - _DEEPEST / inverse)
    by_mass = find(
        rows, ~greedy & (top_p < 1), lowest=deepest, target=top_p.astype(jnp.float32), counting=False
    )
    rows = dataclasses.replace(rows, floor=jnp.maximum(by_count, by_mass))
    return _draw(plan, logits, rows, greedy, row_keys(seeds, choices, positions), interpret)


def _draw(
    plan: Plan,
    logits: jax.Array,
    rows: Rows,
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
        values, ids = load_tile(logits_ref, row, tile, plan.tile)
        scaled, kept = scale(values, row, row_refs)
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
