"""One training step, and its programs: one for every shape of batch, compiled in background threads."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.tiny import model, optimizer
from benchmarks.tiny.data import LOOKAHEAD
from benchmarks.tiny.optimizer import OptimizerState
from benchmarks.tiny.parameters import Params
from benchmarks.tiny.schedule import Phase, Preset

Metrics = dict[str, jax.Array]
Program = Callable[..., tuple[Params, OptimizerState, Metrics]]


def train_step(
    params: Params,
    state: OptimizerState,
    ids: jax.Array,
    classes: jax.Array,
    pools: jax.Array,
    rate: jax.Array,
    bias_rate: jax.Array,
    *,
    sparse: bool,
    preset: Preset,
) -> tuple[Params, OptimizerState, Metrics]:
    """One optimizer step. The routing bias follows the sign of each expert's lack of load.

    ids, classes [rows, length + LOOKAHEAD]; pools [rows] int32: how many each row's queries may choose.
    """
    shape = preset.shape

    def objective(p: Params) -> tuple[jax.Array, Metrics]:
        return model.loss(p, ids, classes, pools if sparse else None, model.Weights(), shape)

    grads, metrics = jax.grad(objective, has_aux=True)(params)
    params, state, norm = optimizer.update(params, grads, state, rate, preset.weight_decay)
    load = metrics.pop("load")
    params["moe.bias"] = params["moe.bias"] + bias_rate * jnp.sign(1 / shape.num_experts - load)
    return params, state, dict(metrics, max_load=load.max(), gradient_norm=norm)


class Compiler:
    """Programs by batch shape: the first at once, the others beside the training that it begins."""

    def __init__(self, preset: Preset, params: Params, state: OptimizerState, first: Phase):
        self._preset = preset
        self._programs: dict[tuple[int, int, bool], Any] = {}
        self._arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state))
        self._compile(self._key(first))
        later = dict.fromkeys(map(self._key, preset.phases))
        for key in later:
            if key not in self._programs:
                threading.Thread(target=self._compile, args=(key,)).start()

    def program(self, phase: Phase) -> Program | None:
        """None while it is being compiled."""
        return self._programs.get(self._key(phase))

    @staticmethod
    def _key(phase: Phase) -> tuple[int, int, bool]:
        return phase.batch.rows, phase.batch.length, phase.sparse

    def _compile(self, key: tuple[int, int, bool]) -> None:
        rows, length, sparse = key
        begun = time.time()
        step = jax.jit(train_step, static_argnames=("sparse", "preset"), donate_argnums=(0, 1))
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        ids, classes = (
            jax.ShapeDtypeStruct((rows, length + LOOKAHEAD), dtype) for dtype in (jnp.uint16, jnp.uint8)
        )
        pools = jax.ShapeDtypeStruct((rows,), jnp.int32)
        lowered = step.lower(
            *self._arrays, ids, classes, pools, scalar, scalar, sparse=sparse, preset=self._preset
        )
        self._programs[key] = lowered.compile()
        kind = "sparse" if sparse else "dense"
        print(f"compiled {rows} x {length} {kind} in {time.time() - begun:.0f} s", flush=True)
