"""The gradient of the next-token loss against torch's, every parameter of the trunk, in the given precision.

The torch gradients are written as a checkpoint by transformers itself and loaded as one, so that both
sides meet in the same tree: the loader only stacks, splits and reshapes.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import glm_jax

from .cases import Case
from .comparison import ledger
from .reference import Reference

TOLERANCE = {
    # A gradient is a sum of many products that cancel, so it keeps a digit less than the logits do.
    "float32": 5e-4,
    "float64": 1e-9,
}
# Tensors whose gradient is this small beside the largest one are compared on the scale of the latter.
SMALL = 1e-4


def next_token_loss(params: glm_jax.params.Params, config: glm_jax.Config, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of tokens [batch, time] after the first."""
    logits = glm_jax.forward(params, config, tokens, implementation="xla")[:, :-1]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def check_gradients(case: Case, folder: Path, dtype: str) -> None:
    """Loss and gradients of one batch without padding."""
    case.write(folder / "model")
    # transformers takes the padding token's embedding row out of the gradient, so that token stays away.
    tokens = np.maximum(case.inputs()[0], case.config["text_config"]["pad_token_id"] + 1)
    reference = Reference(folder / "model", dtype)
    expected_loss = reference.save_loss_gradients(tokens, folder / "gradient")
    (folder / "gradient" / "config.json").write_text(json.dumps(case.config))
    expected = glm_jax.load(folder / "gradient", dtype=dtype).params

    model = glm_jax.load(folder / "model", dtype=dtype)
    loss, gradient = jax.jit(jax.value_and_grad(next_token_loss), static_argnums=1)(
        model.params, model.config, jnp.asarray(tokens)
    )
    assert abs(float(loss) - expected_loss) <= TOLERANCE[dtype] / 100 * expected_loss
    ours = jax.tree_util.tree_leaves_with_path(gradient)
    theirs = jax.tree.leaves(expected)
    largest = max(float(jnp.abs(leaf).max()) for leaf in theirs)
    worst = 0.0
    for (path, mine), true in zip(ours, theirs, strict=True):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(mine).all(), name
        scale = max(float(jnp.abs(true).max()), SMALL * largest)
        difference = float(jnp.abs(mine - true).max()) / scale
        worst = max(worst, difference)
        assert difference <= TOLERANCE[dtype], f"{name}: {difference:.1e} of {scale:.1e}"
    ledger[f"gradients, {dtype}"].append(worst)
