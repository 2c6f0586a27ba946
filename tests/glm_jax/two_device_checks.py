"""Checks that need a mesh of two simulated CPU devices: run by test_sharding.py in a process of its own.

Prints one JSON line `{check: "ok" or the traceback}`.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `tests`

from glm_jax import checkpoint, params
from glm_jax.loading import load
from glm_jax.quantization import BlockScaled, dequantize
from glm_jax.saving import save
from glm_jax.sharding import EXPERT_PARALLEL, TENSOR_PARALLEL, partition_spec, partition_specs
from tests.tiny_checkpoints import (
    dequantized,
    dequantized_tensors,
    random_tensors,
    raw_config,
    read_folder,
    write_folder,
)

MESH = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def leaves_of(tree: Any) -> dict[str, Any]:
    return params.named_leaves(tree, lambda node: isinstance(node, BlockScaled))


def assert_same(left: Any, right: Any) -> None:
    for (path, a), b in zip(params.named_leaves(left).items(), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def write(folder: Path, *, quantized: bool) -> Path:
    raw = raw_config(quantized=quantized)
    return write_folder(folder / f"model-{quantized}", raw, random_tensors(raw), shards=2)


def check_plain_model_over_a_mesh(folder: Path) -> None:
    source = write(folder, quantized=False)
    single = load(source, dtype=None)
    specs = params.named_leaves(params.abstract(single.config), params.is_spec)
    for rules in (TENSOR_PARALLEL, EXPERT_PARALLEL):
        spread = load(source, dtype=None, mesh=MESH, rules=rules)
        assert_same(spread.params, single.params)
        for path, leaf in params.named_leaves(spread.params).items():
            assert leaf.sharding.spec == partition_spec(specs[path], rules), path
            parts = 2 if "tp" in leaf.sharding.spec else 1
            for shard in leaf.addressable_shards:
                assert shard.data.size == leaf.size // parts, path
    experts = spread.params.layers[1].mlp.gate_up.sharding.spec
    assert experts == PartitionSpec("tp", None, None, None)
    save(spread, folder / "out")
    assert read_folder(folder / "out") == read_folder(source)


def check_fp8_shards_equal_shards_of_the_dequantised_model(folder: Path) -> None:
    source = write(folder, quantized=True)
    twin = write_folder(
        folder / "twin", raw_config(), dequantized_tensors(random_tensors(raw_config(quantized=True)))
    )
    whole = load(twin, dtype="float32")
    spread = load(source, dtype="float32", mesh=MESH)
    kept = 0
    whole_leaves = leaves_of(whole.params)
    for path, leaf in leaves_of(spread.params).items():
        expected = np.asarray(whole_leaves[path])
        if isinstance(leaf, BlockScaled):
            kept += 1
            for values, scales in zip(
                leaf.values.addressable_shards, leaf.scales.addressable_shards, strict=True
            ):
                assert values.device == scales.device
                local = dequantized(np.asarray(values.data), np.asarray(scales.data))
                np.testing.assert_array_equal(local, expected[values.index], err_msg=path)
        else:
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index], err_msg=path)
    # experts (256 wide) and the replicated q_a and kv_a keep their blocks; widths 264 and 24 cannot
    assert isinstance(spread.params.layers[1].mlp.gate_up, BlockScaled)
    assert isinstance(spread.params.layers[1].attention.q_a_proj, BlockScaled)
    assert not isinstance(spread.params.layers[0].mlp.gate_up, BlockScaled)
    assert not isinstance(spread.params.layers[1].attention.q_b_proj, BlockScaled)
    assert kept == 3 * (2 + 4)  # three MLA layers, each with q_a, kv_a; experts and shared MLP


def check_shard_map_sees_local_shapes(folder: Path) -> None:
    spread = load(write(folder, quantized=True), mesh=MESH)
    in_specs = partition_specs(spread.config, spread.params)

    def local(tree: Any) -> jax.Array:
        assert tree.layers[0].attention.qkv_proj.shape == (3, 6, 40)
        assert tree.layers[1].mlp.down.values.shape == (4, 40, 128)
        assert tree.layers[1].mlp.down.scales.shape == (4, 1, 1)
        return jax.lax.psum(tree.embed_tokens.astype(jnp.float32).sum(), "tp")

    total = jax.shard_map(local, mesh=MESH, in_specs=(in_specs,), out_specs=PartitionSpec(), check_vma=False)(
        spread.params
    )
    expected = np.asarray(spread.params.embed_tokens, np.float64).sum()
    assert abs(float(total) - expected) < 1e-3


def check_orbax_reshards(folder: Path) -> None:
    for quantized in (False, True):
        single = load(write(folder, quantized=quantized), dtype=None)
        spread = load(folder / f"model-{quantized}", dtype=None, mesh=MESH)
        checkpoint.save(single, folder / f"single-{quantized}")
        checkpoint.save(spread, folder / f"spread-{quantized}")
        assert_same(load(folder / f"single-{quantized}", dtype=None).params, single.params)
        resharded = load(folder / f"single-{quantized}", dtype=None, mesh=MESH)
        assert_same(resharded.params, spread.params)
        for a, b in zip(jax.tree.leaves(resharded.params), jax.tree.leaves(spread.params), strict=True):
            assert a.sharding == b.sharding
        assert_same(load(folder / f"spread-{quantized}", dtype=None).params, spread.params)
        other = load(folder / f"single-{quantized}", dtype=None, mesh=MESH, rules=EXPERT_PARALLEL)
        down = other.params.layers[1].mlp.down
        down = down.values if isinstance(down, BlockScaled) else down
        assert down.sharding.spec == PartitionSpec("tp", None, None)


def refusal(source: Path, mesh: jax.sharding.Mesh) -> str:
    try:
        load(source, mesh=mesh)
    except ValueError as error:
        return str(error)
    raise AssertionError("the mesh was accepted")


def check_meshes_that_do_not_fit(folder: Path) -> None:
    raw = raw_config(num_attention_heads=3, moe_intermediate_size=25)
    source = write_folder(folder / "odd", raw, random_tensors(raw))
    message = refusal(source, MESH)
    assert "mla_heads: 3 is not a multiple of 2 devices" in message
    assert "mla_query: 3" in message and "mla_value: 3" in message and "expert_mlp: 25" in message
    assert "kda" not in message
    wrong = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    message = refusal(source, wrong)
    assert "('model',)" in message and "'tp'" in message


def check_float64_is_float64_throughout(folder: Path) -> None:
    with jax.enable_x64(True):
        model = load(write(folder, quantized=True), dtype="float64")
        assert model.params.norm.dtype == model.params.layers[0].attention.A_log.dtype == jnp.float64
        assert model.params.layers[1].mlp.gate_up.values.dtype == jnp.float8_e4m3fn
        twin = dequantize(model.params.layers[1].mlp.gate_up, jnp.float64)
        assert twin.dtype == jnp.float64
        save(model, folder / "wide")
        assert_same(load(folder / "wide", dtype=None).params, model.params)


def main() -> None:
    results = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    check(Path(folder))
                    results[name] = "ok"
                except Exception:
                    results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
