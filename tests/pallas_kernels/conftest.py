"""`--device gpu`: the kernels compiled on the GPU that jax finds; without it on whatever jax finds."""

import jax
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "gpu"),
        help="cpu: kernels interpreted, whatever GPU there is; gpu: compiled, an error without a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before the test modules are imported: they ask jax for its default backend (device.py)."""
    device = config.getoption("--device", default=None)
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif device == "gpu" and jax.default_backend() != "gpu":
        raise pytest.UsageError(f"--device gpu, but the only devices jax finds are {jax.devices()}")
