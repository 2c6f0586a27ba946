"""One case against the reference in a given precision: logits, streams per layer, states, MTP drafts."""

from functools import partial
from pathlib import Path

import jax
import numpy as np

import glm_jax
from glm_jax import mtp

from .cases import Case
from .comparison import assert_close
from .mtp_reference import MtpReference
from .reference import Reference

STEPS = 3


@partial(jax.jit, static_argnums=(1,))
def _everything(params, config, tokens, mask, hidden):
    """All that is compared, as one program: the two trunks in it are the same one to the compiler."""
    logits = glm_jax.forward(params, config, tokens, mask, implementation="xla")
    states = glm_jax.model_states(params, config, tokens, mask)
    drafts = None
    if config.index_share_for_mtp_iteration:
        drafts = mtp.forward(params, config, tokens, hidden, mask, steps=STEPS)
    return logits, states, drafts


def check_whole_run(case: Case, folder: Path, dtype: str) -> None:
    """Teacher forcing of the case's left-padded batch; drafts are made from the reference's hidden states."""
    case.write(folder)
    tokens, mask = case.inputs()
    reference = Reference(folder, dtype)
    expected = reference.run(tokens, mask)
    model = glm_jax.load(folder, dtype=dtype)
    logits, states, drafts = _everything(model.params, model.config, tokens, mask, expected.hidden)

    assert np.isfinite(logits).all()
    assert_close("logits of whole runs", logits, expected.logits, mask)
    assert_close("final hidden states", states.hidden, expected.hidden, mask)
    assert len(states.streams) == len(expected.streams)
    for ours, theirs in zip(states.streams, expected.streams, strict=True):
        assert_close("residual streams per layer", ours, theirs, mask)
    for ours, theirs in zip(states.kda_states, expected.states.values(), strict=True):
        assert_close("KDA states", ours, theirs)

    if drafts is not None:
        expected_drafts = MtpReference(reference, folder).run(tokens, expected.hidden, mask, STEPS)
        for step in range(STEPS):
            known = mask.copy()  # rows whose token at t + 1 + step exists
            known[:, case.time - 1 - step :] = False
            assert_close(f"MTP logits, step {step}", drafts[step], expected_drafts[step], known)
