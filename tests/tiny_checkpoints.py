"""Tiny checkpoints in the released layout, written by the safetensors package and not by this library."""

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from glm_jax import params
from glm_jax.config import load_config

NUMPY_DTYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 40,
    "projection_intermediate_size": 16,
}
RAW: dict[str, Any] = {
    "model_type": "glm5_next",
    "architectures": ["Glm5NextForConditionalGeneration"],
    "image_token_id": 90,
    "text_config": {
        "model_type": "glm5_next_text",
        "vocab_size": 96,
        "hidden_size": 40,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "indexer_types": ["full", "full", "full", "shared"],
        "intermediate_size": 264,  # at two devices a shard is 132 wide: its edge cuts through a block
        "moe_intermediate_size": 256,  # a multiple of two blocks: its shards keep their scales
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "num_attention_heads": 2,
        "q_lora_rank": 136,  # ragged: one whole block and 8 more
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "v_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 16,
        "index_kpool": 4,
        "attention_bias": True,
        "linear_attn_config": {"num_heads": 2, "head_dim": 6, "short_conv_kernel_size": 4},
        "num_nextn_predict_layers": 1,
        "eos_token_id": [1, 2],
    },
}


def raw_config(*, quantized: bool = False, vision: bool = False, **text: Any) -> dict[str, Any]:
    """config.json of four layers (KDA and MLA in turn, the second indexer shared) and an MTP layer."""
    raw = copy.deepcopy(RAW)
    raw["text_config"].update(text)
    if vision:
        raw["vision_config"] = dict(VISION)
    if quantized:
        raw["quantization_config"] = dict(QUANTIZATION)
    return raw


def random_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random values for every tensor a checkpoint of this configuration holds."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, (shape, dtype) in params.checkpoint_tensors(load_config(raw)).items():
        values = generator.normal(size=shape).astype(np.float32)
        if name.endswith("_scale_inv"):
            values = generator.uniform(0.01, 0.1, shape).astype(np.float32)
        tensors[name] = values.astype(NUMPY_DTYPES[dtype])
    return tensors


def dequantized(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`[..., out, in]` fp8 times the scale of each element's 128 x 128 block, in float32."""
    rows, columns = np.indices(values.shape[-2:])
    return values.astype(np.float32) * scales[..., rows // 128, columns // 128]


def dequantized_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The twin without scales: every fp8 tensor multiplied out to float32."""
    twin = {}
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name}_scale_inv")
        if not name.endswith("_scale_inv"):
            twin[name] = tensor if scales is None else dequantized(tensor, scales)
    return twin


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One safetensors file, by the reference implementation."""
    buffers = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=buffer.dtype.name,
            shape=tensors[name].shape,
            data_ptr=buffer.ctypes.data,
            data_len=buffer.nbytes,
        )
        for name, buffer in buffers.items()
    }
    safetensors.serialize_file(specs, str(path), {"format": "pt"})


def read_folder(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """`{name: (dtype, shape, bytes)}` over all files of a folder, by the reference implementation."""
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for path in folder.glob("*.safetensors")
        for name, entry in safetensors.deserialize(path.read_bytes())
    }


def write_folder(folder: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A checkpoint folder; several shards get an index, names dealt out in turn so that modules are split."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    names = list(tensors)
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        write_file(folder / file_name, part)
        weight_map.update(dict.fromkeys(part, file_name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
