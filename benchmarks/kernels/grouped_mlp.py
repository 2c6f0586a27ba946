"""The routed experts at the released shapes (288 of 4096 x 2048, eight a token), and block-scaled matmul."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.harness import Harness, Row, relative_error
from pallas_kernels import block_scaled, grouped_mlp_kernel
from pallas_kernels import grouped_mlp as op

LIMIT = 10.0
SLOTS = 8
# Experts differ in where they lie, which is what costs time; their values repeat after this many.
DISTINCT = 4
EXPERTS = 288
# (name, tokens, inner, float8, quantised activations)
CASES = (
    ("experts fp8, 1 token", 1, 2048, True, True),
    ("experts fp8, 32 tokens", 32, 2048, True, True),
    ("experts fp8, 128 tokens", 128, 2048, True, True),
    ("experts fp8, 8192 tokens", 8192, 2048, True, True),
    ("experts fp8, 32 tokens, an eighth", 32, 256, True, True),
    ("experts fp8, 8192 tokens, an eighth", 8192, 256, True, True),
    ("experts bf16, 32 tokens", 32, 2048, False, False),
    ("experts bf16, 8192 tokens", 8192, 2048, False, False),
)


@functools.lru_cache(maxsize=4)
def weights(harness: Harness, inner: int, float8: bool) -> tuple[Any, Any]:
    """(gate_up, down), each (values, scales)."""
    dim, inner = harness.size(4096, 256), harness.size(inner, 128)
    experts = harness.size(EXPERTS, 6)
    keys = jax.random.split(jax.random.key(inner), 2)
    gate_up = jax.random.normal(keys[0], (DISTINCT, 2, inner, dim), jnp.bfloat16) * dim**-0.5
    down = jax.random.normal(keys[1], (DISTINCT, dim, inner), jnp.bfloat16) * inner**-0.5
    repeats = -(-experts // DISTINCT)

    @jax.jit
    def spread(w: jax.Array) -> jax.Array:
        return jnp.tile(w, (repeats, *[1] * (w.ndim - 1)))[:experts]

    if not float8:
        return (spread(gate_up), None), (spread(down), None)
    return tuple(tuple(map(spread, jax.jit(block_scaled.quantize_blocks)(w))) for w in (gate_up, down))


def routing(harness: Harness, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(x, expert ids, expert weights), uniform routing."""
    experts, dim, slots = harness.size(EXPERTS, 6), harness.size(4096, 256), harness.size(SLOTS, 2)
    random = np.random.default_rng(tokens)
    ids = np.argsort(random.random((tokens, experts)), axis=1)[:, :slots].astype(np.int32)
    share = random.random((tokens, slots)).astype(np.float32)
    x = jax.random.normal(jax.random.key(tokens), (tokens, dim), jnp.bfloat16)
    return x, jnp.asarray(ids), jnp.asarray(share / share.sum(axis=1, keepdims=True) * 2.5)


def error(out: jax.Array, arrays: tuple, gate_up: Any, down: Any, quantized: bool) -> float:
    """Against float64 on the host for the last token, activations rounded to float8 where the kernel does.

    The kernel rounds gate, up and their product to bfloat16 first, which moves some activations to the
    neighbouring float8: about 1.5e-2 in all, where quantisation itself costs 3e-2.
    """
    x, ids, share = arrays

    def plain(weight: Any, expert: int) -> np.ndarray:
        values, scales = (None if w is None else w[expert] for w in weight)
        if scales is not None:
            values = block_scaled.dequantize_blocks(values, scales, jnp.float32)
        return np.asarray(values.astype(jnp.float32), np.float64)

    def seen(values: np.ndarray) -> np.ndarray:
        narrow = jnp.asarray(values, jnp.float32).astype(jnp.bfloat16)
        rounded = block_scaled.round_activations(narrow) if quantized else narrow.astype(jnp.float32)
        return np.asarray(rounded, np.float64)

    row = seen(np.asarray(x[-1].astype(jnp.float32)))
    expected = np.zeros(x.shape[1])
    kinds: dict[int, np.ndarray] = {}
    for expert, weight in zip(np.asarray(ids[-1]), np.asarray(share[-1], np.float64), strict=True):
        kind = int(expert) % DISTINCT
        if kind not in kinds:
            gate, up = plain(gate_up, kind) @ row
            gate = np.minimum(gate, LIMIT)
            hidden = gate / (1 + np.exp(-gate)) * np.clip(up, -LIMIT, LIMIT)
            kinds[kind] = plain(down, kind) @ seen(hidden)
        expected += weight * kinds[kind]
    return relative_error(out[-1], expected)


def run(harness: Harness, arrays: tuple, gate_up: Any, down: Any, quantized: bool, plan: Any = None) -> Any:
    """One call; the platform's own plan unless one is given."""
    if plan is not None:
        return grouped_mlp_kernel.grouped_mlp_triton(
            *arrays,
            gate_up,
            down,
            limit=LIMIT,
            quantize_activations=quantized,
            interpret=harness.tiny,
            plan=plan,
        )
    return op.grouped_mlp(
        *arrays,
        gate_up[0],
        down[0],
        limit=LIMIT,
        gate_up_scales=gate_up[1],
        down_scales=down[1],
        quantize_activations=quantized,
        implementation=harness.implementation,
    )


