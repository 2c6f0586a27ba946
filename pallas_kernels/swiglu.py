"""The clamped SwiGLU every feed-forward block shares."""

import jax
import jax.numpy as jnp


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit), any shape; silu inside in at least float32."""
    accumulate = jnp.promote_types(gate.dtype, jnp.float32)
    activated = jax.nn.silu(jnp.minimum(gate, limit).astype(accumulate)).astype(gate.dtype)
    return activated * jnp.clip(up, -limit, limit)
