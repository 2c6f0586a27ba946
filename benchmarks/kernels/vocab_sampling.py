"""Sampling from 154,880 logits a row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.harness import Harness, Row
from pallas_kernels import vocab_sampling as op
from pallas_kernels import vocab_sampling_kernel as kernel
from pallas_kernels.vocab_edge_kernel import Plan

VOCABULARY = 154_880
# (name, rows, spread of the logits, temperature, top_k, top_p, target in microseconds)
CASES = (
    ("sampling 128 rows, top-p 0.95", 128, 3.0, 1.0, 0, 0.95, 300.0),
    ("sampling 128 rows, top-p 0.95, flat", 128, 1.0, 1.0, 0, 0.95, None),
    ("sampling 128 rows, top-k 50, top-p 0.95", 128, 3.0, 0.7, 50, 0.95, None),
    ("sampling 128 rows, greedy", 128, 3.0, 0.0, 0, 1.0, None),
    ("sampling 1 row, top-p 0.95", 1, 3.0, 1.0, 0, 0.95, None),
    ("sampling 32 rows, top-p 0.95", 32, 3.0, 1.0, 0, 0.95, None),
)


def problem(
    harness: Harness, rows: int, spread: float, temperature: float, top_k: int, top_p: float
) -> tuple[jax.Array, ...]:
    """(logits, temperature, top_k, top_p, min_p, seeds, choices, positions)."""
    logits = jax.random.normal(jax.random.key(rows), (rows, harness.size(VOCABULARY, 500))) * spread
    return (
        logits,
        jnp.full(rows, temperature),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, top_p),
        jnp.zeros(rows),
        jnp.arange(rows, dtype=jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.arange(rows, dtype=jnp.int32),
    )


def draw(harness: Harness, arrays: tuple, plan: Plan | None = None) -> jax.Array:
    """Tokens [rows]."""
    if plan is None:
        return op.sample_tokens(*arrays, implementation=harness.implementation)
    greedy = arrays[1] < op.GREEDY_TEMPERATURE
    return kernel.sample_tokens_triton(*arrays[:2], greedy, *arrays[2:], interpret=harness.tiny, plan=plan)


def seconds(harness: Harness, arrays: tuple, plan: Plan | None = None) -> float:
    """Device seconds; the next repeat's positions wait for this one's tokens."""

    def step(positions: jax.Array, *rest: jax.Array) -> jax.Array:
        return positions + jnp.minimum(draw(harness, (*rest, positions), plan), 1)

    return harness.seconds(step, arrays[-1], *arrays[:-1], repeats=6)


def wrong(tokens: jax.Array, arrays: tuple) -> float:
    """The share of rows whose token is not the argmax of float64 scores over a kept set found by sorting,
    unless its score is within 1e-4 of it."""
    logits, temperature, top_k, top_p, _, seeds, choices, positions = (np.asarray(a) for a in arrays)
    bad, checked = 0, range(0, len(tokens), max(1, len(tokens) // 8))
    for row in checked:
        values = logits[row].astype(np.float64)
        if temperature[row] == 0:
            bad += int(tokens[row]) != values.argmax()
            continue
        scaled = (values - values.max()) / temperature[row]
        order = np.argsort(-values)
        if top_k[row] > 0:
            order = order[: top_k[row]]
        mass = np.cumsum(np.exp(scaled[order]))
        order = order[: 1 + np.searchsorted(mass, np.float64(top_p[row]) * mass[-1])]
        keys = (jnp.asarray(x[row : row + 1]) for x in (seeds, choices, positions))
        noise = np.asarray(op.gumbel(*keys, jnp.arange(logits.shape[1]))[0], np.float64)
        best = (scaled + noise)[order].max()
        token = int(tokens[row])
        bad += token not in set(order.tolist()) or scaled[token] + noise[token] < best - 1e-4
    return bad / len(checked)


def torch_sort(rows: int, spread: float, top_p: float) -> Any:
    """The peer: softmax, sort, cumulative sum, mask, multinomial."""

    def set_up(torch: Any) -> Any:
        logits = torch.randn(rows, VOCABULARY, device="cuda") * spread

        def call() -> Any:
            values, ids = logits.softmax(-1).sort(-1, descending=True)
            values[values.cumsum(-1) - values > top_p] = 0
            return ids.gather(-1, torch.multinomial(values, 1))

        return call

    return set_up


def measure(harness: Harness) -> list[Row]:
    rows = []
    for name, count, spread, temperature, top_k, top_p, target in CASES:
        count = harness.size(count, min(count, 3))
        arrays = problem(harness, count, spread, temperature, top_k, top_p)
        peer = None
        if target is not None:
            peer = harness.torch_seconds(torch_sort(count, spread, top_p))
        rows.append(
            harness.row(
                name,
                seconds(harness, arrays) * 1e6,
                floor=harness.floor(bytes_moved=arrays[0].nbytes) * 1e6,
                target=target,
                peer="torch sort and multinomial",
                peer_value=None if peer is None else peer * 1e6,
                error=wrong(harness.call(lambda *a: draw(harness, a), *arrays), arrays),
            )
        )
    return rows
