"""How the kernels run in these tests: interpreted on a CPU, compiled on a GPU."""

import jax

INTERPRET = jax.default_backend() == "cpu"
KERNEL = "interpret" if INTERPRET else "triton"
