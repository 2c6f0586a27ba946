"""Times variants of the KDA kernels' tiles on the device and checks them against float64.

    python -m benchmarks.kernels.tune_kda [--tiny] [--only intra,state,total,decode,error]

Every variant stands alone: one that fails prints its error and costs no other. A compact table comes last.
`--tiny` rehearses everything on a CPU in the interpreter.
"""

import argparse
import functools
import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import kda_decode_kernel, kda_prefill_kernel
from pallas_kernels.kda import KdaRecords, kda_decode, kda_prefill
from pallas_kernels.kda_chunk_plan import chunk_plan
from pallas_kernels.kda_intra_kernel import intra
from pallas_kernels.kda_state_kernel import scan_states
from pallas_kernels.triton import Launch
from tests.pallas_kernels import kda_oracle

TINY = "--tiny" in sys.argv
DIM = 16 if TINY else 128
LINES: list[str] = []
STARTED = time.perf_counter()


def report(line: str) -> None:
    LINES.append(line)
    print(f"[{time.perf_counter() - STARTED:5.0f} s] {line}", flush=True)


def attempt(name: str, function) -> None:
    try:
        report(f"{name}: {function()}")
    except Exception as error:
        report(f"{name}: FAILED {type(error).__name__} {str(error)[:160]!r}")


def microseconds(step, carry, repeats: int = 20) -> float:
    """Device time of `carry = step(carry)` by the difference of two loop lengths in one program."""
    short, long = (1, 2) if TINY else (2, 2 + repeats)
    run = jax.jit(lambda n, carry: lax.fori_loop(0, n, lambda _, c: step(c), carry))

    def best(n: int) -> float:
        jax.block_until_ready(run(n, carry))
        times = []
        for _ in range(1 if TINY else 4):
            start = time.perf_counter()
            jax.block_until_ready(run(n, carry))
            times.append(time.perf_counter() - start)
        return min(times)

    return (best(long) - best(short)) / (long - short) * 1e6


