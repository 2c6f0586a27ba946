"""Prints what the comparisons saw, the reference's own rounding noise included."""

import pytest
import torch

from .comparison import ledger


def pytest_configure() -> None:
    torch.set_num_threads(1)  # tiny matrices: threads only cost


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for what, differences in sorted(ledger.items()):
        terminalreporter.write_line(
            f"oracle: {what}: {len(differences)} comparisons, largest difference {max(differences):.1e}"
        )
