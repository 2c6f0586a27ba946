"""Prints the table of compiled kernels after the AMD gate has run."""

from __future__ import annotations

import pytest

ROWS = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[ROWS] = []


@pytest.fixture
def record_rows(request):
    return request.config.stash[ROWS].extend


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[ROWS]
    if rows:
        from tests.amd.gate import table

        terminalreporter.write_line(table(rows))
