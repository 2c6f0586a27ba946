"""Vocabulary sampling: filters, noise and shards against oracles; the kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import vocab_sampling as op
from pallas_kernels.vocab_edge_kernel import Plan
from pallas_kernels.vocab_sampling_kernel import sample_tokens_triton
from tests.pallas_kernels import sampling_oracle as oracle
from tests.pallas_kernels.device import INTERPRET, KERNEL
from tests.pallas_kernels.lowering import lower

VOCABULARY = 300
sample = jax.jit(op.sample_tokens, static_argnames=("axis_name", "implementation"))


def parameters(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, choice=0, position=None):
    full = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))  # noqa: E731
    positions = jnp.arange(rows, dtype=jnp.int32) if position is None else full(position, jnp.int32)
    return (
        *(full(temperature, jnp.float32), full(top_k, jnp.int32)),
        *(full(top_p, jnp.float32), full(min_p, jnp.float32)),
        *(full(seed, jnp.int32), full(choice, jnp.int32), positions),
    )


def awkward_logits() -> np.ndarray:
    """Rows of every temper: flat, peaked, tied at the edges, all equal, forbidden tokens, signed zeros."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(10, VOCABULARY)) * np.array([0.1, 1, 3, 10, 1, 1, 1, 1, 3, 1])[:, None]
    logits[4] = np.round(logits[4] * 2) / 2
    logits[5] = 1.25
    logits[6, ::2] = -np.inf
    logits[7] = np.where(random.random(VOCABULARY) < 0.5, -0.0, 0.0)
    logits[8, 17:] = -np.inf
    logits[9, 5:8] = 9
    return logits.astype(np.float32)


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    {"top_k": 3, "top_p": 0.6, "temperature": 2.0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_only_kept_tokens_and_the_best_of_them(filters: dict):
    """The token is the oracle's argmax of its own scores over its own kept set, for many positions."""
    for logits in awkward_logits():
        draws = 24
        found = np.asarray(sample(jnp.asarray(np.tile(logits, (draws, 1))), *parameters(draws, **filters)))
        temperature = filters.get("temperature", 1.0)
        keep = oracle.kept(
            logits,
            temperature,
            filters.get("top_k", 0),
            float(np.float32(filters.get("top_p", 1.0))),
            float(np.float32(filters.get("min_p", 0.0))),
        )
        for position, token in enumerate(found):
            assert keep[token]
            noise = np.array([oracle.gumbel(7, 0, position, i) for i in range(VOCABULARY)])
            scores = np.where(keep, logits.astype(np.float64) / temperature + noise, -np.inf)
            # Scores of order 10 in float32: a token other than the best must be as good.
            assert scores[token] >= scores.max() - 1e-5


def test_ties_at_every_edge_are_kept():
    """Four equal logits at the edge: all of them turn up over many positions, and nothing below."""
    logits = np.full(VOCABULARY, -5, np.float32)
    logits[10], logits[[3, 50, 120, 299]], logits[7] = 3.0, 2.0, 1.9
    draws = 200
    for filters in ({"top_k": 2}, {"top_p": 0.7}, {"min_p": float(np.exp(np.float32(-1.0)) * 0.9999)}):
        found = sample(jnp.asarray(np.tile(logits, (draws, 1))), *parameters(draws, **filters))
        assert set(np.asarray(found).tolist()) == {3, 10, 50, 120, 299}, filters


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_ignores_filters_and_noise(temperature: float):
    logits = awkward_logits()
    found = sample(jnp.asarray(logits), *parameters(10, temperature, top_k=3, top_p=0.1, min_p=0.5))
    np.testing.assert_array_equal(found, logits.argmax(axis=1))


def test_noise_is_the_oracle_s_and_finite():
    seeds, choices, positions = (
        np.array([0, 1, -5, 2**31 - 1]),
        np.array([0, 3, 1, 0]),
        np.array([0, 9, 2**20, 7]),
    )
    ids = np.array([0, 1, 154_879, 77])
    found = op.gumbel(*map(jnp.asarray, (seeds, choices, positions, ids)))
    assert found.shape == (4, 4) and found.dtype == jnp.float32
    for row in range(4):
        for column in range(4):
            wanted = oracle.gumbel(*(int(x[row]) for x in (seeds, choices, positions)), int(ids[column]))
            # float32 logarithms of a float32 uniform
            np.testing.assert_allclose(found[row, column], wanted, rtol=1e-5, atol=1e-5)
    many = op.gumbel(jnp.arange(64), jnp.zeros(64, int), jnp.arange(64), jnp.arange(20_000))
    assert bool(jnp.isfinite(many).all())
    # 1.28 million standard Gumbels: mean 0.57722, standard deviation 1.28255; five standard errors.
    assert abs(float(many.mean()) - 0.57722) < 5 * 1.28255 / 1.28e6**0.5
    assert abs(float(many.std()) - 1.28255) < 0.01


def test_a_token_depends_on_its_key_alone():
    """Not on the batch around it; and every part of the key counts."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(12, VOCABULARY)), jnp.float32)
    arguments = parameters(12, temperature=1.5, top_p=0.99)
    together = np.asarray(sample(logits, *arguments))
    order = np.random.default_rng(2).permutation(12)
    shuffled = sample(logits[order], *(a[order] for a in arguments))
    np.testing.assert_array_equal(shuffled, together[order])
    for row in (0, 5, 11):
        alone = sample(logits[row : row + 1], *(a[row : row + 1] for a in arguments))
        assert int(alone[0]) == together[row]
    flat = jnp.zeros((64, VOCABULARY), jnp.float32)
    base = np.asarray(sample(flat, *parameters(64)))
    for change in ({"seed": 8}, {"choice": 1}, {"position": 3}):
        other = np.asarray(sample(flat, *parameters(64, **change)))
        # Uniform over 300: independent draws agree in 64 / 300 places on average, 8 or more once in 1e9.
        assert (other != base).sum() > (0 if "position" in change else 56)


def chi_square_bound(degrees: int) -> float:
    """Exceeded with probability 1e-6 under the hypothesis (Wilson and Hilferty; normal quantile 4.753)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.753 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 6}, {"top_p": 0.8}], ids=str)
