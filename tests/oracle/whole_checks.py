"""One case against the reference in a given precision: logits, streams per layer, states, MTP drafts."""

from pathlib import Path

import numpy as np

import glm_jax
from glm_jax import mtp

from .cases import Case
from .comparison import assert_close
from .mtp_reference import MtpReference
from .reference import Reference

STEPS = 3


def check_whole_run(case: Case, folder: Path, dtype: str) -> None:
    """Teacher forcing of the case's left-padded batch."""
    case.write(folder)
    tokens, mask = case.inputs()
    reference = Reference(folder, dtype)
    expected = reference.run(tokens, mask)
    model = glm_jax.load(folder, dtype=dtype)

    logits = glm_jax.forward(model.params, model.config, tokens, mask, implementation="xla")
    assert np.isfinite(logits).all()
    assert_close("logits of whole runs", logits, expected.logits, mask)

    states = glm_jax.model_states(model.params, model.config, tokens, mask)
    assert_close("final hidden states", states.hidden, expected.hidden, mask)
    assert len(states.streams) == len(expected.streams)
    for ours, theirs in zip(states.streams, expected.streams, strict=True):
        assert_close("residual streams per layer", ours, theirs, mask)
    for ours, theirs in zip(states.kda_states, expected.states.values(), strict=True):
        assert_close("KDA states", ours, theirs)

    if model.config.index_share_for_mtp_iteration:
        check_mtp(case, folder, reference, model, expected.hidden)


def check_mtp(
    case: Case, folder: Path, reference: Reference, model: glm_jax.Model, hidden: np.ndarray
) -> None:
    """Three chained drafts, teacher-forced, from the same hidden states."""
    tokens, mask = case.inputs()
    drafts = MtpReference(reference, folder).run(tokens, hidden, mask, STEPS)
    ours = mtp.forward(model.params, model.config, tokens, hidden, mask, steps=STEPS)
    for step in range(STEPS):
        known = mask.copy()  # rows whose token at t + 1 + step exists
        known[:, case.time - 1 - step :] = False
        if known.any():
            assert_close(f"MTP logits, step {step}", ours[step], drafts[step], known)
