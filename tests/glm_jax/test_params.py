"""The declarative parameter tree: released census, reversibility, initialisation, memory."""

import math
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax import params
from glm_jax.config import Config, load_config
from glm_jax.memory_table import memory_table
from glm_jax.parameter_spec import Source
from tests.tiny_checkpoints import raw_config

FIXTURE = Path(__file__).parents[1] / "fixtures" / "glm5_3_flash_config.json"
BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
L = "model.language_model.layers."


@pytest.fixture(scope="module")
def released() -> Config:
    return load_config(FIXTURE)


@pytest.fixture(scope="module")
def tensors(released: Config) -> dict:
    return params.checkpoint_tensors(released)


def test_census_of_the_released_checkpoint(tensors: dict) -> None:
    assert len(tensors) == 76_108
    assert sum(math.prod(shape) * BYTES[dtype] for shape, dtype in tensors.values()) == 328_326_771_576
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for shape, dtype in tensors.values():
        counts[dtype] += 1
        elements[dtype] += math.prod(shape)
    assert counts == {"F8_E4M3": 37_338, "BF16": 1_141, "F32": 37_629}
    assert elements == {"F8_E4M3": 314_396_639_232, "BF16": 6_926_096_640, "F32": 19_484_766}
    scales = sum(math.prod(shape) for name, (shape, _) in tensors.items() if name.endswith("_scale_inv"))
    assert sum(elements.values()) - scales == 321_323_031_390


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.language_model.embed_tokens.weight", (154880, 4096), "BF16"),
        ("lm_head.weight", (154880, 4096), "BF16"),
        ("model.language_model.norm.weight", (4096,), "BF16"),
        (L + "44.hc_attn_fn", (24, 16384), "BF16"),
        (L + "44.hc_ffn_base", (24,), "F32"),
        (L + "0.hc_attn_scale", (3,), "F32"),
        (L + "0.self_attn.q_proj.weight", (8192, 4096), "BF16"),
        (L + "0.self_attn.v_conv1d.weight", (8192, 1, 4), "BF16"),
        (L + "0.self_attn.f_a_proj.weight", (128, 4096), "BF16"),
        (L + "0.self_attn.g_b_proj.weight", (8192, 128), "BF16"),
        (L + "0.self_attn.b_proj.weight", (64, 4096), "BF16"),
        (L + "0.self_attn.A_log", (64,), "F32"),
        (L + "0.self_attn.dt_bias", (8192,), "F32"),
        (L + "0.self_attn.o_norm.weight", (128,), "BF16"),
        (L + "0.self_attn.o_proj.weight", (4096, 8192), "BF16"),
        (L + "3.self_attn.q_a_proj.weight_scale_inv", (12, 32), "F32"),
        (L + "3.self_attn.q_b_proj.weight", (16384, 1536), "F8_E4M3"),
        (L + "3.self_attn.kv_a_proj_with_mqa.weight_scale_inv", (4, 32), "F32"),
        (L + "3.self_attn.kv_b_proj.weight", (32768, 512), "BF16"),
        (L + "3.self_attn.o_proj.weight", (4096, 16384), "F8_E4M3"),
        (L + "3.self_attn.indexer.wq_b.weight", (4096, 1536), "BF16"),
        (L + "3.self_attn.indexer.k_norm.bias", (128,), "BF16"),
        (L + "3.self_attn.indexer.weights_proj.weight", (32, 4096), "BF16"),
        (L + "3.self_attn.indexer.index_kpool_compress_ape", (4, 128), "BF16"),
        (L + "3.self_attn.indexer.index_kpool_compress_gate", (128, 4096), "BF16"),
        (L + "2.mlp.down_proj.weight_scale_inv", (32, 96), "F32"),
        (L + "3.mlp.gate.weight", (288, 4096), "BF16"),
        (L + "3.mlp.gate.e_score_correction_bias", (288,), "F32"),
        (L + "44.mlp.experts.287.down_proj.weight", (4096, 2048), "F8_E4M3"),
        (L + "44.mlp.shared_experts.up_proj.weight_scale_inv", (16, 32), "F32"),
        (L + "45.eh_proj.weight", (4096, 8192), "BF16"),
        (L + "45.shared_head.norm.weight", (4096,), "BF16"),
        ("model.visual.patch_embed.proj.weight", (1024, 3, 2, 14, 14), "BF16"),
        ("model.visual.blocks.23.attn.qkv.bias", (3072,), "BF16"),
        ("model.visual.downsample.weight", (4096, 1024, 2, 2), "BF16"),
        ("model.visual.merger.down_proj.weight", (4096, 10240), "BF16"),
    ],
)
def test_released_names(tensors: dict, name: str, shape: tuple[int, ...], dtype: str) -> None:
    assert tensors[name] == (shape, dtype)


