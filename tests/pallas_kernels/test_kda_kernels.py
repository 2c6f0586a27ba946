"""The KDA kernels, interpreted or on a GPU, against the XLA references, which tests/float64 pins to numpy.

float32 tolerance 2e-5: both sides accumulate in float32 over chains of at most 200 tokens of O(1) values.
bfloat16 tolerance 2 percent of the largest value: the kernels round the state to 8 bits of mantissa before a
product, as every published chunk kernel does.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda_decode_kernel, kda_prefill_kernel
from pallas_kernels.kda import KdaRecords, kda_chunked, kda_decode, kda_prefill
from tests.pallas_kernels import kda_oracle
from tests.pallas_kernels.device import INTERPRET, KERNEL

HEADS, KEY, VALUE = 2, 16, 32
GATES = ("random", "saturated", "weak")
CU_SEQLENS = np.array([0, 0, 1, 16, 32, 49, 49, 150], np.int32)  # lengths 0, 1, 15, 16, 17, 0, 101
SMALL = dataclasses.replace(kda_prefill_kernel.CUDA, columns=16)
ROWS, TOKENS = len(CU_SEQLENS) - 1, 160
CHECKPOINTS = np.array(
    [[-1, -1, -1], [1, -1, -1], [-1, 15, 3], [16, 16, 8], [17, -1, 16], [-1, -1, -1], [101, 64, 70]], np.int32
)


def inputs(seed, lead, gates="random", dtype=jnp.float32):
    x = kda_oracle.tokens(np.random.default_rng(seed), lead, HEADS, KEY, VALUE, gates)
    q, k, v, log_decay, beta = (jnp.asarray(a, jnp.float32) for a in x)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), log_decay, beta


def states(seed, *lead):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*lead, HEADS, KEY, VALUE)), jnp.float32)


@functools.partial(jax.jit, static_argnames="config")
def prefill_kernel(*arguments, config):
    return kda_prefill_kernel.prefill(*arguments, config=config, interpret=INTERPRET)


@jax.jit
def prefill_reference(*arguments):
    *arguments, checkpoints = arguments
    return kda_prefill(*arguments, checkpoints=checkpoints, implementation="xla")


def assert_near(actual, expected, dtype):
    actual, expected = (np.asarray(a, np.float32) for a in (actual, expected))
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(("chunk", "segments"), [(16, 1), (32, 1), (32, 3)])
def test_prefill_kernel_equals_the_reference(chunk, segments, gates, dtype):
    config = dataclasses.replace(SMALL, chunk=chunk, segments=segments)
    x, initial = inputs(1, (TOKENS,), gates, dtype), states(2, ROWS)
    poisoned = [a.at[CU_SEQLENS[-1] :].set(jnp.nan) for a in x]
    expected = prefill_reference(*x, initial, CU_SEQLENS, CHECKPOINTS)
    actual = prefill_kernel(*poisoned, initial, CU_SEQLENS, CHECKPOINTS, config=config)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert_near(a, b, dtype)
    np.testing.assert_array_equal(actual[2][CHECKPOINTS < 0], 0)
    np.testing.assert_array_equal(actual[0][CU_SEQLENS[-1] :], 0)
    for row in (0, 5):  # empty rows keep their state
        np.testing.assert_array_equal(actual[1][row], initial[row])


def test_prefill_kernel_of_64_token_chunks_equals_the_reference():
    config = dataclasses.replace(kda_prefill_kernel.CUDA, chunk=64, columns=32)
    x, initial = inputs(1, (TOKENS,)), states(2, ROWS)
    expected = prefill_reference(*x, initial, CU_SEQLENS, CHECKPOINTS)
    actual = prefill_kernel(*x, initial, CU_SEQLENS, CHECKPOINTS, config=config)
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b, jnp.float32)


@pytest.mark.parametrize("changed", [1, 20, 75, 149])
def test_prefill_kernel_keeps_earlier_outputs_bit_equal_when_later_tokens_change(changed):
    x, initial = inputs(3, (TOKENS,)), states(4, ROWS)
    other = inputs(5, (TOKENS,))
    mixed = [a.at[changed:].set(b[changed:]) for a, b in zip(x, other, strict=True)]
    first, second = (
        prefill_kernel(*y, initial, CU_SEQLENS, CHECKPOINTS, config=SMALL)[0] for y in (x, mixed)
    )
    np.testing.assert_array_equal(first[:changed], second[:changed])


def test_prefill_through_the_public_op_equals_the_reference():
    x, initial = inputs(3, (TOKENS,)), states(4, ROWS)
    expected = prefill_reference(*x, initial, CU_SEQLENS, CHECKPOINTS)
    out, final = kda_prefill(*x, initial, CU_SEQLENS, gate_lower_bound=-5.0, implementation=KERNEL)
    assert_near(out, expected[0], jnp.float32)
    assert_near(final, expected[1], jnp.float32)


def test_prefill_takes_the_kernel_only_with_a_promised_gate():
    x, initial = inputs(6, (8,)), states(7, 1)
    with pytest.raises(ValueError, match="does not support"):
        kda_prefill(*x, initial, np.array([0, 8], np.int32), implementation=KERNEL)
    with pytest.raises(ValueError, match="does not support"):
        kda_prefill(*x, initial, np.array([0, 8], np.int32), gate_lower_bound=-8.0, implementation=KERNEL)


def test_chunked_kernel_equals_the_reference_and_ignores_padding():
    lengths = jnp.array([0, 1, 33, 40], jnp.int32)
    x, initial = inputs(8, (4, 40)), states(9, 4)
    valid = jnp.arange(40) < lengths[:, None]
    poisoned = [jnp.where(valid.reshape(4, 40, *(1,) * (a.ndim - 2)), a, jnp.nan) for a in x]
    expected, expected_state = kda_chunked(*x, initial, lengths=lengths)
    actual, state = kda_chunked(
        *poisoned, initial, lengths=lengths, gate_lower_bound=-5.0, implementation=KERNEL
    )
    assert np.isfinite(actual).all()
    assert_near(
        jnp.where(valid[..., None, None], actual, 0),
        jnp.where(valid[..., None, None], expected, 0),
        jnp.float32,
    )
    assert_near(state, expected_state, jnp.float32)


@pytest.mark.parametrize(("window", "splits"), [(1, 1), (3, 1), (8, 1), (1, 2), (3, 2), (3, 4)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decode_kernel_equals_the_reference_and_touches_nothing_else(window, splits, dtype, monkeypatch):
    config = kda_decode_kernel.DecodeConfig(splits=splits)  # the one that many heads get has splits
    monkeypatch.setattr(kda_decode_kernel, "cuda_config", lambda *_: config)
    layers, slot_count, requests, layer = 2, 9, 6, 1
    slots, record_slots = jnp.array([5, -1, 2, 8, 0]), jnp.array([4, -1, 0, 2, 5])
    accepted = jnp.array([window, window, 0, (window + 1) // 2, 1], jnp.int32)
    publish_after = jnp.array([window, 1, -1, (window + 1) // 2, 1], jnp.int32)
    publish_slots = jnp.array([1, 4, -1, -1, 7], jnp.int32)  # row 1 is padding: slot 4 must stay untouched
    real = slots >= 0
    state = jnp.full((layers, slot_count, HEADS, KEY, VALUE), jnp.nan)
    state = state.at[:, slots[real]].set(states(10, layers, 4))
    recorded = inputs(11, (layers, 4, window), dtype=dtype)[1:]
    records = KdaRecords(
        *(
            jnp.full((layers, requests, *a.shape[2:]), jnp.nan, a.dtype).at[:, record_slots[real]].set(a)
            for a in recorded
        )
    )
    x = [a.at[1].set(jnp.nan) for a in inputs(12, (5, window), dtype=dtype)]

    def run(implementation):
        return jax.jit(
            lambda *a: kda_decode(
                *a,
                record_slots,
                accepted,
                publish_after=publish_after,
                publish_slots=publish_slots,
                implementation=implementation,
            )
        )(*x, state, layer, slots, records)

    (expected, expected_state, expected_records), (out, after, kept) = run("xla"), run(KERNEL)
    assert out.dtype == dtype
    tolerance = 2e-5 if dtype == jnp.float32 else 1e-2  # bfloat16 rounds the output once
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(after, expected_state, rtol=2e-5, atol=2e-5)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(expected_records), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    np.testing.assert_array_equal(jnp.isnan(after), jnp.isnan(expected_state))