def prefill_inputs(tokens: int, heads: int, rows: int = 1):
    keys = jax.random.split(jax.random.key(0), 6)
    shape = (tokens, heads, DIM)

    def unit(key):
        x = jax.random.normal(key, shape)
        return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True))

    q, k = unit(keys[0]) * DIM**-0.5, unit(keys[1])
    decay = -5 * jax.nn.sigmoid(2 * jax.random.normal(keys[2], shape) - 1)
    beta = jax.nn.sigmoid(jax.random.normal(keys[3], shape[:2]))
    initial = 0.1 * jax.random.normal(keys[4], (rows, heads, DIM, DIM))
    v = jax.random.normal(keys[5], shape)
    cu_seqlens = jnp.arange(rows + 1, dtype=jnp.int32) * (tokens // rows)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return (q, k, v, decay, beta, initial, cu_seqlens, jnp.full((rows, 0), -1, jnp.int32))


def nudge(x, state):
    """x, but depending on state, so that no repeat can be hoisted or merged."""
    return x + 1e-30 * state.reshape(-1)[0].astype(x.dtype)


def time_intra(chunk: int, warps: int, precision: str, tokens: int, heads: int) -> str:
    q, k, v, decay, beta, _, cu_seqlens, marks = prefill_inputs(tokens, heads)
    plan = chunk_plan(cu_seqlens, marks, tokens, chunk)

    def step(seed):
        terms = intra(
            plan, q, k, v, decay, nudge(beta, seed),
            chunk=chunk, launch=Launch(warps, 1), precision=precision, interpret=TINY,
        )  # fmt: skip
        return terms[-1][0, 0]

    return f"{microseconds(step, jnp.zeros(DIM)):.0f} us"


def time_state(
    chunk: int, columns: int, warps: int, stages: int, segments: int, tokens: int, heads: int
) -> str:
    *_, v, _, _, initial, cu_seqlens, marks = prefill_inputs(tokens, heads)[1:]
    plan = chunk_plan(cu_seqlens, marks, tokens, chunk)
    tile, chunks = (chunk, DIM), plan.start.shape[0]
    shapes = [(DIM, chunk), tile, tile, tile, (chunk, chunk)]
    keys = jax.random.split(jax.random.key(3), len(shapes))
    terms = [  # their values do not matter to the time, only that the recurrence stays finite
        0.01 * jax.random.normal(key, (heads, chunks, *shape), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    terms.append(jnp.full((heads, chunks, DIM), 0.5))

    def step(state):
        return scan_states(
            plan,
            state,
            terms,
            v,
            chunk=chunk,
            width=min(columns, DIM),
            segments=segments,
            precision="ieee" if TINY else "tf32x3",
            launch=Launch(warps, stages),
            interpret=TINY,
        )[1]

    return f"{microseconds(step, initial):.0f} us"


def config(chunk=32, columns=64, intra_warps=4, warps=4, stages=2, precision="tf32", segments=1):
    return kda_prefill_kernel.PrefillConfig(
        chunk=chunk, columns=min(columns, DIM), intra=Launch(intra_warps, 1), state=Launch(warps, stages),
        precision=precision, exact="tf32x3", segments=segments,
    )  # fmt: skip


def time_total(tokens: int, heads: int, chosen) -> str:
    q, k, v, decay, beta, initial, cu_seqlens, marks = prefill_inputs(tokens, heads)

    def step(state):
        if chosen is None:
            return kda_prefill(
                q, k, v, decay, nudge(beta, state), state, cu_seqlens,
                gate_lower_bound=-5.0, implementation="interpret" if TINY else "triton",
            )[1]  # fmt: skip
        return kda_prefill_kernel.prefill(
            q, k, v, decay, nudge(beta, state), state, cu_seqlens, marks, config=chosen, interpret=TINY
        )[1]

    return f"{microseconds(step, initial):.0f} us"


@functools.partial(jax.jit, static_argnames="config")
def run_prefill(*arguments, config):
    return kda_prefill_kernel.prefill(*arguments, config=config, interpret=TINY)


def error_of(chosen, gates: str, dtype=jnp.bfloat16) -> str:
    tokens = 64 if TINY else 1024
    cu_seqlens = np.array([0, 0, 1, tokens // 3, tokens - 7], np.int32)
    rng = np.random.default_rng(1)
    x = list(kda_oracle.tokens(rng, (tokens,), 2, DIM, DIM, gates))
    narrow = [jnp.asarray(a, dtype) for a in x[:3]]
    x[:3] = [np.asarray(a.astype(jnp.float32), np.float64) for a in narrow]
    initial = rng.normal(size=(4, 2, DIM, DIM)) * 0.3
    marks = np.array([[-1, -1], [1, -1], [20, 16], [tokens // 2, 33]], np.int32)
    wide = (jnp.asarray(a, jnp.float32) for a in (x[3], x[4], initial))
    out, states, snapshots = run_prefill(*narrow, *wide, cu_seqlens, marks, config=chosen)
    expected = []
    got = []
    for row in range(4):
        start, stop = cu_seqlens[row : row + 2]
        row_out, row_state = kda_oracle.recurrence(*(a[start:stop] for a in x), initial[row])
        expected += [row_out, row_state]
        got += [out[start:stop], states[row]]
        for column, count in enumerate(marks[row]):
            if count > 0:
                expected.append(
                    kda_oracle.recurrence(*(a[start : start + count] for a in x), initial[row])[1]
                )
                got.append(snapshots[row, column])
    worst = max(
        np.linalg.norm(np.asarray(a.astype(jnp.float32), np.float64) - b) / np.linalg.norm(b)
        for a, b in zip(got, expected, strict=True)
        if b.size
    )
    return f"{worst:.2e}"


def decode_inputs(rows: int, heads: int, window: int):
    layers, slots = (2, rows + 2)
    q, k, v, decay, beta, *_ = prefill_inputs(rows * window, heads)
    q, k, v, decay, beta = (x.reshape(rows, window, *x.shape[1:]) for x in (q, k, v, decay, beta))
    state = 0.1 * jax.random.normal(jax.random.key(9), (layers, slots, heads, DIM, DIM))
    records = tuple(
        jnp.zeros((layers, slots, *x.shape[1:]), x.dtype).at[:, :rows].set(x) for x in (k, v, decay, beta)
    )
    ids = jnp.arange(rows, dtype=jnp.int32)
    return (q, k, v, decay, beta), state, records, ids


def time_decode(rows: int, heads: int, window: int, accepted: int, chosen) -> str:
    """Steps follow each other in straight-line code: a loop of unknown length asks the host at every turn,
    which takes longer than a small step."""
    x, state, records, ids = decode_inputs(rows, heads, window)
    counts = jnp.full(rows, accepted, jnp.int32)

    def step(state, records, layer: int):
        if chosen is None:
            _, state, kept = kda_decode(
                *x, state, layer, ids, KdaRecords(*records), ids, counts,
                implementation="interpret" if TINY else "triton",
            )  # fmt: skip
            return state, (kept.k, kept.v, kept.log_decay, kept.beta)
        return kda_decode_kernel.decode(
            *x, state, layer, ids, records, ids, counts, None, None, config=chosen, interpret=TINY
        )[1:]

    def best(steps: int, state, records) -> float:
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def run(state, records):
            for i in range(steps):  # layers alternate, so that no step finds its states in the cache
                state, records = step(state, records, i % 2)
            return state, records

        carry = jax.block_until_ready(run(jnp.copy(state), jax.tree.map(jnp.copy, records)))
        times = []
        for _ in range(1 if TINY else 8):
            start = time.perf_counter()
            carry = jax.block_until_ready(run(*carry))
            times.append(time.perf_counter() - start)
        return min(times)

    short, long = (1, 2) if TINY else (2, 22)
    us = (best(long, state, records) - best(short, state, records)) / (long - short) * 1e6
    moved = rows * heads * DIM * DIM * 4 * 2
    return f"{us:.1f} us, {moved / us / 1e6:.2f} TB/s of state"


def decode_error(chosen, window: int) -> str:
    heads, rows = 2, 3
    x, state, records, ids = decode_inputs(rows, heads, window)
    counts = jnp.array([0, 1, window], jnp.int32)
    publish_after = jnp.array([-1, 1, 1], jnp.int32)
    publish_slots = jnp.array([-1, 3, 4], jnp.int32)
    arguments = (*x, state, 1, ids, records, ids, counts, publish_after, publish_slots)
    run = jax.jit(functools.partial(kda_decode_kernel.decode, config=chosen, interpret=TINY))
    out, after, kept = run(*arguments)
    wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (*x, *records)]
    worst = 0.0
    expected_state = np.array(state, np.float64)
    for row in range(rows):
        recorded = [a[1, row, : counts[row]] for a in wide[5:]]
        _, committed = kda_oracle.recurrence(recorded[0], *recorded, state[1, row])
        if publish_after[row] > 0:
            one = [a[:1] for a in recorded]
            expected_state[1, publish_slots[row]] = kda_oracle.recurrence(one[0], *one, state[1, row])[1]
        expected_state[1, row] = committed
        expected, _ = kda_oracle.recurrence(*(a[row] for a in wide[:5]), committed)
        got = np.asarray(out[row].astype(jnp.float32), np.float64)
        worst = max(worst, np.linalg.norm(got - expected) / np.linalg.norm(expected))
    state_error = np.linalg.norm(np.asarray(after, np.float64) - expected_state) / np.linalg.norm(
        expected_state
    )
    same = all(bool((a[1, :rows] == b).all()) for a, b in zip(kept, x[1:], strict=True))
    return f"out {worst:.2e}, state {state_error:.2e}, records {'equal' if same else 'DIFFER'}"


def copy_rate() -> str:
    x = jnp.ones(2**16 if TINY else 2**29, jnp.float32)
    us = microseconds(lambda x: x * 1.0001, x, 10)
    return f"{2 * x.nbytes / us / 1e6:.2f} TB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="copy,error,decode,total,state,intra,long")
    wanted = set(parser.parse_args().only.split(","))
    tokens, heads, few = (64, 2, 1) if TINY else (8192, 64, 8)
    decode = kda_decode_kernel.DecodeConfig
    print(jax.__version__, jax.devices())
    if "copy" in wanted:
        attempt("copy", copy_rate)
    if "error" in wanted:
        for gates in ("random", "saturated", "weak"):
            attempt(f"error C32 bf16 {gates}", lambda gates=gates: error_of(config(), gates))
        attempt("error C16 bf16 weak", lambda: error_of(config(chunk=16), "weak"))
        attempt("error C32 3 segments bf16 weak", lambda: error_of(config(segments=3), "weak"))
        attempt("error C32 float32 weak", lambda: error_of(config(), "weak", jnp.float32))
        attempt("error decode W4", lambda: decode_error(kda_decode_kernel.CUDA, 4))
        attempt("error decode W4 4 splits", lambda: decode_error(decode(32, 4, 4), 4))
    if "total" in wanted:
        attempt(f"prefill {tokens}x{heads} public", lambda: time_total(tokens, heads, None))
        attempt(f"prefill {tokens}x{few} public", lambda: time_total(tokens, few, None))
        attempt(
            f"prefill {tokens}x{heads} C16",
            lambda: time_total(tokens, heads, config(chunk=16, intra_warps=2, stages=3)),
        )
    if "decode" in wanted:
        for v in ((128, 1, 4), (64, 2, 4), (32, 4, 4), (16, 8, 4), (16, 8, 2), (32, 4, 2)):
            attempt(f"decode 32x{heads} W1 {v}", lambda v=v: time_decode(32, heads, 1, 1, decode(*v)))
        attempt(f"decode 32x{heads} W1 public", lambda: time_decode(32, heads, 1, 1, None))
        for v in ((32, 4, 4), (16, 8, 4), (64, 2, 4)):
            attempt(f"decode 32x{heads} W4/4 {v}", lambda v=v: time_decode(32, heads, 4, 4, decode(*v)))
        for v in ((32, 1, 4), (16, 8, 4)):
            attempt(f"decode 32x{few} W1 {v}", lambda v=v: time_decode(32, few, 1, 1, decode(*v)))
            attempt(f"decode 1x{few} W1 {v}", lambda v=v: time_decode(1, few, 1, 1, decode(*v)))
    if "intra" in wanted:
        for v in (
            (16, 1, "tf32"),
            (16, 2, "tf32"),
            (32, 2, "tf32"),
            (32, 4, "tf32"),
            (32, 8, "tf32"),
            (32, 4, "ieee"),
        ):
            attempt(f"intra {tokens}x{heads} C,warps {v}", lambda v=v: time_intra(*v, tokens, heads))
    if "state" in wanted:
        # chunk, columns, warps, stages, segments
        for v in (
            (32, 64, 4, 2, 1),
            (32, 64, 4, 3, 1),
            (32, 32, 2, 3, 1),
            (32, 128, 8, 2, 1),
            (16, 64, 4, 3, 1),
            (16, 32, 2, 4, 1),
        ):
            attempt(
                f"state {tokens}x{heads} C,cols,warps,stages,segs {v}",
                lambda v=v: time_state(*v, tokens, heads),
            )
        for v in (
            (32, 64, 4, 3, 1), (32, 32, 2, 3, 1), (32, 16, 1, 3, 1), (32, 32, 2, 3, 4), (32, 16, 1, 3, 4),
            (32, 32, 2, 3, 8), (32, 64, 4, 3, 8), (16, 32, 2, 3, 8),
        ):  # fmt: skip
            attempt(
                f"state {tokens}x{few} C,cols,warps,stages,segs {v}", lambda v=v: time_state(*v, tokens, few)
            )
    if "long" in wanted and not TINY:
        for v in ((32, 32, 2, 3, 1), (32, 32, 2, 3, 8), (32, 32, 2, 3, 16)):
            attempt(f"state 32768x{few} {v}", lambda v=v: time_state(*v, 4 * tokens, few))
    print("\n".join(["", "==== tune_kda ====", *LINES]), flush=True)


if __name__ == "__main__":
    main()
