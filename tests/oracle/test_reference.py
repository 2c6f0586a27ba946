"""The oracle itself: it agrees with itself, its ties are broken as promised, and no weight of a case is
idle."""

from pathlib import Path

import numpy as np
import pytest
import torch

from .architectures import FEATURES
from .cases import ROWS, TIME, Case
from .comparison import ledger, relative_difference
from .reference import Reference, stable_topk

PIECES = [17, 1, 2, 3, 17, 16, 20, 1, 1, 2]
# Whole and pieced runs round differently, and each lies about 5e-6 (at worst 1e-5) from the float64 run.
OWN_NOISE = 1.6e-5


@pytest.mark.parametrize("architecture", FEATURES)
def test_whole_and_pieced_runs_of_the_reference_agree(architecture: str, tmp_path: Path) -> None:
    case = Case(architecture, "ties", (TIME,) * ROWS)
    case.write(tmp_path)
    tokens, _ = case.inputs()
    single, double = Reference(tmp_path), Reference(tmp_path, "float64")
    whole, exact = single.run(tokens), double.run(tokens)
    noise = relative_difference(single.run(tokens, pieces=PIECES).logits, whole.logits)
    ledger["reference: float32 pieces against whole"].append(noise)
    ledger["reference: float32 against float64"].append(relative_difference(whole.logits, exact.logits))
    assert noise <= OWN_NOISE
    assert exact.logits.dtype == np.float64
    assert relative_difference(double.run(tokens, pieces=PIECES).logits, exact.logits) <= 1e-11


def test_ties_go_to_the_lowest_index_and_zeros_of_both_signs_tie() -> None:
    scores = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, -2.0]])
    with stable_topk():
        assert scores.topk(4).indices.tolist() == [[1, 3, 0, 2]]
        assert torch.topk(scores, 3, sorted=False)[1].tolist() == [[1, 3, 0]]


def test_the_ties_regime_has_ties_that_matter(tmp_path: Path) -> None:
    """Choosing the highest index among equals instead changes the logits by far more than the tolerance."""
    case = Case("pool4", "ties", (TIME,) * ROWS)
    case.write(tmp_path)
    tokens, _ = case.inputs()
    reference = Reference(tmp_path)
    lowest = reference.run(tokens).logits

    sort = torch.sort

    def reversed_sort(scores: torch.Tensor, dim: int, descending: bool, stable: bool) -> tuple:
        values, indices = sort(scores.flip(dim), dim=dim, descending=descending, stable=stable)
        return values, scores.shape[dim] - 1 - indices

    torch.sort = reversed_sort
    try:
        highest = reference.run(tokens).logits
    finally:
        torch.sort = sort
    assert relative_difference(highest, lowest) > 1e-2


@pytest.mark.parametrize("architecture", ["pool16", "softplus"])
def test_every_weight_moves_the_logits(architecture: str, tmp_path: Path) -> None:
    """Scrambling any one tensor shows at a hundred times the tolerance: no part of a case is idle."""
    case = Case(architecture, "plain", (TIME,) * ROWS)
    case.write(tmp_path)
    tokens, _ = case.inputs()
    reference = Reference(tmp_path)
    logits = reference.run(tokens).logits
    idle = []
    for name, tensor in [*reference.model.named_parameters(), *reference.model.named_buffers()]:
        if ".visual." in name:
            continue
        original = tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(original.flatten().roll(1).reshape(original.shape))
        if relative_difference(reference.run(tokens).logits, logits) < 2e-3:
            idle.append(name)
        with torch.no_grad():
            tensor.copy_(original)
    assert not idle
