"""The model agrees with itself on every path, in float64 where no rounding excuses a difference.

Truth is `glm_jax.forward` on one unpadded row: masked dense attention over expanded keys and values, chunked
recurrence, no cache. Everything else (padding, other chunk boundaries, the cached absorbed gather, drafted
windows) must give its logits to 1e-9.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm_jax
from glm_jax import cache as caches
from glm_jax import mtp, paged, steps
from glm_jax.model import vocabulary_logits
from glm_jax.sampling import SamplingRows
from tests.random_models import random_params, small_config

TOLERANCE = 1e-9
CONFIGS = {
    "kpool 4, shared across a KDA layer": {},
    "kpool 16, softplus gate, attention bias, two of four expert groups": {
        "index_kpool": 16, "index_topk": 32, "linear_lower_bound": None, "indexer_types": ["full"] * 5,
        "attention_bias": True, "n_group": 4, "topk_group": 2,
    },
}  # fmt: skip
LENGTH = 75

_prefill_trunk = jax.jit(paged.prefill_trunk, static_argnames=("config",))
_prefill = jax.jit(steps.prefill, static_argnames=("config",))
_decode = jax.jit(steps.decode, static_argnames=("config",))


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    config = small_config(**request.param)
    return random_params(config, dtype="float64"), config


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 96, (3, LENGTH), dtype=np.int32)


@pytest.fixture(scope="module")
def expected(model, tokens):
    """Logits of each row run alone."""
    return [np.asarray(glm_jax.forward(*model, tokens[i : i + 1])[0]) for i in range(3)]


def difference(got, want) -> float:
    assert np.isfinite(got).all()
    return float(np.abs(np.asarray(got) - want).max())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, tokens, expected, side):
    lengths = [LENGTH, 40, 17]
    padded, mask = np.full_like(tokens, 7), np.zeros(tokens.shape, bool)
    spans = [slice(LENGTH - n, LENGTH) if side == "left" else slice(0, n) for n in lengths]
    for row, (n, span) in enumerate(zip(lengths, spans, strict=True)):
        padded[row, span], mask[row, span] = tokens[row, :n], True
    logits = np.asarray(glm_jax.forward(*model, padded, mask))
    assert np.isfinite(logits).all()
    for row, (n, span) in enumerate(zip(lengths, spans, strict=True)):
        assert difference(logits[row, span], expected[row][:n]) < TOLERANCE


def test_later_tokens_never_change_earlier_logits(model, tokens):
    changed = tokens.copy()
    changed[:, 50:] = (changed[:, 50:] + 1) % 96
    before, after = (np.asarray(glm_jax.forward(*model, t))[:, :50] for t in (tokens, changed))
    np.testing.assert_array_equal(before, after)


def new_cache(config, drafts=0):
    return caches.create(
        config, num_blocks=9, block_size=16, num_state_slots=4, num_request_slots=3, drafts=drafts,
        dtype=jnp.float64, fill=float("nan"),
    )  # fmt: skip


BLOCKS = np.array([[-1] * 6, [5, 2, 7, 0, 1, -1]], np.int32)  # row 0 is padding, row 1 is shuffled


def ints(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("pieces", [(75,), (1, 2, 3, 17, 17, 17, 18), (64, 11), (15, 1, 16, 43)])
def test_cached_prefill_in_pieces(model, tokens, expected, pieces):
    params, config = model
    cache, done, logits = new_cache(config), 0, []
    for length in pieces:
        real = np.arange(80) < length
        layout = paged.TokenLayout(
            row_of_token=np.where(real, 1, -1).astype(np.int32),
            positions=np.where(real, done + np.arange(80), 0).astype(np.int32),
            row_starts=ints(0, done),
            block_tables=BLOCKS,
            request_slots=ints(-1, 2),
        )
        chunk = np.zeros(80, np.int32)
        chunk[:length] = tokens[0, done : done + length]
        hidden, cache = _prefill_trunk(
            params, config, cache, layout, chunk, ints(0, 0, length),
            paged.ChunkStates(ints(-1, 3 if done else -1), ints(-1, 3), NO_SNAPSHOTS, NO_SNAPSHOTS),
        )  # fmt: skip
        logits.append(vocabulary_logits(params, hidden[:length]))
        done += length
    assert difference(np.concatenate(logits), expected[0]) < TOLERANCE


NO_SNAPSHOTS = np.zeros((2, 0), np.int32)


def sampling(rows, temperature):
    return SamplingRows(
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seeds=np.full(rows, 11, np.uint32),
        choices=np.zeros(rows, np.int32),
        repetition=np.ones(rows, np.float32),
        frequency=np.zeros(rows, np.float32),
        presence=np.zeros(rows, np.float32),
        ends_from=np.zeros(rows, np.int32),
        processed=np.zeros(rows, bool),
    )


def prompt_batch(prompt, limit, temperature=0.0):
    """One prompt as row 1 of two (row 0 is padding), on an axis of 32 tokens."""
    length = len(prompt)
    real = np.arange(32) < length
    chunk, following = np.zeros(32, np.int32), np.full(32, -1, np.int32)
    chunk[:length], following[: length - 1] = prompt, prompt[1:]
    return steps.PrefillBatch(
        tokens=chunk,
        next_tokens=following,
        row_of_token=np.where(real, 1, -1).astype(np.int32),
        positions=np.where(real, np.arange(32), 0).astype(np.int32),
        cu_seqlens=ints(0, 0, length),
        row_starts=ints(0, 0),
        block_tables=BLOCKS,
        state_slots=ints(-1, 2),
        initial_slots=ints(-1, -1),
        snapshot_after=NO_SNAPSHOTS,
        snapshot_slots=NO_SNAPSHOTS,
        request_slots=ints(-1, 1),
        sample=np.array([False, True]),
        limits=ints(0, limit),
        sampling=sampling(2, temperature),
    )


def generate(model, prompt, count, drafts, temperature=0.0, wrong_drafts=None):
    """Through the compiled steps; `wrong_drafts` replaces the drafts before every window."""
    params, config = model
    cache, limit = new_cache(config, drafts), len(prompt) + count - 1
    limits = ints(0, limit)
    batch = prompt_batch(prompt, limit, temperature)
    out, cache = _prefill(params, config, cache, batch)
    got, windows = [int(out.tokens[1, 0])], 0
    while len(got) < count:
        if wrong_drafts is not None:
            fake = wrong_drafts(got, windows)
            cache = cache.replace(
                rows=cache.rows.replace(tokens=cache.rows.tokens.at[1, 1:].set(ints(*fake)))
            )
        out, cache = _decode(
            params, config, cache,
            steps.DecodeBatch(
                block_tables=BLOCKS, state_slots=ints(-1, 2), request_slots=ints(-1, 1), limits=limits,
                publish_positions=ints(-1, -1), publish_slots=ints(-1, -1), sampling=sampling(2, temperature),
            ),
        )  # fmt: skip
        taken = int(out.counts[1])
        assert taken > 0 and int(out.counts[0]) == 0
        got += np.asarray(out.tokens)[1, :taken].tolist()
        windows += 1
    assert len(got) == count  # limits end the last window exactly
    return got, windows


@pytest.fixture(scope="module")
def greedy(model, tokens):
    """40 tokens by teacher forcing alone, one forward a token."""
    context, row = np.zeros((1, 64), np.int32), tokens[1, :13].tolist()
    for _ in range(40):
        context[0, : len(row)] = row
        logits = glm_jax.forward(*model, context, np.arange(64)[None] < len(row))
        row.append(int(np.argmax(np.asarray(logits)[0, len(row) - 1])))
    return row[13:]


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_decoding_gives_the_tokens_of_teacher_forcing(model, tokens, greedy, drafts):
    assert generate(model, tokens[1, :13], 40, drafts)[0] == greedy


def test_rejected_drafts_leave_no_trace(model, tokens, greedy):
    """Right for 0 to 3 tokens in turn, then wrong: every acceptance at every position mod kpool."""

    def drafter(got, window):
        right = window % 4
        following = greedy[len(got) : len(got) + 3]
        following += [0] * (3 - len(following))
        return [t if i < right else (t + 1 + window) % 96 for i, t in enumerate(following)]

    got, windows = generate(model, tokens[1, :13], 40, 3, wrong_drafts=drafter)
    assert got == greedy
    assert windows < 39  # the right ones were accepted


def test_sampled_tokens_do_not_depend_on_the_drafts(model, tokens):
    plain, _ = generate(model, tokens[1, :13], 30, 0, temperature=1.0)
    assert len(set(plain)) > 5
    assert generate(model, tokens[1, :13], 30, 3, temperature=1.0)[0] == plain


def test_draft_chain_is_the_teacher_forced_one(model, tokens):
    """The cached chain's first drafts after a prompt equal the argmax of `mtp.forward` on the same tokens."""
    params, config = model
    prompt = tokens[1, :13]
    chain, _ = generate(model, prompt, 1, 3)
    # drafts feed themselves: extend the row by the chain's own tokens, one step at a time
    row = [*prompt.tolist(), *chain]
    drafts: list[int] = []
    for step in range(3):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(row)] = row
        mask = np.arange(32)[None] < len(row)
        hidden = glm_jax.model_states(params, config, padded, mask).hidden
        logits = mtp.forward(params, config, padded, hidden, mask, steps=step + 1)
        drafts.append(int(np.argmax(np.asarray(logits)[step, 0, len(prompt) - 1])))
        row.append(drafts[-1])
    cached = drafts_after(model, prompt)
    assert cached == drafts


def drafts_after(model, prompt):
    params, config = model
    _, cache = _prefill(params, config, new_cache(config, 3), prompt_batch(prompt, 64))
    return np.asarray(cache.rows.tokens)[1, 1:].tolist()