def seconds(
    harness: Harness, arrays: tuple, gate_up: Any, down: Any, quantized: bool, plan: Any = None
) -> float:
    """Device seconds of the whole op, layout and combine included."""

    def step(x: jax.Array, *rest: Any) -> jax.Array:
        ids, share, gate_up, down = rest
        out = run(harness, (x, ids, share), gate_up, down, quantized, plan)
        return x + out * 0  # the next repeat waits for this one

    return harness.seconds(step, *arrays, gate_up, down, repeats=3 if arrays[0].shape[0] > 1000 else 10)


def hidden_seconds(harness: Harness, arrays: tuple, gate_up: Any, quantized: bool, plan: Any = None) -> float:
    """Device seconds of layout, quantisation, gate and up with the activation."""
    if plan is None:
        experts, _, inner, _ = gate_up[0].shape
        plan = grouped_mlp_kernel.cuda_plan(arrays[1].size, experts, inner, gate_up[1] is not None, quantized)

    def step(x: jax.Array, ids: jax.Array, gate_up: Any) -> jax.Array:
        (hidden, _), _ = grouped_mlp_kernel.expert_hidden(
            plan, x, ids, gate_up, limit=LIMIT, quantized=quantized, interpret=harness.tiny
        )
        return x + hidden[0, 0].astype(x.dtype) * 0

    return harness.seconds(step, *arrays[:2], gate_up, repeats=3)


def floor(harness: Harness, ids: jax.Array, gate_up: Any, down: Any, dim: int) -> float:
    """The touched experts' weights once, or the products at the bfloat16 rate."""
    inner = gate_up[0].shape[2]
    touched = len(np.unique(np.asarray(ids)))
    bytes_moved = touched * 3 * inner * dim * gate_up[0].dtype.itemsize
    return harness.floor(bytes_moved=bytes_moved, flop=ids.size * 6 * inner * dim)


def torch_grouped(tokens: int) -> Any:
    """The peer: bfloat16 grouped_mm, 288 experts, 4096 to 4096, rows already sorted and gathered."""

    def set_up(torch: Any) -> Any:
        rows = tokens * SLOTS
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        w = torch.empty(288, 4096, 4096, device="cuda", dtype=torch.bfloat16).normal_()
        counts = np.bincount(np.arange(rows) % 288, minlength=288)
        ends = torch.from_numpy(np.cumsum(counts).astype(np.int32)).to("cuda")
        return lambda: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)

    return set_up


def measure(harness: Harness) -> list[Row]:
    rows = []
    for name, tokens, inner, float8, quantized in CASES:
        tokens = harness.size(tokens, min(tokens, 5))
        gate_up, down = weights(harness, inner, float8)
        arrays = routing(harness, tokens)
        least = floor(harness, arrays[1], gate_up, down, arrays[0].shape[1])
        experts = lambda *a, q=quantized: run(harness, a[:3], a[3], a[4], q)  # noqa: E731
        out = harness.call(experts, *arrays, gate_up, down)
        rows.append(
            harness.row(
                name,
                seconds(harness, arrays, gate_up, down, quantized) * 1e6,
                floor=least * 1e6,
                target=least / 0.75 * 1e6 if name == "experts fp8, 32 tokens" else None,
                error=error(out, arrays, gate_up, down, quantized),
            )
        )
        if inner == 2048 and (tokens > 1000 or harness.tiny):
            peer = harness.torch_seconds(torch_grouped(tokens))
            rows.append(
                harness.row(
                    f"{name}, gate and up",
                    hidden_seconds(harness, arrays, gate_up, quantized) * 1e6,
                    target=None if peer is None else peer * 1e6,
                    peer="torch grouped_mm bf16",
                    peer_value=None if peer is None else peer * 1e6,
                )
            )
    return rows + dense(harness)


def dense(harness: Harness) -> list[Row]:
    """Block-scaled matmul of the dense layers: 4096 to 12288."""
    rows = []
    dim, columns = harness.size(4096, 256), harness.size(12288, 256)
    w = jax.random.normal(jax.random.key(0), (columns, dim), jnp.bfloat16) * dim**-0.5
    values, scales = jax.jit(block_scaled.quantize_blocks)(w)
    for tokens in (1, 32, 8192):
        tokens = harness.size(tokens, min(tokens, 5))
        x = jax.random.normal(jax.random.key(tokens), (tokens, dim), jnp.bfloat16)

        def matmul(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
            return block_scaled.block_scaled_matmul(
                x, values, scales, quantize_activations=True, implementation=harness.implementation
            )

        def step(x: jax.Array, values: jax.Array, scales: jax.Array, matmul: Any = matmul) -> jax.Array:
            return x + matmul(x, values, scales)[:, :1] * 0

        least = harness.floor(bytes_moved=values.size, flop=2 * tokens * values.size)
        rows.append(
            harness.row(
                f"block-fp8 matmul, {tokens} tokens",
                harness.seconds(step, x, values, scales) * 1e6,
                floor=least * 1e6,
                error=matmul_error(harness.call(matmul, x, values, scales), x, values, scales),
            )
        )
    return rows


def matmul_error(out: jax.Array, x: jax.Array, values: jax.Array, scales: jax.Array) -> float:
    """Against float64 on the host for the last token and 1,024 outputs, its activations rounded to float8."""
    seen = np.asarray(block_scaled.round_activations(x[-1]), np.float64)
    some = slice(0, 1024)
    plain = block_scaled.dequantize_blocks(
        values[some], scales[: -(-values[some].shape[0] // 128)], jnp.float32
    )
    return relative_error(out[-1, some], np.asarray(plain, np.float64) @ seen)
