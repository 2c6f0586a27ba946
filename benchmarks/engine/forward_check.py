"""The forward with kernels against the forward on XLA, released widths and few layers, on a GPU.

    python -m benchmarks.engine.forward_check [--layers 4] [--tokens 512]

Both run in bfloat16 with block-scaled fp8 weights. The kernels also round activations to fp8 (the GPU's
default), so the two differ by rounding: the figure printed is the distance of the final hidden states, and
beside it that of two XLA runs whose inputs differ by one bfloat16 rounding, which the model amplifies alike.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine.device_time import kernel_seconds
from benchmarks.engine.model import cut_config, random_model
from glm_jax import teacher_forcing
from glm_jax.rows import align_left


def distance(a: Any, b: Any) -> float:
    a, b = (np.asarray(jnp.asarray(x, jnp.float32), np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    config = cut_config(options.layers, tiny=options.tiny)
    params = random_model(config).params
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, config.vocab_size, (2, options.tokens)), jnp.int32
    )
    kernels = "xla" if options.tiny else None

    def hidden(implementation: str | None):
        def run(params: Any, tokens: jax.Array) -> jax.Array:
            aligned = align_left(tokens, None)
            if implementation == "xla" and not options.tiny:
                return teacher_forcing._whole(params, config, aligned)[0]
            return teacher_forcing._through_cache(params, config, aligned, implementation)

        begin = time.perf_counter()
        compiled = jax.jit(run).lower(params, tokens).compile()
        print(f"{implementation}: compiled in {time.perf_counter() - begin:.1f} s")
        return compiled

    xla = hidden("xla")(params, tokens)
    triton = hidden(kernels)
    got = triton(params, tokens)
    print("finite", bool(jnp.isfinite(got).all()), "distance kernels to XLA", distance(got, xla))
    jax.block_until_ready(got)
    begin = time.perf_counter()
    for _ in range(5):
        got = triton(params, tokens)
    jax.block_until_ready(got)
    print(f"kernels: {(time.perf_counter() - begin) / 5 * 1e3:.2f} ms for {tokens.size} tokens")
    busy, by_name = kernel_seconds(lambda: jax.block_until_ready(triton(params, tokens)))
    print(f"busy {busy * 1e3:.2f} ms")
    for name, seconds in by_name.most_common(25):
        print(f"  {seconds * 1e3:8.3f} ms  {name[:110]}")


if __name__ == "__main__":
    main()
