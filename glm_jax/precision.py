"""One place for the rule that some values are never narrower than float32."""

import jax
import jax.numpy as jnp


def at_least_float32(x: jax.Array) -> jax.Array:
    """`x` widened to float32; float64 stays float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
