"""The model against committed values of the reference implementation (written by `make oracle`); no torch."""

from pathlib import Path

import numpy as np
import pytest

import glm_jax
from glm_jax import mtp

FOLDER = Path(__file__).parents[1] / "fixtures" / "oracle"
NAMES = ("pool4", "pool16", "shared", "softplus")
# Float32 rounding through four or five layers; the values compared with come from a float64 run.
TOLERANCE = 2e-5


def relative_difference(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(ours) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_states_and_drafts(name: str) -> None:
    expected = np.load(FOLDER / name / "expected.npz")
    tokens, mask = expected["tokens"], expected["mask"]
    model = glm_jax.load(FOLDER / name, dtype="float32")

    logits = np.asarray(glm_jax.forward(model.params, model.config, tokens, mask, implementation="xla"))
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    assert relative_difference(logits[mask], expected["logits"][mask]) <= TOLERANCE

    states = glm_jax.model_states(model.params, model.config, tokens, mask)
    last = expected["streams"].shape[2]
    for ours, theirs in zip(states.streams, expected["streams"], strict=True):
        assert relative_difference(ours[:, -last:], theirs) <= TOLERANCE
    for ours, theirs in zip(states.kda_states, expected["kda_states"], strict=True):
        assert relative_difference(ours, theirs) <= TOLERANCE

    steps, _, kept, _ = expected["mtp_logits"].shape
    drafts = mtp.forward(model.params, model.config, tokens, states.hidden, mask, steps=steps)
    for ours, theirs in zip(drafts, expected["mtp_logits"], strict=True):
        assert relative_difference(ours[:, -kept - steps : -steps], theirs) <= TOLERANCE
