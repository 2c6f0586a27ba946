"""KDA prefill and decode and the short convolution's decode, at the released model's shapes.

The peer is flash-linear-attention's Triton kernels (chunk_kda with its safe gate, fused_recurrent_kda),
where torch and the package are installed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels.harness import Harness, Row, relative_error
from pallas_kernels.kda import KdaRecords, kda_decode, kda_prefill
from pallas_kernels.short_convolution import short_convolution_decode

STATE_LAYERS = 2  # alternate, so that no repeat finds its states in the cache of the one before


def measure(run: Harness) -> list[Row]:
    tokens, heads, few = run.size(8192, 32), run.size(64, 2), run.size(8, 1)
    rows = [_prefill(run, tokens, heads), _prefill(run, tokens, few), _prefill(run, 4 * tokens, few)]
    for count in (1, 32, 128):
        rows += [_decode(run, run.size(count, 2), h, window=1) for h in (heads, few)]
    rows.append(_decode(run, run.size(32, 2), heads, window=4))
    rows.append(_convolution(run, run.size(32, 2), 3 * heads * run.size(128, 64)))
    return rows


def _inputs(lead: tuple[int, ...], heads: int, dim: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """(q, k, v, log_decay, beta) as the model makes them: unit keys, decays spread over (-5, 0)."""
    keys = jax.random.split(jax.random.key(seed), 5)
    shape = (*lead, heads, dim)

    def unit(key: jax.Array) -> jax.Array:
        x = jax.random.normal(key, shape)
        return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True))

    q, k, v = unit(keys[0]) * dim**-0.5, unit(keys[1]), jax.random.normal(keys[2], shape)
    log_decay = -5 * jax.nn.sigmoid(2 * jax.random.normal(keys[3], shape) - 1)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], shape[:-1]))
    return (*(x.astype(jnp.bfloat16) for x in (q, k, v)), log_decay, beta)


def _float64_recurrence(x: tuple[jax.Array, ...], state: jax.Array) -> np.ndarray:
    """Outputs [time, H, V] of one row, in numpy."""
    q, k, v, log_decay, beta = (np.asarray(a.astype(jnp.float32), np.float64) for a in x)
    current, out = np.asarray(state, np.float64), []
    for t in range(len(q)):
        current = current * np.exp(log_decay[t])[..., None]
        update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", current, k[t]))
        current = current + k[t][..., None] * update[:, None]
        out.append(np.einsum("hkv,hk->hv", current, q[t]))
    return np.stack(out)


def _prefill(run: Harness, tokens: int, heads: int) -> Row:
    dim = run.size(128, 16)
    x = _inputs((tokens,), heads, dim)
    initial = 0.1 * jax.random.normal(jax.random.key(7), (1, heads, dim, dim))

    def op(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any) -> Any:
        ends = jnp.array([0, q.shape[0]], jnp.int32)
        options = {"gate_lower_bound": -5.0, "implementation": run.implementation}
        return kda_prefill(q, k, v, log_decay, beta, state, ends, **options)

    def step(state: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
        # Depends on the state, so that no part of a repeat can be shared with another.
        return op(q, k, v, log_decay, beta + 1e-30 * state[0, 0, 0, 0], state)[1]

    seconds = run.seconds(step, initial, *x, repeats=5)
    short = tuple(a[: run.size(1024, 32), :2] for a in x)
    out, _ = run.call(op, *short, initial[:, :2])
    elements = tokens * heads * dim
    floor = run.floor(bytes_moved=elements * (3 * 2 + 4 + 2), flop=elements * dim * 6)
    peer = _fla_chunk(run, tokens, heads)
    target = {(8192, 8): 450.0}.get((tokens, heads), None if peer is None else peer * 1e6)
    return run.row(
        f"KDA prefill, {tokens} tokens x {heads} heads",
        seconds * 1e6,
        floor=floor * 1e6,
        target=target,
        peer="flash-linear-attention chunk_kda, safe gate",
        peer_value=None if peer is None else peer * 1e6,
        error=relative_error(out, _float64_recurrence(short, initial[0, :2])),
    )


def _decode(run: Harness, rows: int, heads: int, window: int) -> Row:
    """Decode rows of `window` tokens, all of the last window accepted: its replay is in the time."""
    dim = run.size(128, 16)
    x = _inputs((rows, window), heads, dim)
    slots = rows + 2
    state = 0.1 * jax.random.normal(jax.random.key(8), (STATE_LAYERS, slots, heads, dim, dim))
    stacked = (jnp.zeros((STATE_LAYERS, slots, *a.shape[1:]), a.dtype).at[:, :rows].set(a) for a in x[1:])
    ids, accepted = jnp.arange(rows, dtype=jnp.int32), jnp.full(rows, window, jnp.int32)

    def op(state: Any, records: Any, layer: Any, x: Any, accepted: Any) -> Any:
        return kda_decode(*x, state, layer, ids, records, ids, accepted, implementation=run.implementation)

    def step(carry: Any, *x: Any) -> Any:
        state, records, layer = carry
        _, state, records = op(state, records, layer, x, accepted)
        return state, records, (layer + 1) % STATE_LAYERS

    records = KdaRecords(*stacked)
    out, _, _ = run.call(op, state, records, jnp.int32(0), x, jnp.zeros_like(accepted))
    expected = _float64_recurrence(tuple(a[0] for a in x), state[0, 0])
    seconds = run.seconds(step, (state, records, jnp.int32(0)), *x, repeats=40)
    floor = run.floor(bytes_moved=rows * heads * dim * dim * 4 * 2)
    peer = _fla_recurrent(run, rows, heads) if window == 1 else None
    return run.row(
        f"KDA decode, {rows} rows x {heads} heads, window {window}",
        seconds * 1e6,
        floor=floor * 1e6,
        target=1.4 * floor * 1e6 if (rows, heads) == (32, 64) else None,
        peer="flash-linear-attention fused_recurrent_kda",
        peer_value=None if peer is None else peer * 1e6,
        error=relative_error(out[0], expected),
    )


def _convolution(run: Harness, rows: int, channels: int) -> Row:
    taps, window = 4, 1
    x = jax.random.normal(jax.random.key(1), (rows, window, channels), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(2), (channels, taps), jnp.bfloat16)
    state = jax.random.normal(
        jax.random.key(3), (STATE_LAYERS, rows, taps - 1 + window, channels), jnp.bfloat16
    )
    ids, accepted = jnp.arange(rows, dtype=jnp.int32), jnp.full(rows, window, jnp.int32)

    def op(x: Any, weight: Any, state: Any) -> Any:
        return short_convolution_decode(x, weight, state, 0, ids, accepted, implementation=run.implementation)

    seconds = run.seconds(lambda state, x, weight: op(x, weight, state)[1], state, x, weight, repeats=20)
    y, _ = run.call(op, x, weight, state)
    entries = np.concatenate(
        [np.asarray(state[0, :, window:], np.float64), np.asarray(x, np.float64)], axis=1
    )
    total = np.einsum("rjc,cj->rc", entries, np.asarray(weight, np.float64))
    return run.row(
        f"short convolution decode, {rows} rows x {channels} channels",
        seconds * 1e6,
        floor=run.floor(bytes_moved=rows * channels * 2 * (2 * (taps - 1 + window) + 2)) * 1e6,
        error=relative_error(y[:, 0], total / (1 + np.exp(-total))),
    )


def _fla_chunk(run: Harness, tokens: int, heads: int) -> float | None:
    def setup(torch: Any) -> Any:
        from fla.ops.kda import chunk_kda

        arguments = _fla_inputs(torch, tokens, heads)
        options = {"use_qk_l2norm_in_kernel": False, "safe_gate": True, "lower_bound": -5.0}
        with torch.no_grad():
            return lambda: chunk_kda(*arguments, scale=1.0, output_final_state=True, **options)

    return _optional(run, setup)


def _fla_recurrent(run: Harness, rows: int, heads: int) -> float | None:
    def setup(torch: Any) -> Any:
        from fla.ops.kda import fused_recurrent_kda

        arguments = _fla_inputs(torch, 1, heads, rows)
        initial = torch.zeros(rows, heads, 128, 128, device="cuda")
        return lambda: fused_recurrent_kda(
            *arguments, scale=1.0, initial_state=initial, output_final_state=True
        )

    return _optional(run, setup)


def _optional(run: Harness, setup: Any) -> float | None:
    """The peer's seconds, or None where it is not installed or does not run here."""
    try:
        return run.torch_seconds(setup)
    except Exception as error:
        print(f"no peer: {type(error).__name__}: {error}")
        return None


def _fla_inputs(torch: Any, tokens: int, heads: int, rows: int = 1) -> tuple[Any, ...]:
    shape = (rows, tokens, heads, 128)

    def normal() -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, k = (torch.nn.functional.normalize(normal(), dim=-1) for _ in range(2))
    log_decay = -5 * torch.sigmoid(2 * torch.randn(shape, device="cuda") - 1)
    return q * 128**-0.5, k, normal(), log_decay, torch.rand(shape[:-1], device="cuda").to(torch.bfloat16)
