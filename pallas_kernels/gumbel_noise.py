"""Gumbel noise as a pure function of (seed, choice, position, vocabulary id).

A counter hash in uint32 arithmetic: the noise of a token does not depend on the batch, on the order of
steps, on how the vocabulary is sharded or on the platform's random number generator.
"""

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads consecutive counters
_LARGEST_BELOW_ONE = 1 - 2.0**-24


def gumbel(
    seeds: jax.Array, choices: jax.Array, positions: jax.Array, vocabulary_ids: jax.Array
) -> jax.Array:
    """Standard Gumbel noise, float32.

    seeds, choices, positions: [...] integers (their low 32 bits count); vocabulary_ids: [vocabulary]
    integers. Returns [..., vocabulary]; every value is finite.
    """
    first, second = row_keys(seeds, choices, positions)
    return noise_of_words(first[..., None], second[..., None], vocabulary_ids)


def row_keys(seeds: jax.Array, choices: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two uint32 words that identify a (seed, choice, position), each of the inputs' shape."""
    seeds, choices, positions = (jnp.asarray(x).astype(jnp.uint32) for x in (seeds, choices, positions))
    first = mix(mix(mix(seeds + jnp.uint32(_GOLDEN)) ^ choices) ^ positions)
    second = mix(mix(mix(positions + jnp.uint32(0x85EBCA6B)) ^ choices) ^ seeds)
    return first, second


def noise_of_words(first: jax.Array, second: jax.Array, vocabulary_ids: jax.Array) -> jax.Array:
    """Gumbel noise of vocabulary ids under two key words; all three broadcast. Usable inside a kernel."""
    ids = vocabulary_ids.astype(jnp.uint32)
    bits = mix(mix(ids * jnp.uint32(_GOLDEN) + first) ^ second)
    # The largest noises decide: they come from the smallest uniforms, which float32 resolves to 2**-33.
    # The conversion goes over int32 halves because a GPU kernel converts only signed integers.
    high = (bits >> jnp.uint32(16)).astype(jnp.int32).astype(jnp.float32)
    low = (bits & jnp.uint32(0xFFFF)).astype(jnp.int32).astype(jnp.float32)
    uniform = high * 2.0**-16 + (low + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, _LARGEST_BELOW_ONE)))


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 whose output bits each depend on every input bit (murmur3's finaliser)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
