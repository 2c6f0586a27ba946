"""Choice between an op's XLA reference and its Pallas-Triton kernel."""

from __future__ import annotations

import jax

IMPLEMENTATIONS = ("xla", "triton", "interpret")
_GPU_BACKENDS = ("gpu", "cuda", "rocm")


def resolve(implementation: str | None, *, supported: bool = True) -> str:
    """Return "xla", "triton" or "interpret" for an op's `implementation` argument.

    None picks the Triton kernel when the default backend is a GPU and the op says that its shapes are
    `supported`, else the XLA reference. An explicit choice is returned as it is.

    Raises:
      ValueError: `implementation` is not None and not one of the three names, or an explicit kernel
        implementation was asked for shapes the kernel does not support.
    """
    if implementation is None:
        return "triton" if supported and jax.default_backend() in _GPU_BACKENDS else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation != "xla" and not supported:
        raise ValueError(f"implementation={implementation!r} does not support these shapes, dtypes or gates")
    return implementation
