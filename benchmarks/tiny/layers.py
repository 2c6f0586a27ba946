"""Layers of the training forward: whole rectangular batches, no cache, written for many short rows at once.

Mathematics of MODEL.md M; `tests/benchmarks/test_tiny_model.py` holds it to `glm_jax.forward` on the exported
checkpoint. Compute dtype is that of the activations; gates, norms, softmaxes and states are float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.tiny.parameters import Params
from benchmarks.tiny.shape import Shape

MASKED = -1e30


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w.astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight.astype(x.dtype)


# ---- hyper-connections. Streams [batch, time, n, hidden]; gates [n, ..., batch, time]: time last, for GPUs


def hyper_connection_in(
    streams: jax.Array, p: Params, half: int, s: Shape
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden [batch, time, hidden], post [n, batch, time], mixing [from, to, batch, time].

    half: 0 before attention, 1 before the MLP.
    """
    batch, time, n, _ = streams.shape
    fn, base, scale = p["hc.fn"][half], p["hc.base"][half][:, None, None], p["hc.scale"][half]
    flat = streams.reshape(batch, time, -1)
    norm = lax.rsqrt(jnp.mean(flat.astype(jnp.float32) ** 2, -1) + s.rms_norm_eps)
    mixes = norm * jnp.einsum("bsk,nk->nbs", flat, fn.astype(flat.dtype), preferred_element_type=jnp.float32)
    pre = jax.nn.sigmoid(mixes[:n] * scale[0] + base[:n]) + s.hc_eps
    post = 2 * jax.nn.sigmoid(mixes[n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixes[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n, batch, time)
    return collapse(pre, streams), post, sinkhorn(jax.nn.softmax(comb, 1) + s.hc_eps, s)


def sinkhorn(comb: jax.Array, s: Shape) -> jax.Array:
    """Doubly stochastic mixing from positive [from, to, ...]: columns, then rows and columns in turn."""

    def columns(c: jax.Array) -> jax.Array:
        return c / (c.sum(0, keepdims=True) + s.hc_eps)

    def rows_columns(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return columns(c / (c.sum(1, keepdims=True) + s.hc_eps)), None

    return lax.scan(rows_columns, columns(comb), None, length=s.hc_sinkhorn_iterations - 1)[0]


# The backward passes of these two are spelled out: XLA's fusions would recompute the stream sums many times.


@jax.custom_vjp
def collapse(pre: jax.Array, streams: jax.Array) -> jax.Array:
    """sum_i pre[i] streams[:, :, i], accumulated in float32."""
    n = streams.shape[2]
    return sum(pre[i][..., None] * streams[:, :, i].astype(jnp.float32) for i in range(n)).astype(
        streams.dtype
    )


def _collapse_backward(
    saved: tuple[jax.Array, jax.Array], d_hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    pre, streams = saved
    d_wide = d_hidden[:, :, None].astype(jnp.float32)
    d_pre = jnp.moveaxis((d_wide * streams.astype(jnp.float32)).sum(-1), -1, 0)
    return d_pre, (jnp.moveaxis(pre, 0, -1)[..., None] * d_wide).astype(streams.dtype)


collapse.defvjp(lambda pre, streams: (collapse(pre, streams), (pre, streams)), _collapse_backward)


@jax.custom_vjp
def hyper_connection_out(streams: jax.Array, post: jax.Array, comb: jax.Array, out: jax.Array) -> jax.Array:
    """streams'[k] = post[k] out + sum_j comb[j, k] streams[j]."""
    n = streams.shape[2]
    wide = [streams[:, :, j].astype(jnp.float32) for j in range(n)]
    mixed = [
        post[k][..., None] * out.astype(jnp.float32) + sum(comb[j, k][..., None] * wide[j] for j in range(n))
        for k in range(n)
    ]
    return jnp.stack([m.astype(streams.dtype) for m in mixed], 2)


def _out_backward(saved: tuple[jax.Array, ...], d_streams: jax.Array) -> tuple[jax.Array, ...]:
    streams, post, comb, out = saved
    n = streams.shape[2]
    wide = d_streams.astype(jnp.float32)
    d = [wide[:, :, k] for k in range(n)]
    d_in = jnp.stack(
        [sum(comb[j, k][..., None] * d[k] for k in range(n)).astype(streams.dtype) for j in range(n)], 2
    )
    d_out = sum(post[k][..., None] * d[k] for k in range(n)).astype(out.dtype)
    d_post = jnp.moveaxis((wide * out[:, :, None].astype(jnp.float32)).sum(-1), -1, 0)
    d_comb = jnp.stack([(streams[:, :, j : j + 1].astype(jnp.float32) * wide).sum(-1) for j in range(n)])
    return d_in, d_post, jnp.moveaxis(d_comb, -1, 1), d_out


hyper_connection_out.defvjp(lambda *args: (hyper_connection_out(*args), args), _out_backward)


# ---- MLPs


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, limit: float) -> jax.Array:
    hidden = jax.nn.silu(jnp.minimum(matmul(x, gate), limit)) * jnp.clip(matmul(x, up), -limit, limit)
    return matmul(hidden, down)


def moe(x: jax.Array, p: Params, s: Shape) -> tuple[jax.Array, jax.Array]:
    """Output [batch, time, hidden] and the chosen experts as a bool [batch, time, experts].

    All experts run on all tokens: at this size that is faster than grouping.
    """
    scores = jax.nn.sigmoid(
        jnp.matmul(x.astype(jnp.float32), p["moe.router"], precision=lax.Precision.HIGHEST)
    )
    chosen = _best(lax.stop_gradient(scores + p["moe.bias"]), s.experts_per_token)
    weights = jnp.where(chosen, scores, 0.0)
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20) * s.routed_scaling_factor
    gate = jnp.einsum("bsd,edf->bsef", x, p["moe.gate"].astype(x.dtype))
    up = jnp.einsum("bsd,edf->bsef", x, p["moe.up"].astype(x.dtype))
    hidden = jax.nn.silu(jnp.minimum(gate, s.swiglu_limit)) * jnp.clip(up, -s.swiglu_limit, s.swiglu_limit)
    hidden = hidden * weights[..., None].astype(x.dtype)
    routed = jnp.einsum("bsef,efd->bsd", hidden, p["moe.down"].astype(x.dtype))
    return routed + swiglu(x, p["shared.gate"], p["shared.up"], p["shared.down"], s.swiglu_limit), chosen


def _best(scores: jax.Array, count: int) -> jax.Array:
    """bool like scores: the `count` largest of the last axis, ties to the lowest. Sorts are slow on GPUs."""
    chosen = jnp.zeros(scores.shape, bool)
    for _ in range(count):
        best = jnp.where(chosen, -jnp.inf, scores).argmax(-1)
        chosen |= jax.nn.one_hot(best, scores.shape[-1], dtype=bool)
    return chosen


# ---- Kimi delta attention


def kda(x: jax.Array, p: Params, s: Shape) -> jax.Array:
    """[batch, time, hidden] -> the same; time a multiple of the chunk, state from zero."""
    batch, time, _ = x.shape
    heads, dim = s.kda_heads, s.kda_head_dim
    qkv = jnp.concatenate([matmul(x, p["kda.q"]), matmul(x, p["kda.k"]), matmul(x, p["kda.v"])], -1)
    padded = jnp.pad(qkv.astype(jnp.float32), ((0, 0), (s.conv_kernel - 1, 0), (0, 0)))
    mixed = jax.nn.silu(sum(padded[:, i : i + time] * p["kda.conv"][i] for i in range(s.conv_kernel)))
    q, k, v = (part.reshape(batch, time, heads, dim) for part in jnp.split(mixed, 3, -1))
    q, k = (u * lax.rsqrt((u * u).sum(-1, keepdims=True) + 1e-6) for u in (q, k))
    forget = matmul(matmul(x, p["kda.f_a"]), p["kda.f_b"]).astype(jnp.float32) + p["kda.dt_bias"]
    forget = jnp.exp(p["kda.A_log"])[:, None] * forget.reshape(batch, time, heads, dim)
    log_decay = s.gate_lower_bound * jax.nn.sigmoid(forget)
    beta = jax.nn.sigmoid(matmul(x, p["kda.beta"]).astype(jnp.float32))
    out = delta_rule(q * dim**-0.5, k, v, log_decay, beta, min(s.kda_chunk, time))
    out = out * lax.rsqrt(jnp.mean(out * out, -1, keepdims=True) + s.rms_norm_eps) * p["kda.o_norm"]
    gate = jax.nn.sigmoid(matmul(matmul(x, p["kda.g_a"]), p["kda.g_b"]).astype(jnp.float32))
    return matmul((out.reshape(batch, time, -1) * gate).astype(x.dtype), p["kda.o"])


def delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, chunk: int
) -> jax.Array:
    """Chunked gated delta rule, all rows at once: q, k, v, g [batch, time, heads, dim], beta [..., heads].

    Decays inside a chunk are taken against the start of each block of 16 tokens, so that with a lower bound
    of -5 no exponent passes 80. (I + A) X = B is solved by the nilpotent series inside blocks and by
    substitution between them.
    """
    batch, time, heads, dim = k.shape
    block = min(16, chunk)
    chunks, blocks = time // chunk, chunk // block

    def split(x: jax.Array) -> jax.Array:  # -> [batch, heads, chunks, chunk, dim]
        return x.reshape(batch, chunks, chunk, heads, -1).transpose(0, 3, 1, 2, 4)

    q, k, v, g, beta = split(q), split(k), split(v), split(g), split(beta)
    total = jnp.cumsum(g, 3)
    start = jnp.concatenate(
        [jnp.zeros_like(total[..., :1, :]), total[..., block - 1 : chunk - 1 : block, :]], 3
    )
    from_start = jnp.exp(total - jnp.repeat(start, block, 3))
    earlier = (jnp.arange(chunk) // block)[None] <= jnp.arange(blocks)[:, None]
    exponent = jnp.where(earlier[..., None], start[..., :, None, :] - total[..., None, :, :], -100.0)
    k_start = k[..., None, :, :] * jnp.exp(exponent)

    def pairs(x: jax.Array) -> jax.Array:  # [..., i, j] = sum_d x_i k_j exp(total_i - total_j)
        rows = (x * from_start).reshape(batch, heads, chunks, blocks, block, dim)
        return jnp.einsum("bhnaid,bhnajd->bhnaij", rows, k_start).reshape(batch, heads, chunks, chunk, chunk)

    a = jnp.tril(pairs(k), -1) * beta
    attention = jnp.tril(pairs(q))
    decay = jnp.exp(total)
    solved = _solve_unit_lower(a, jnp.concatenate([beta * v, beta * k * decay], -1), block)
    u, w = solved[..., :dim], solved[..., dim:]
    last = total[..., -1:, :]
    k_last = k * jnp.exp(last - total)
    read = jnp.concatenate([w, q * decay], -2)

    def step(state: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        read_, u_, k_, decay_ = xs
        seen = read_ @ state
        new = u_ - seen[..., :chunk, :]
        return decay_[..., None] * state + jnp.swapaxes(k_, -1, -2) @ new, (new, seen[..., chunk:, :])

    chunks_first = functools.partial(jnp.moveaxis, source=2, destination=0)
    xs = tuple(chunks_first(x) for x in (read, u, k_last, jnp.exp(last[..., 0, :])))
    _, (new, seen) = lax.scan(step, jnp.zeros((batch, heads, dim, dim), jnp.float32), xs)
    out = jnp.moveaxis(seen, 0, 2) + attention @ jnp.moveaxis(new, 0, 2)
    return out.transpose(0, 2, 3, 1, 4).reshape(batch, time, heads, dim)


def _solve_unit_lower(a: jax.Array, b: jax.Array, block: int) -> jax.Array:
    """X with (I + a) X = b, a strictly lower triangular [..., chunk, chunk]."""
    highest = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    blocks = a.shape[-1] // block
    a = a.reshape(*a.shape[:-2], blocks, block, blocks, block)
    power = -jnp.stack([a[..., i, :, i, :] for i in range(blocks)], -3)
    inverse = jnp.eye(block) + power
    reach = 2
    while reach < block:
        power = highest(power, power)
        inverse = inverse + highest(inverse, power)
        reach *= 2
    b = b.reshape(*b.shape[:-2], blocks, block, b.shape[-1])
    solved: list[jax.Array] = []
    for i in range(blocks):
        rest = b[..., i, :, :]
        if solved:
            left = jnp.concatenate([a[..., i, :, j, :] for j in range(i)], -1)
            rest = rest - left @ jnp.concatenate(solved, -2)
        solved.append(inverse[..., i, :, :] @ rest)
    return jnp.concatenate(solved, -2)
