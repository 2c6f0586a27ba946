"""KDA's decode and verify window in plain XLA; `kda_reference` has the recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kda_reference import accumulation_dtype, mask_tokens, recurrent, token_step


def drop_negative(index: jax.Array, size: int) -> jax.Array:
    """Negative ids become `size`, which a scatter with mode="drop" drops (a plain -1 would wrap around)."""
    return jnp.where(index < 0, size, index)


def decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    layer: int | jax.Array,
    slots: jax.Array,
    records: Sequence[jax.Array],
    record_slots: jax.Array,
    accepted: jax.Array,
    publish_after: jax.Array | None,
    publish_slots: jax.Array | None,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Replay, publish and run one window; see `kda.kda_decode`. Records are (k, v, log_decay, beta)."""
    dtype = accumulation_dtype(state)
    rows, window = beta.shape[:2]
    slots, record_slots, accepted = (jnp.asarray(x) for x in (slots, record_slots, accepted))
    real = slots >= 0
    window_tokens = tuple(
        x.astype(record.dtype) for x, record in zip((k, v, log_decay, beta), records, strict=True)
    )

    def read(stacked: jax.Array, index: jax.Array) -> jax.Array:
        present = (index >= 0).reshape((rows,) + (1,) * (stacked.ndim - 2))
        return jnp.where(present, stacked[layer, jnp.maximum(index, 0)], 0).astype(dtype)

    def replay(carry: tuple[jax.Array, jax.Array], scanned: Any) -> Any:
        current, published = carry
        position, token = scanned
        following = token_step(current, *token)
        keep = real & (position < accepted)
        current = jnp.where(keep[:, None, None, None], following, current)
        if publish_after is not None:
            reached = keep & (position + 1 == publish_after)
            published = jnp.where(reached[:, None, None, None], current, published)
        return (current, published), None

    recorded = tuple(jnp.moveaxis(read(record, record_slots), 1, 0) for record in records)
    committed = read(state, slots)
    (committed, published), _ = lax.scan(replay, (committed, committed), (jnp.arange(window), recorded))
    state = state.at[layer, drop_negative(slots, state.shape[1])].set(
        committed.astype(state.dtype), mode="drop"
    )
    if publish_after is not None and publish_slots is not None:
        target = jnp.where(real & (publish_after > 0) & (publish_after <= accepted), publish_slots, -1)
        state = state.at[layer, drop_negative(target, state.shape[1])].set(
            published.astype(state.dtype), mode="drop"
        )
    masked = mask_tokens(real, q, *window_tokens)
    masked_q, masked_k, masked_v, masked_decay, masked_beta = (x.astype(dtype) for x in masked)
    out, _ = recurrent(masked_q, masked_k, masked_v, masked_decay, masked_beta, committed)
    target = drop_negative(jnp.where(real, record_slots, -1), records[0].shape[1])
    records = tuple(
        record.at[layer, target].set(x, mode="drop") for record, x in zip(records, window_tokens, strict=True)
    )
    return out.astype(v.dtype), state, records
