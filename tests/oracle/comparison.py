"""Comparing with the reference: one tolerance, and a ledger of what was seen."""

from collections import defaultdict

import numpy as np

TOLERANCE = {
    # Two float32 implementations that round in different orders: the reference alone lies up to 1e-5 from its
    # own float64 run on these models, and a wrong term is orders of magnitude larger.
    np.dtype(np.float32): 2e-5,
    # Float64 leaves rounding at 1e-13; nothing but a different formula reaches 1e-9.
    np.dtype(np.float64): 1e-9,
}

ledger: dict[str, list[float]] = defaultdict(list)


def relative_difference(ours: np.ndarray, reference: np.ndarray, where: np.ndarray | None = None) -> float:
    """Largest difference over the largest reference value, at positions `where` [batch, time]."""
    ours = np.asarray(ours)
    if ours.shape != reference.shape:
        raise AssertionError(f"ours has shape {ours.shape}, the reference {reference.shape}")
    if where is not None:
        ours, reference = ours[where], reference[where]
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


def assert_close(
    what: str,
    ours: np.ndarray,
    reference: np.ndarray,
    where: np.ndarray | None = None,
    tolerance: float = 0.0,
) -> None:
    """Asserts equal dtypes and a relative difference within TOLERANCE (or `tolerance`), and records it."""
    ours = np.asarray(ours)
    assert ours.dtype == reference.dtype, f"{what}: ours is {ours.dtype}, the reference {reference.dtype}"
    difference = relative_difference(ours, reference, where)
    ledger[f"{what}, {ours.dtype}"].append(difference)
    bound = tolerance or TOLERANCE[reference.dtype]
    assert difference <= bound, (
        f"{what}: largest difference is {difference:.2e} of the largest value (at most {bound:g})"
    )
