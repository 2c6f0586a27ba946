"""KDA's XLA forms against a numpy recurrence, in float64: run with JAX_ENABLE_X64=1.

Tolerance 1e-9 where values are O(1): both sides round at 1e-16 and a thousand tokens of a contractive
recurrence do not amplify it; a wrong index, mask or exponent shows far above.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import KdaRecords, kda_chunked, kda_decode, kda_prefill, kda_recurrent
from tests.pallas_kernels import kda_oracle

pytestmark = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="needs JAX_ENABLE_X64=1")
HEADS, KEY, VALUE = 2, 8, 16
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


KDA_RECURRENT, KDA_PREFILL, KDA_DECODE = jax.jit(kda_recurrent), jax.jit(kda_prefill), jax.jit(kda_decode)
KDA_CHUNKED = jax.jit(kda_chunked, static_argnames="chunk")


def assert_close(actual, expected):
    assert actual.dtype == jnp.float64
    np.testing.assert_allclose(actual, expected, **TOLERANCE)


def states(rng, *lead):
    return rng.normal(size=(*lead, HEADS, KEY, VALUE))


@pytest.mark.parametrize("gates", kda_oracle.GATES)
def test_recurrent_and_chunked_equal_the_numpy_recurrence(gates):
    rng = np.random.default_rng(0)
    x, initial = kda_oracle.tokens(rng, (2, 83), gates=gates), states(rng, 2)
    for form in (KDA_RECURRENT, KDA_CHUNKED):
        out, final = form(*x, initial)
        for row in range(2):
            expected, expected_state = kda_oracle.recurrence(*(a[row] for a in x), initial[row])
            assert_close(out[row], expected)
            assert_close(final[row], expected_state)


@pytest.mark.parametrize("chunk", [4, 16])
def test_chunked_equals_recurrent_at_every_edge_of_chunk_and_block(chunk):
    rng = np.random.default_rng(chunk)
    lengths = np.array([0, 1, 15, 16, 17, 255, 256, 257, 300], np.int32)
    x, initial = kda_oracle.tokens(rng, (len(lengths), 300)), states(rng, len(lengths))
    out, final = KDA_CHUNKED(*x, initial, lengths=lengths, chunk=chunk)
    for row, length in enumerate(lengths):
        expected, expected_state = kda_oracle.recurrence(*(a[row, :length] for a in x), initial[row])
        assert_close(out[row, :length], expected)
        assert_close(final[row], expected_state)


@pytest.mark.parametrize("gates", ["saturated", "weak"])
def test_chunked_stays_exact_over_thousands_of_tokens(gates):
    rng = np.random.default_rng(1)
    x, initial = kda_oracle.tokens(rng, (1, 4096), gates=gates), states(rng, 1)
    for actual, expected in zip(KDA_CHUNKED(*x, initial), KDA_RECURRENT(*x, initial), strict=True):
        assert_close(actual, expected)


def test_chunked_ignores_tokens_past_the_lengths():
    rng = np.random.default_rng(2)
    lengths = np.array([0, 1, 16, 40], np.int32)
    x, initial = kda_oracle.tokens(rng, (4, 40)), states(rng, 4)
    valid = np.arange(40) < lengths[:, None]
    poisoned = [np.where(valid.reshape(4, 40, *(1,) * (a.ndim - 2)), a, np.nan) for a in x]
    run = KDA_CHUNKED
    clean, soiled = run(*x, initial, lengths=lengths), run(*poisoned, initial, lengths=lengths)
    assert np.isfinite(soiled[0]).all()
    np.testing.assert_array_equal(np.where(valid[..., None, None], clean[0] - soiled[0], 0), 0)
    np.testing.assert_array_equal(clean[1], soiled[1])


def test_chunked_gradient_equals_the_recurrence_gradient():
    rng = np.random.default_rng(3)
    x, initial = kda_oracle.tokens(rng, (2, 37)), states(rng, 2)
    direction = rng.normal(size=(2, 37, HEADS, VALUE))

    def objective(form):
        def value(*args):
            out, final = form(*args)
            return jnp.sum(out * direction) + jnp.sum(jnp.sin(final))

        return jax.grad(value, argnums=tuple(range(6)))(*x, initial)

    for actual, expected in zip(objective(kda_chunked), objective(kda_recurrent), strict=True):
        assert_close(actual, expected)


CU_SEQLENS = np.array([0, 0, 1, 16, 32, 49, 49, 112], np.int32)  # lengths 0, 1, 15, 16, 17, 0, 63
PADDED = 120


def ragged(seed, gates="random"):
    rng = np.random.default_rng(seed)
    x = kda_oracle.tokens(rng, (PADDED,), gates=gates)
    for a in x:
        a[CU_SEQLENS[-1] :] = np.nan
    return x, states(rng, len(CU_SEQLENS) - 1)


@pytest.mark.parametrize("gates", kda_oracle.GATES)
def test_prefill_equals_the_numpy_recurrence_of_every_row(gates):
    x, initial = ragged(4, gates)
    out, final = KDA_PREFILL(*x, initial, CU_SEQLENS)
    assert np.isfinite(out).all()
    for row, (start, stop) in enumerate(itertools.pairwise(CU_SEQLENS)):
        expected, expected_state = kda_oracle.recurrence(*(a[start:stop] for a in x), initial[row])
        assert_close(out[start:stop], expected)
        assert_close(final[row], expected_state)


def test_prefill_checkpoints_at_every_token_count():
    x, initial = ragged(5)
    counts = np.full((len(CU_SEQLENS) - 1, 64), -1, np.int32)
    for row, length in enumerate(np.diff(CU_SEQLENS)):
        counts[row, :length] = np.random.default_rng(row).permutation(length) + 1
    out, final, taken = KDA_PREFILL(*x, initial, CU_SEQLENS, checkpoints=counts)
    plain_out, plain_final = KDA_PREFILL(*x, initial, CU_SEQLENS)
    np.testing.assert_array_equal(out, plain_out)
    np.testing.assert_array_equal(final, plain_final)
    for row, start in enumerate(CU_SEQLENS[:-1]):
        for column, count in enumerate(counts[row]):
            if count < 0:
                np.testing.assert_array_equal(taken[row, column], 0)
            else:
                _, expected = kda_oracle.recurrence(*(a[start : start + count] for a in x), initial[row])
                assert_close(taken[row, column], expected)


def test_prefill_of_nothing_returns_the_initial_states():
    rng = np.random.default_rng(6)
    x, initial = kda_oracle.tokens(rng, (24,)), states(rng, 2)
    run = KDA_PREFILL
    out, final = run(*x, initial, np.zeros(3, np.int32))
    np.testing.assert_array_equal(final, initial)
    np.testing.assert_array_equal(out, 0)
    _, final = run(*(a[:0] for a in x), initial, np.zeros(3, np.int32))
    np.testing.assert_array_equal(final, initial)


@pytest.mark.parametrize("changed", [1, 17, 40, 70])
def test_later_tokens_never_change_earlier_outputs(changed):
    x, initial = ragged(7)
    rng = np.random.default_rng(8)
    other = [a.copy() for a in x]
    for a, fresh in zip(other, kda_oracle.tokens(rng, (PADDED,)), strict=True):
        a[changed : CU_SEQLENS[-1]] = fresh[changed : CU_SEQLENS[-1]]
    run = KDA_PREFILL
    first, second = (run(*y, initial, CU_SEQLENS)[0] for y in (x, other))
    np.testing.assert_array_equal(first[:changed], second[:changed])
    batched = KDA_CHUNKED
    first, second = (batched(*(a[None, :112] for a in y), initial[:1])[0] for y in (x, other))
    np.testing.assert_array_equal(first[:, :changed], second[:, :changed])


LAYERS, SLOTS, REQUESTS = 2, 9, 6


class Pool:
    """State slots and records filled with NaN except where a row owns them."""

    def __init__(self, rng, window, state_slots, record_slots):
        state = np.full((LAYERS, SLOTS, HEADS, KEY, VALUE), np.nan)
        state[:, state_slots] = states(rng, LAYERS, len(state_slots))
        shapes = ((HEADS, KEY), (HEADS, VALUE), (HEADS, KEY), (HEADS,))
        records = [np.full((LAYERS, REQUESTS, window, *shape), np.nan) for shape in shapes]
        for layer in range(LAYERS):
            for record, fresh in zip(
                records, kda_oracle.tokens(rng, (len(record_slots), window))[1:], strict=True
            ):
                record[layer, record_slots] = fresh
        self.state, self.records = jnp.asarray(state), [jnp.asarray(record) for record in records]


@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("layer", [0, 1])
def test_decode_replays_commits_publishes_and_touches_nothing_else(window, layer):
    rng = np.random.default_rng(10 * window + layer)
    slots = np.array([5, -1, 2, 8, 0, 3], np.int32)
    record_slots = np.array([4, -1, 0, 2, 5, 1], np.int32)
    real = [0, 2, 3, 4, 5]
    accepted = np.array([window, window, 0, (window + 1) // 2, 1, window], np.int32)
    publish_after = np.array([window, 1, -1, (window + 1) // 2, 1, 1], np.int32)
    publish_slots = np.array([1, 4, -1, -1, 7, 6], np.int32)  # row 1 is padding: slot 4 must stay untouched
    pool = Pool(rng, window, slots[real], record_slots[real])
    x = kda_oracle.tokens(rng, (len(slots), window))
    for a in x:
        a[1] = np.nan
    out, state, records = KDA_DECODE(
        *x,
        pool.state,
        layer,
        slots,
        KdaRecords(*pool.records),
        record_slots,
        accepted,
        publish_after=publish_after,
        publish_slots=publish_slots,
    )
    expected_state = np.array(pool.state)
    expected_records = [np.array(record) for record in pool.records]
    expected_out = np.zeros(out.shape)
    for row in real:
        recorded = [record[layer, record_slots[row]] for record in pool.records]
        start = pool.state[layer, slots[row]]

        def replayed(count, recorded=recorded, start=start):
            head = [a[:count] for a in recorded]
            return kda_oracle.recurrence(head[0], *head, start)[1]

        committed = replayed(accepted[row])
        expected_state[layer, slots[row]] = committed
        if publish_after[row] > 0 and publish_slots[row] >= 0:
            expected_state[layer, publish_slots[row]] = replayed(publish_after[row])
        expected_out[row], _ = kda_oracle.recurrence(*(a[row] for a in x), committed)
        for record, fresh in zip(expected_records, x[1:], strict=True):
            record[layer, record_slots[row]] = fresh[row]
    assert_close(out, expected_out)
    assert_close(state, expected_state)
    for field, expected in zip(("k", "v", "log_decay", "beta"), expected_records, strict=True):
        np.testing.assert_array_equal(getattr(records, field), expected)


def test_decode_windows_of_any_width_walk_the_same_sequence():
    """Feeding a sequence through windows of W with everything accepted equals the recurrence."""
    rng = np.random.default_rng(20)
    time = 24
    x, initial = kda_oracle.tokens(rng, (1, time)), states(rng, 1)
    expected, _ = kda_oracle.recurrence(*(a[0] for a in x), initial[0])
    for window in (1, 3, 8):
        pool = Pool(rng, window, [0], [0])
        state, records = pool.state.at[0, 0].set(initial[0]), KdaRecords(*pool.records)
        accepted = np.zeros(1, np.int32)
        outputs = []
        run = KDA_DECODE
        for start in range(0, time, window):
            out, state, records = run(
                *(a[:, start : start + window] for a in x),
                state,
                0,
                np.zeros(1, np.int32),
                records,
                np.zeros(1, np.int32),
                accepted,
            )
            outputs.append(out[0])
            accepted = np.full(1, window, np.int32)
        assert_close(jnp.concatenate(outputs), expected)


def test_rejected_tokens_leave_no_trace():
    """A window whose later tokens are rejected commits exactly what a window of the accepted ones would."""
    rng = np.random.default_rng(21)
    pool = Pool(rng, 4, [3], [2])
    zero, row_slot, request = np.zeros(1, np.int32), np.array([3], np.int32), np.array([2], np.int32)
    good, bad = kda_oracle.tokens(rng, (1, 4)), kda_oracle.tokens(rng, (1, 4))
    mixed = [np.concatenate([a[:, :2], b[:, 2:]], axis=1) for a, b in zip(good, bad, strict=True)]
    following = kda_oracle.tokens(rng, (1, 4))
    results = []
    for first in (good, mixed):
        _, state, records = KDA_DECODE(
            *first, pool.state, 1, row_slot, KdaRecords(*pool.records), request, zero
        )
        results.append(KDA_DECODE(*following, state, 1, row_slot, records, request, zero + 2)[:2])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_decode_rejects_a_window_that_the_records_do_not_hold():
    rng = np.random.default_rng(22)
    pool = Pool(rng, 2, [0], [0])
    ids = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="records hold windows of 2 tokens, this window has 3"):
        kda_decode(*kda_oracle.tokens(rng, (1, 3)), pool.state, 0, ids, KdaRecords(*pool.records), ids, ids)
