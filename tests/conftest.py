"""Counts the programs that compile slowly: compile time is a cost users and this suite feel."""

import jax
import pytest

SLOW_COMPILE_S = 1.0
MOST_SLOW_COMPILES = 200
_slow: list[float] = []


def _on_duration(event: str, duration: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration" and duration > SLOW_COMPILE_S:
        _slow.append(duration)


def pytest_configure() -> None:
    jax.monitoring.register_event_duration_secs_listener(_on_duration)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(_slow) > MOST_SLOW_COMPILES and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"programs that took over {SLOW_COMPILE_S:g} s to compile: {len(_slow)} "
        f"(at most {MOST_SLOW_COMPILES}), {sum(_slow):.0f} s together"
    )