def test_distribution(filters: dict):
    """Chi-square over 40,000 positions of one seed; false alarm 1e-6, were the seed not fixed."""
    draws, logits = 40_000, np.array([1.0, 0.2, -0.5, 2.0, 2.0, 0.0, -1.0, 1.5, 0.7, -2.0, 0.3, 1.1])
    found = sample(jnp.asarray(np.tile(logits, (draws, 1)), jnp.float32), *parameters(draws, **filters))
    temperature = filters.get("temperature", 1.0)
    keep = oracle.kept(logits, temperature, filters.get("top_k", 0), filters.get("top_p", 1.0), 0.0)
    probabilities = np.where(keep, np.exp(logits / temperature), 0)
    expected = draws * probabilities[keep] / probabilities.sum()
    counts = np.bincount(np.asarray(found), minlength=len(logits))
    assert counts[keep].sum() == draws
    statistic = ((counts[keep] - expected) ** 2 / expected).sum()
    assert statistic < chi_square_bound(keep.sum() - 1)


def exchanged(logits, *arguments, axis_name: str):
    """The route the kernels take under a mesh, with the reference in their place."""
    return op.over_rows(op.sample_tokens_reference, logits, arguments, axis_name)


@pytest.mark.parametrize("route", [op.sample_tokens, exchanged])
@pytest.mark.parametrize("shards", [2, 3])
def test_shards_give_the_token_of_the_whole(shards: int, route):
    logits = jnp.asarray(awkward_logits())
    random = np.random.default_rng(3)
    arguments = (
        jnp.asarray(random.choice([0, 0.7, 1, 2], 10), jnp.float32),
        jnp.asarray(random.choice([0, 1, 7, 60], 10), jnp.int32),
        jnp.asarray(random.choice([1, 0.9, 0.4], 10), jnp.float32),
        jnp.asarray(random.choice([0, 0.02], 10), jnp.float32),
        *parameters(10)[4:],
    )
    whole = sample(logits, *arguments)
    parts = logits.reshape(10, shards, VOCABULARY // shards).swapaxes(0, 1)
    split = jax.vmap(lambda part: route(part, *arguments, axis_name="v"), axis_name="v")(parts)
    for shard in split:
        np.testing.assert_array_equal(shard, whole)


@pytest.mark.parametrize("plan", [Plan(128, 16), Plan(64, 64), Plan(512, 512)], ids=str)
def test_kernels_draw_the_reference_s_tokens(plan: Plan):
    """Tiles smaller and larger than the vocabulary; brackets that fit what is gathered, and that do not."""
    logits = np.concatenate([awkward_logits()] * len(FILTERS))
    filters = [{"temperature": 0.0}, *FILTERS][: len(FILTERS)]
    rows = [parameters(10, **f) for f in filters]
    arguments = [jnp.concatenate(column) for column in zip(*rows, strict=True)]
    arguments[-1] = jnp.arange(len(logits), dtype=jnp.int32)
    expected = sample(jnp.asarray(logits), *arguments)
    greedy = arguments[0] < op.GREEDY_TEMPERATURE
    kernels = jax.jit(sample_tokens_triton, static_argnames=("interpret", "plan"))
    found = kernels(jnp.asarray(logits), arguments[0], greedy, *arguments[1:], interpret=INTERPRET, plan=plan)
    np.testing.assert_array_equal(found, expected)


def test_a_row_without_a_best_token_stays_in_the_vocabulary():
    logits = jnp.full((3, 40), -jnp.inf).at[1].set(jnp.nan)
    for implementation in ("xla", KERNEL):
        found = np.asarray(sample(logits, *parameters(3, top_p=0.9), implementation=implementation))
        assert ((found >= 0) & (found < 40)).all()


def test_penalties():
    logits = jnp.asarray([[2.0, -1.0, 0.5, 3.0]])
    prompt = jnp.asarray([[True, True, False, False]])
    counts = jnp.asarray([[0, 2, 3, 0]])
    one = lambda value: jnp.asarray([value])  # noqa: E731
    off = op.apply_penalties(logits, prompt, counts, one(1.0), one(0.0), one(0.0))
    np.testing.assert_array_equal(off, logits)
    found = op.apply_penalties(logits, prompt, counts, one(2.0), one(0.25), one(0.5))
    expected = [[1.0, -2.0 - 0.5 - 0.5, 0.25 - 0.75 - 0.5, 3.0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_bias_and_mask():
    logits = jnp.zeros((2, 70))
    ids = jnp.asarray([[0, 69, -1], [5, 5, -1]])
    values = jnp.asarray([[1.0, -jnp.inf, 99.0], [0.5, 0.25, 99.0]])
    found = np.asarray(op.apply_bias(logits, ids, values))
    assert found[0, 0] == 1 and found[0, 69] == -np.inf and found[1, 5] == 0.75
    assert np.isfinite(found).sum() == 139 and found[np.isfinite(found)].sum() == 1.75
    words = np.zeros((2, 3), np.uint32)
    words[0, 2], words[1, 0] = 1 << 5, (1 << 31) | 1
    allowed = np.isfinite(np.asarray(op.apply_mask(logits, jnp.asarray(words))))
    assert np.argwhere(allowed).tolist() == [[0, 69], [1, 0], [1, 31]]


def test_refuses_a_vocabulary_that_overflows_the_sums():
    with pytest.raises(ValueError, match="at most 262143 entries, got 262144"):
        jax.eval_shape(op.sample_tokens, jax.ShapeDtypeStruct((1, 2**18), jnp.float32), *parameters(1))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("rows", [1, 128])
def test_lowers(rows: int, platform: str):
    logits = jax.ShapeDtypeStruct((rows, 154_880), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in parameters(rows)]
    text = lower(lambda *a: op.sample_tokens(*a, implementation="triton"), (logits, *shapes), platform)
    assert text.count("__gpu$xla.gpu.triton") == 11
