"""The short convolution against a numpy loop, in float64: run with JAX_ENABLE_X64=1.

Tolerance 1e-12: four products and one SiLU a value round at 1e-16. Histories are copies and must be equal.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from pallas_kernels.short_convolution import (
    short_convolution,
    short_convolution_decode,
    short_convolution_ragged,
)
from tests.pallas_kernels import kda_oracle

pytestmark = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="needs JAX_ENABLE_X64=1")
CHANNELS = 5


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_rectangular_rows_equal_the_loop_and_ignore_what_follows_them(taps):
    rng = np.random.default_rng(taps)
    lengths = np.array([0, 1, 2, 3, 7, 9], np.int32)
    x = rng.normal(size=(6, 9, CHANNELS))
    weight, initial = rng.normal(size=(CHANNELS, taps)), rng.normal(size=(6, taps - 1, CHANNELS))
    poisoned = np.where((np.arange(9) < lengths[:, None])[..., None], x, np.nan)
    y, final = jax.jit(short_convolution)(poisoned, weight, initial, lengths=lengths)
    assert np.isfinite(y).all()
    for row, length in enumerate(lengths):
        expected, history = kda_oracle.convolution(x[row, :length], weight, initial[row])
        assert_close(y[row, :length], expected)
        np.testing.assert_array_equal(final[row], history)
    whole, _ = short_convolution(x, weight, initial)
    assert_close(whole[2], kda_oracle.convolution(x[2], weight, initial[2])[0])


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_ragged_rows_equal_the_loop_and_give_every_checkpoint(taps):
    rng = np.random.default_rng(10 + taps)
    cu_seqlens = np.array([0, 0, 1, 3, 6, 6, 17], np.int32)
    rows = len(cu_seqlens) - 1
    x = rng.normal(size=(20, CHANNELS))
    x[17:] = np.nan
    weight, initial = rng.normal(size=(CHANNELS, taps)), rng.normal(size=(rows, taps - 1, CHANNELS))
    checkpoints = np.full((rows, 11), -1, np.int32)
    for row, length in enumerate(np.diff(cu_seqlens)):
        checkpoints[row, :length] = np.arange(length) + 1
    y, final, taken = jax.jit(short_convolution_ragged)(
        x, weight, initial, cu_seqlens, checkpoints=checkpoints
    )
    assert np.isfinite(y).all()
    for row, (start, stop) in enumerate(itertools.pairwise(cu_seqlens)):
        expected, history = kda_oracle.convolution(x[start:stop], weight, initial[row])
        assert_close(y[start:stop], expected)
        np.testing.assert_array_equal(final[row], history)
        for column, count in enumerate(checkpoints[row]):
            expected = (
                kda_oracle.convolution(x[start : start + count], weight, initial[row])[1] if count > 0 else 0
            )
            np.testing.assert_array_equal(taken[row, column], expected)


@pytest.mark.parametrize("window", [1, 3, 4, 8])
def test_decode_commits_publishes_and_touches_nothing_else(window):
    rng = np.random.default_rng(window)
    taps, layer = 4, 1
    slots = np.array([6, -1, 0, 3, 2], np.int32)
    accepted = np.array([window, window, 0, 1, (window + 1) // 2], np.int32)
    publish_after = np.array([1, 1, -1, 1, (window + 1) // 2], np.int32)
    publish_slots = np.array([4, 5, -1, -1, 1], np.int32)  # row 1 is padding: slot 5 must stay untouched
    state = np.full((2, 8, taps - 1 + window, CHANNELS), np.nan)
    state[:, slots[slots >= 0]] = rng.normal(size=(2, 4, taps - 1 + window, CHANNELS))
    weight, x = rng.normal(size=(CHANNELS, taps)), rng.normal(size=(5, window, CHANNELS))
    x[1] = np.nan
    y, after = jax.jit(short_convolution_decode)(
        x, weight, state, layer, slots, accepted, publish_after=publish_after, publish_slots=publish_slots
    )
    expected = state.copy()
    for row, slot in enumerate(slots):
        if slot < 0:
            np.testing.assert_array_equal(y[row], 0)
            continue
        history = state[layer, slot, accepted[row] : accepted[row] + taps - 1]
        assert_close(y[row], kda_oracle.convolution(x[row], weight, history)[0])
        expected[layer, slot] = np.concatenate([history, x[row]])
        if publish_after[row] > 0 and publish_slots[row] >= 0:
            start = publish_after[row]
            expected[layer, publish_slots[row]] = 0
            expected[layer, publish_slots[row], : taps - 1] = state[layer, slot, start : start + taps - 1]
    np.testing.assert_array_equal(after, expected)


def test_decode_rejects_a_state_of_another_window():
    with pytest.raises(ValueError, match="state holds 5 inputs a slot, 4 taps and 3 tokens need 6"):
        ids = np.zeros(1, np.int32)
        short_convolution_decode(np.ones((1, 3, 2)), np.ones((2, 4)), np.ones((1, 1, 5, 2)), 0, ids, ids)
