"""Greedy tokens against transformers' own generate; every MTP draft against the MTP reference."""

from pathlib import Path

import numpy as np
import pytest

import glm_jax

from .cases import Case
from .checkpoint import AGREEING
from .greedy_run import Drafted, greedy
from .mtp_reference import MtpReference
from .reference import Reference

PROMPT_LENGTHS = (1, 6, 17, 30)
NEW_TOKENS, DRAFTS = 24, 3
# An argmax is compared unless two float32 implementations may disagree on it: twice the logits' tolerance.
MARGIN = 4e-5


def _check_drafts(reference: MtpReference, hidden: np.ndarray, made: Drafted) -> int:
    """Every draft is the reference's argmax after the drafts before it; returns how many were clear."""
    row = len(made.sequence) - 2  # the newest committed position: its next token is the newest token
    tokens = np.array([made.sequence + made.drafts])
    padded = np.zeros((1, tokens.shape[1], hidden.shape[-1]), hidden.dtype)
    padded[0, : row + 1] = hidden[: row + 1]
    logits = reference.run(tokens, padded, steps=len(made.drafts))[:, 0, row]
    clear = 0
    for step, draft in enumerate(made.drafts):
        best, second = np.sort(logits[step])[[-1, -2]]
        if best - second > MARGIN * np.abs(logits[step]).max():
            assert draft == logits[step].argmax(), f"draft {step} after {made.sequence}"
            clear += 1
    return clear


# Later drafts reuse the first one's selection in "pool4" and choose their own in "softplus_absent".
@pytest.mark.parametrize("architecture", ["pool4", "softplus_absent"])
@pytest.mark.parametrize("regime", ["plain", AGREEING])
def test_greedy_tokens_and_drafts(architecture: str, regime: str, tmp_path: Path) -> None:
    case = Case(architecture, regime, PROMPT_LENGTHS, max(PROMPT_LENGTHS))
    case.write(tmp_path)
    tokens, mask = case.inputs()
    prompts = [row[real].tolist() for row, real in zip(tokens, mask, strict=True)]
    model = glm_jax.load(tmp_path, dtype="float32")
    answers, drafted, accepted = greedy(model, prompts, NEW_TOKENS, DRAFTS)
    if regime == AGREEING:
        assert 1 in accepted and max(accepted) > 1, "some drafts must be refused and some accepted"
    reference = Reference(tmp_path)
    drafts = MtpReference(reference, tmp_path)
    clear = total = 0
    for prompt, answer, made in zip(prompts, answers, drafted, strict=True):
        assert answer == reference.generate(prompt, NEW_TOKENS)
        whole = reference.run(np.array([made[-1].sequence]))
        for moment in made:
            if len(moment.sequence) > 1:
                clear += _check_drafts(drafts, whole.hidden[0], moment)
                total += DRAFTS
    assert clear > 0.98 * total