def test_tensor_kinds_of_each_layer(tensors: dict) -> None:
    """MODEL.md b.10, experts counted as kinds."""
    kinds: dict[int, set[str]] = {}
    for name in tensors:
        if name.startswith(L):
            layer, _, rest = name.removeprefix(L).partition(".")
            parts = ["*" if part.isdigit() else part for part in rest.split(".")]
            kinds.setdefault(int(layer), set()).add(".".join(parts))
    expected = {0: 29, 1: 29, 2: 29, 45: 38}
    for layer in range(46):
        assert len(kinds[layer]) == expected.get(layer, 40 if layer % 4 == 3 else 37), layer
    assert not any("embed_tokens" in name or "hc_" in name or "head.weight" in name for name in kinds[45])


@pytest.mark.parametrize("quantized", [False, True])
def test_sources_use_every_disk_element_and_fill_every_leaf_once(quantized: bool) -> None:
    specs = params.named_leaves(params.abstract(load_config(raw_config(quantized=quantized))), params.is_spec)
    read: dict[str, np.ndarray] = {}
    for path, spec in specs.items():
        filled = np.zeros(spec.shape, int)
        for source in spec.sources:
            used = read.setdefault(source.name, np.zeros(source.shape, int))
            assert used.shape == source.shape
            part = used.reshape(source.view)[source.disk_index]
            part += 1
            assert filled[source.leaf_index].shape == part.shape, path
            filled[source.leaf_index] += 1
        assert (filled == 1).all(), path
    assert all((used == 1).all() for used in read.values())
    names = set(params.checkpoint_tensors(load_config(raw_config(quantized=quantized))))
    assert names - {name for name in names if name.endswith("_scale_inv")} == set(read)


def test_source_refuses_a_view_of_another_size() -> None:
    with pytest.raises(ValueError, match="view"):
        Source("x", (4, 6), view=(5, 5))


def test_shared_indexers_and_biases_follow_the_configuration() -> None:
    tree = params.abstract(load_config(raw_config()))
    assert tree.layers[1].attention.indexer is not None and tree.layers[3].attention.indexer is None
    assert tree.mtp is not None and tree.mtp.attention.indexer is not None
    assert tree.layers[1].attention.q_a_bias is not None
    bare = params.abstract(load_config(raw_config(attention_bias=False, num_nextn_predict_layers=0)))
    assert bare.mtp is None and bare.layers[1].attention.o_bias is None


def test_islands_are_the_float32_tensors() -> None:
    for path, spec in params.named_leaves(params.abstract(load_config(raw_config())), params.is_spec).items():
        island = path.endswith(("A_log", "dt_bias", "router_bias", "_hc.base", "_hc.scale"))
        assert spec.float32_island == island and (spec.dtype == "F32") == island, path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_parameters(dtype: str) -> None:
    config = load_config(raw_config())
    tree = params.init(config, jax.random.key(0), dtype)
    specs = params.named_leaves(params.abstract(config), params.is_spec)
    leaves = params.named_leaves(tree)
    assert leaves.keys() == specs.keys()
    for path, leaf in leaves.items():
        expected = jnp.float32 if specs[path].float32_island else jnp.dtype(dtype)
        assert leaf.shape == specs[path].shape and leaf.dtype == expected, path
        assert np.isfinite(np.asarray(leaf, np.float32)).all(), path
    again = params.named_leaves(params.init(config, jax.random.key(0), dtype))
    other = params.named_leaves(params.init(config, jax.random.key(1), dtype))
    path = "layers.1.mlp.gate_up"
    assert (again[path] == leaves[path]).all() and (other[path] != leaves[path]).any()
    # variance 1 / inputs: 4 * 2 * 256 * 40 draws, so 2 percent is 6 standard deviations
    assert abs(np.asarray(leaves[path], np.float32).std() * 40**0.5 - 1) < 0.02


def test_softplus_gate_starts_with_other_rates() -> None:
    softplus = raw_config(linear_attn_config={"safe_gate": False, "gate_lower_bound": None})
    rates = params.init(load_config(softplus), jax.random.key(0)).layers[0].attention.A_log
    assert (rates > 0).all() and (rates <= math.log(16)).all()
    assert (params.init(load_config(raw_config()), jax.random.key(0)).layers[0].attention.A_log == 0).all()


def test_memory_table_of_the_released_checkpoint(released: Config) -> None:
    """The published size budget (MODEL.md b.11), GB to the digits given there."""
    rows = {row.group: row for row in memory_table(released, {"tp": 8})}
    gigabytes = {group: round(row.total_bytes / 1e9, 3) for group, row in rows.items()}
    assert gigabytes["kda"] == 9.366
    assert gigabytes["mla"] == 1.477
    assert gigabytes["indexer"] == 0.164
    assert gigabytes["moe_router"] == 0.099
    assert gigabytes["moe_shared"] == 1.057
    assert round(rows["moe_experts"].total_bytes / 1e9, 2) == 304.48
    assert gigabytes["hyper_connection"] == 0.071
    assert gigabytes["embed_tokens"] == gigabytes["lm_head"] == 1.269
    text = sum(row.device_bytes for group, row in rows.items() if group != "mtp")
    assert round(text / 1e9, 1) == 40.4
    single = memory_table(released, {})
    assert all(row.device_bytes == row.total_bytes for row in single)
