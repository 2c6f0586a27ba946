"""The training forward against `glm_jax` on an exported checkpoint: two forwards that share no code."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm_jax
import glm_jax.mtp
from benchmarks.tiny import model, parameters
from benchmarks.tiny.export import FLOAT32_ENDINGS, checkpoint_tensors, export
from benchmarks.tiny.parameters import Params
from benchmarks.tiny.shape import Shape
from benchmarks.tiny.tokenizer import train_tokenizer

SHAPE = Shape(
    hidden_size=32,
    dense_width=48,
    expert_width=8,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_head_dim=16,
    v_head_dim=8,
    kda_head_dim=16,
    index_head_dim=8,
    index_topk=16,
    compute_dtype="float32",
    kda_chunk=32,
)
# float32 rounding through eight layers in two orders of summation: the project's own bound for this model
TOLERANCE = 2e-5


def disturbed(seed: int) -> Params:
    """Initial parameters moved so that nothing is zero, one or symmetric, rounded as on disk."""
    r = np.random.default_rng(seed)

    def move(name: str, value: jax.Array) -> jax.Array:
        moved = value + jnp.asarray(0.2 * r.standard_normal(value.shape), jnp.float32)
        single = name in ("hc.base", "hc.scale", "kda.A_log", "kda.dt_bias", "moe.bias")
        return moved if single else moved.astype(jnp.bfloat16).astype(jnp.float32)

    return {name: move(name, value) for name, value in parameters.initialise(SHAPE, seed).items()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Params, glm_jax.Model]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    params = disturbed(1)
    host = {name: np.asarray(value) for name, value in params.items()}
    export(host, SHAPE, train_tokenizer(), folder)
    return params, glm_jax.load(str(folder), dtype="float32")


def test_logits_agree_with_the_library_and_so_does_the_selection(
    exported: tuple[Params, glm_jax.Model],
) -> None:
    params, loaded = exported
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, SHAPE.vocab_size, (2, 96)), jnp.int32)
    hidden, inside = model.trunk(params, tokens, SHAPE.index_topk // SHAPE.index_kpool, SHAPE)
    ours = model.logits(params, hidden)
    theirs = glm_jax.forward(loaded.params, loaded.config, tokens, implementation="xla")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * float(jnp.abs(theirs).max()))
    assert float(inside.covered[:, :, -1].max()) < 0.999, (
        "the selection left nothing out: the case is too easy"
    )


def test_chained_drafts_agree_with_the_library(exported: tuple[Params, glm_jax.Model]) -> None:
    params, loaded = exported
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, SHAPE.vocab_size, (2, 96)), jnp.int32)
    pools = SHAPE.index_topk // SHAPE.index_kpool
    hidden, _ = model.trunk(params, tokens, pools, SHAPE)
    chain, _ = model.mtp_chain(params, hidden, tokens, pools, SHAPE)
    theirs = glm_jax.mtp.forward(loaded.params, loaded.config, tokens, hidden, steps=model.MTP_STEPS)
    for step in range(model.MTP_STEPS):
        ours = model.logits(params, chain[step])
        # the training chain files a row under the token it predicts, the library under the token it began at;
        # the library's rows at the end are fed tokens from past the sequence
        last = tokens.shape[1] - 1 - step
        np.testing.assert_allclose(
            ours[:, step : step + last],
            theirs[step][:, :last],
            rtol=0,
            atol=TOLERANCE * float(jnp.abs(ours).max()),
        )


def test_bisection_selects_what_a_sort_selects(exported: tuple[Params, glm_jax.Model]) -> None:
    params, _ = exported
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, SHAPE.vocab_size, (2, 64)), jnp.int32)
    exact, _ = model.trunk(params, tokens, 4, SHAPE)
    bisected, _ = model.trunk(params, tokens, jnp.array([4, 4]), SHAPE)
    # ties at zero keep every tied pool in the bisection: rows that differ are few, the others equal
    same = jnp.isclose(exact, bisected, atol=1e-4).all(-1)
    assert float(same.mean()) > 0.8


def test_a_later_token_changes_no_earlier_loss_term() -> None:
    params = disturbed(5)
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, SHAPE.vocab_size, (1, 64)), jnp.int32)
    changed = tokens.at[0, 40].set((tokens[0, 40] + 1) % SHAPE.vocab_size)
    before, after = (model.trunk(params, t, 4, SHAPE)[0] for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :40], after[:, :40])
    assert not np.array_equal(before[:, 40:], after[:, 40:])


def test_export_has_exactly_the_released_names_shapes_and_dtypes(
    exported: tuple[Params, glm_jax.Model],
) -> None:
    params, loaded = exported
    tensors = checkpoint_tensors({k: np.asarray(v) for k, v in params.items()}, SHAPE)
    names = {"bfloat16": "BF16", "float32": "F32"}
    written = {name: (tensor.shape, names[tensor.dtype.name]) for name, tensor in tensors.items()}
    assert written == glm_jax.params.checkpoint_tensors(loaded.config)
    assert all((dtype == "F32") == name.endswith(FLOAT32_ENDINGS) for name, (_, dtype) in written.items())


def test_parameter_count_is_what_the_checkpoint_holds() -> None:
    params = {name: np.asarray(value) for name, value in parameters.initialise(SHAPE, 0).items()}
    held = sum(tensor.size for tensor in checkpoint_tensors(params, SHAPE).values())
    assert parameters.count(SHAPE) == held


def test_a_layer_count_outside_the_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers is 6"):
        dataclasses.replace(SHAPE, num_layers=6)
