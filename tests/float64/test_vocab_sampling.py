"""Vocabulary sampling of float64 logits: edges are found in 64 bits."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import vocab_sampling as op
from tests.pallas_kernels import sampling_oracle as oracle


def test_edges_tell_float64_neighbours_apart():
    """Logits that are equal in float32 but not in float64: top-k keeps the larger alone."""
    logits = np.full((200, 50), -3.0)
    logits[:, 7], logits[:, 31] = 1.0, 1.0 + 1e-12
    count = len(logits)
    arguments = [jnp.full(count, v) for v in (1.0, 1, 1.0, 0.0, 5, 0)]
    found = op.sample_tokens(jnp.asarray(logits), *arguments, jnp.arange(count))
    assert (np.asarray(found) == 31).all()


def test_scores_are_float64():
    random = np.random.default_rng(0)
    logits = random.normal(size=(40, 120))
    arguments = [jnp.full(40, v) for v in (0.8, 30, 0.9, 0.001, 3, 1)]
    positions = jnp.arange(40)
    found = np.asarray(jax.jit(op.sample_tokens)(jnp.asarray(logits), *arguments, positions))
    noise = np.asarray(op.gumbel(arguments[4], arguments[5], positions, jnp.arange(120)), np.float64)
    for row in range(40):
        keep = oracle.kept(logits[row], 0.8, 30, 0.9, 0.001)
        scores = np.where(keep, (logits[row] - logits[row].max()) / 0.8 + noise[row], -np.inf)
        assert found[row] == scores.argmax()
