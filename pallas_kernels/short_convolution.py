"""Depthwise causal short convolution followed by SiLU, with its history as explicit state.

Tap `taps - 1` of the kernel multiplies the current token, tap 0 the oldest. A history is the last
`taps - 1` raw inputs, oldest first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import short_convolution_kernel
from pallas_kernels.dispatch import resolve
from pallas_kernels.kda_decode_reference import drop_negative


def _weighted(taps: list[jax.Array], weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """SiLU(sum_j weight[:, j] * taps[j]) for taps [..., C], accumulated in at least float32."""
    wide = jnp.promote_types(jnp.result_type(taps[0], weight), jnp.float32)
    total = sum(tap.astype(wide) * weight[:, j].astype(wide) for j, tap in enumerate(taps))
    return jax.nn.silu(total).astype(dtype)


def short_convolution(
    x: jax.Array, weight: jax.Array, initial: jax.Array, *, lengths: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Convolve a rectangular batch.

    Args:
      x: [batch, time, C]; weight: [C, taps]; initial: [batch, taps - 1, C] inputs before the first token.
      lengths: [batch] int32 valid tokens of a row; later ones count as zeros.

    Returns:
      y [batch, time, C] in x's dtype, and the history [batch, taps - 1, C] at `lengths`.
    """
    time, taps = x.shape[1], weight.shape[1]
    lengths = jnp.full(x.shape[:1], time, jnp.int32) if lengths is None else jnp.asarray(lengths)
    x = jnp.where((jnp.arange(time) < lengths[:, None])[..., None], x, 0)
    full = jnp.concatenate([initial.astype(x.dtype), x], axis=1)
    y = _weighted([full[:, j : j + time] for j in range(taps)], weight, x.dtype)
    last = lengths[:, None] + jnp.arange(taps - 1)
    return y, jnp.take_along_axis(full, last[..., None], axis=1)


def short_convolution_ragged(
    x: jax.Array,
    weight: jax.Array,
    initial: jax.Array,
    cu_seqlens: jax.Array,
    *,
    checkpoints: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Convolve a ragged batch flattened to one token axis.

    Args:
      x: [T, C]; weight: [C, taps]; initial: [R, taps - 1, C].
      cu_seqlens: [R + 1] int32 cumulative row lengths; tokens past the last are padding.
      checkpoints: [R, M] int32 token counts inside a row (1..length), -1 for none.

    Returns:
      y [T, C] in x's dtype (padding gives zeros), the histories [R, taps - 1, C] at the rows' ends and, with
      checkpoints, the histories [R, M, taps - 1, C] after that many tokens (zeros for none).
    """
    tokens, taps = x.shape[0], weight.shape[1]
    rows = initial.shape[0]
    if tokens == 0 or rows == 0:
        histories = (jnp.zeros_like(x), initial)
        empty = (
            () if checkpoints is None else (jnp.zeros(checkpoints.shape + initial.shape[1:], initial.dtype),)
        )
        return histories + empty
    cu_seqlens = jnp.asarray(cu_seqlens)
    token = jnp.arange(tokens)
    row = jnp.minimum(jnp.searchsorted(cu_seqlens[1:], token, side="right", method="compare_all"), rows - 1)
    position = token - cu_seqlens[row]
    real = (token < cu_seqlens[-1])[:, None]
    x = jnp.where(real, x, 0)
    # Gathers from the small `initial` fuse into the one pass over x; no extended copy of x is built.
    shifted = []
    for j in range(taps):
        back = taps - 1 - j
        current = jnp.pad(x, ((back, 0), (0, 0)))[:tokens]
        before = (
            initial[row, jnp.clip(position + j, 0, max(taps - 2, 0))].astype(x.dtype) if back else current
        )
        shifted.append(jnp.where((position >= back)[:, None], current, jnp.where(real, before, 0)))
    y = jnp.where(real, _weighted(shifted, weight, x.dtype), 0)

    def history(count: jax.Array) -> jax.Array:  # [R, n] tokens into each row -> [R, n, taps - 1, C]
        offset = count[..., None] + jnp.arange(1 - taps, 0)
        inside = x[jnp.clip(cu_seqlens[:-1, None, None] + offset, 0, tokens - 1)]
        before = jnp.clip(offset + taps - 1, 0, max(taps - 2, 0))
        return jnp.where((offset >= 0)[..., None], inside, initial[jnp.arange(rows)[:, None, None], before])

    final = history((cu_seqlens[1:] - cu_seqlens[:-1])[:, None])[:, 0].astype(initial.dtype)
    if checkpoints is None:
        return y, final
    checkpoints = jnp.asarray(checkpoints)
    taken = history(jnp.maximum(checkpoints, 0))
    return y, final, jnp.where((checkpoints > 0)[..., None, None], taken, 0).astype(initial.dtype)


def short_convolution_decode(
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array,
    layer: int | jax.Array,
    slots: jax.Array,
    accepted: jax.Array,
    *,
    publish_after: jax.Array | None = None,
    publish_slots: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolve a decode or verify window of W tokens a row.

    Args:
      x: [R, W, C]; weight: [C, taps].
      state: [layers, slots, taps - 1 + W, C]: the history, then the last window's inputs.
      layer: index into `state`; slots: [R] int32, -1 for a padding row, which reads and writes nothing.
      accepted: [R] int32 in 0..W: entries [accepted, accepted + taps - 1) are the new history.
      publish_after, publish_slots: [R] int32; the history after that many tokens of the last window is also
        written to the start of this slot, whose window part becomes zero (-1 for none).

    Returns:
      y [R, W, C] in x's dtype (zeros for padding rows) and the state, updated in place if donated.
    """
    if (publish_after is None) != (publish_slots is None):
        raise ValueError("publish_after and publish_slots go together")
    window, taps = x.shape[1], weight.shape[1]
    if state.shape[2] != taps - 1 + window:
        raise ValueError(
            f"state holds {state.shape[2]} inputs a slot, "
            f"{taps} taps and {window} tokens need {taps - 1 + window}"
        )
    chosen = resolve(implementation, supported=short_convolution_kernel.supported(x.shape[2]))
    if chosen != "xla":
        unused = jnp.full(x.shape[0], -1, jnp.int32)
        return short_convolution_kernel.decode(
            x,
            weight,
            state,
            layer,
            slots,
            accepted,
            unused if publish_after is None else publish_after,
            unused if publish_slots is None else publish_slots,
            interpret=chosen == "interpret",
        )
    slots, accepted = jnp.asarray(slots), jnp.asarray(accepted)
    real = slots >= 0
    stored = jnp.where(real[:, None, None], state[layer, jnp.maximum(slots, 0)], 0)
    x = jnp.where(real[:, None, None], x, 0)

    def history(count: jax.Array) -> jax.Array:
        return jnp.take_along_axis(stored, (count[:, None] + jnp.arange(taps - 1))[..., None], axis=1)

    full = jnp.concatenate([history(jnp.clip(accepted, 0, window)), x.astype(state.dtype)], axis=1)
    y = _weighted([full[:, j : j + window] for j in range(taps)], weight, x.dtype)
    state = state.at[layer, drop_negative(slots, state.shape[1])].set(full, mode="drop")
    if publish_after is not None and publish_slots is not None:
        kept = history(jnp.clip(publish_after, 0, window))
        published = jnp.pad(kept, ((0, 0), (0, window), (0, 0)))
        target = jnp.where(real & (publish_after > 0) & (publish_after <= accepted), publish_slots, -1)
        state = state.at[layer, drop_negative(target, state.shape[1])].set(published, mode="drop")
    return y, state
