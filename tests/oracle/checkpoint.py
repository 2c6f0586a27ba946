"""Random tiny checkpoints in the released on-disk layout (names and dtypes of the published index), numpy
only.

Weights are far stronger than a fresh initialisation: gates, pools, experts, stream mixing and logits are
all of order 1 to 10, so that a mistake in any of them moves the logits by much more than the tolerance.
"""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .architectures import kda_sizes

BLOCK = 128
TEXT = "model.language_model."
VISUAL = "model.visual."
DTYPE_NAMES = {
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.float32): "F32",
}
FLOAT32_SUFFIXES = ("A_log", "dt_bias", "e_score_correction_bias", "_base", "_scale", "_scale_inv")
FP8_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "down_proj")

# What the values of a checkpoint are about; each is a regime in which an implementation can fail alone.
REGIMES = ("plain", "saturated", "weak", "ties", "large")
# Trunk and MTP layer nearly agree on the next token, so that some drafts are accepted and some are not.
AGREEING = "agreeing"


class _Draw:
    """Draws named tensors of one checkpoint."""

    def __init__(self, text: dict[str, Any], seed: int, regime: str):
        known = (*REGIMES, AGREEING)
        if regime not in known:
            raise ValueError(f"regime is {regime!r}; it must be one of {known}")
        self.text, self.regime = text, regime
        self.random = np.random.default_rng([seed, known.index(regime)])
        self.tensors: dict[str, np.ndarray] = {}

    def normal(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> None:
        self.tensors[name] = self.random.normal(mean, std, shape).astype(np.float32)

    def linear(self, name: str, out: int, inputs: int, gain: float = 1.0) -> None:
        """Weight [out, in] that maps inputs of variance 1 to outputs of standard deviation `gain`."""
        self.normal(name, out, inputs, std=gain / math.sqrt(inputs))

    def norm(self, name: str, size: int) -> None:
        self.tensors[name] = self.random.uniform(0.5, 1.5, size).astype(np.float32)

    def hyper_connection(self, layer: str, part: str) -> None:
        streams, hidden = self.text["hc_mult"], self.text["hidden_size"]
        rows = (2 + streams) * streams
        self.linear(f"{layer}hc_{part}_fn", rows, streams * hidden)
        self.normal(f"{layer}hc_{part}_base", rows)
        self.tensors[f"{layer}hc_{part}_scale"] = self.random.uniform(0.5, 1.5, 3).astype(np.float32)

    def kda(self, prefix: str) -> None:
        hidden = self.text["hidden_size"]
        heads, dim, taps = kda_sizes(self.text)
        for part in "qkv":
            self.linear(f"{prefix}{part}_proj.weight", heads * dim, hidden)
            # Small values keep the output norm's epsilon in play: without it a query that happens to be
            # orthogonal to its only undecayed key turns into pure rounding noise of order 1. Tiny queries
            # and keys do the same for the epsilon of their l2 norms.
            std = 0.15 if part == "v" else 0.002 if self.regime == "weak" else 0.7
            self.normal(f"{prefix}{part}_conv1d.weight", heads * dim, 1, taps, std=std)
        for part in "fg":
            self.linear(f"{prefix}{part}_a_proj.weight", dim, hidden)
            self.linear(f"{prefix}{part}_b_proj.weight", heads * dim, dim, 1.5)
        self.linear(f"{prefix}b_proj.weight", heads, hidden, 1.5)
        self.normal(f"{prefix}A_log", heads, std=0.5)
        # sigmoid(exp(A_log) * (f + 25)) is 1 in float32, so g is the bound itself; with softplus g is near
        # -25 a token.
        mean = {"saturated": 25.0, "weak": -6.0}.get(self.regime, -4.0)
        self.normal(f"{prefix}dt_bias", heads * dim, mean=mean)
        self.norm(f"{prefix}o_norm.weight", dim)
        self.linear(f"{prefix}o_proj.weight", hidden, heads * dim, 1.5)

    def mla(self, prefix: str, indexer: str) -> None:
        text = self.text
        hidden, q_rank, rank = text["hidden_size"], text["q_lora_rank"], text["kv_lora_rank"]
        heads, qk, v = text["num_attention_heads"], text["qk_nope_head_dim"], text["v_head_dim"]
        self.linear(f"{prefix}q_a_proj.weight", q_rank, hidden)
        self.norm(f"{prefix}q_a_layernorm.weight", q_rank)
        self.linear(f"{prefix}q_b_proj.weight", heads * qk, q_rank, 1.5)
        self.linear(f"{prefix}kv_a_proj_with_mqa.weight", rank, hidden)
        self.norm(f"{prefix}kv_a_layernorm.weight", rank)
        self.linear(f"{prefix}kv_b_proj.weight", heads * (qk + v), rank, 1.5)
        self.linear(f"{prefix}o_proj.weight", hidden, heads * v, 2.0)
        if text["attention_bias"]:
            for name, size in (("q_a_proj", q_rank), ("kv_a_proj_with_mqa", rank), ("o_proj", hidden)):
                self.normal(f"{prefix}{name}.bias", size, std=0.5)
        if indexer == "shared":
            return
        index_heads, dim = text["index_n_heads"], text["index_head_dim"]
        prefix += "indexer."
        self.linear(f"{prefix}wq_b.weight", index_heads * dim, q_rank, 1.5)
        # In one regime the variance of an index key is near the epsilon of its norm.
        self.linear(f"{prefix}wk.weight", dim, hidden, 0.002 if self.regime == "ties" else 1.0)
        self.norm(f"{prefix}k_norm.weight", dim)
        self.normal(f"{prefix}k_norm.bias", dim, std=0.5)
        self.linear(f"{prefix}weights_proj.weight", index_heads, hidden)
        self.normal(f"{prefix}index_kpool_compress_ape", text["index_kpool"], dim)
        self.linear(f"{prefix}index_kpool_compress_gate", dim, hidden, 1.5)
        if self.regime == "ties":
            # Keys near one direction that only one head's query can meet: ReLU makes most scores exactly 0.
            self.tensors[f"{prefix}k_norm.weight"] *= 0.3
            self.normal(f"{prefix}k_norm.bias", dim, std=1.5)

    def swiglu(self, prefix: str, intermediate: int) -> None:
        hidden = self.text["hidden_size"]
        gain = 4.0 if self.regime == "large" else 2.0
        self.linear(f"{prefix}gate_proj.weight", intermediate, hidden, gain)
        self.linear(f"{prefix}up_proj.weight", intermediate, hidden, gain)
        self.linear(f"{prefix}down_proj.weight", hidden, intermediate, 1.0 / gain)

    def moe(self, prefix: str) -> None:
        text = self.text
        experts, intermediate = text["n_routed_experts"], text["moe_intermediate_size"]
        self.linear(f"{prefix}gate.weight", experts, text["hidden_size"], 1.5)
        self.normal(f"{prefix}gate.e_score_correction_bias", experts, std=0.5)
        for expert in range(experts):
            self.swiglu(f"{prefix}experts.{expert}.", intermediate)
        self.swiglu(f"{prefix}shared_experts.", intermediate * text["n_shared_experts"])

    def block_norms(self, layer: str) -> None:
        self.norm(f"{layer}input_layernorm.weight", self.text["hidden_size"])
        self.norm(f"{layer}post_attention_layernorm.weight", self.text["hidden_size"])

    def text_model(self) -> None:
        text = self.text
        hidden, vocabulary = text["hidden_size"], text["vocab_size"]
        self.normal(f"{TEXT}embed_tokens.weight", vocabulary, hidden)
        if self.regime == "weak":
            # A direction common to all tokens makes all keys of a head nearly parallel.
            self.tensors[f"{TEXT}embed_tokens.weight"] += self.random.normal(0, 3.0, hidden).astype(
                np.float32
            )
        for index, kind in enumerate(text["layer_types"]):
            layer = f"{TEXT}layers.{index}."
            self.block_norms(layer)
            self.hyper_connection(layer, "attn")
            self.hyper_connection(layer, "ffn")
            if kind == "linear_attention":
                self.kda(f"{layer}self_attn.")
            else:
                self.mla(f"{layer}self_attn.", text["indexer_types"][index])
            if text["mlp_layer_types"][index] == "dense":
                self.swiglu(f"{layer}mlp.", text["intermediate_size"])
            else:
                self.moe(f"{layer}mlp.")
        self.norm(f"{TEXT}norm.weight", hidden)
        self.linear("lm_head.weight", vocabulary, hidden, 3.0)

    def mtp(self) -> None:
        hidden = self.text["hidden_size"]
        layer = f"{TEXT}layers.{self.text['num_hidden_layers']}."
        self.block_norms(layer)
        self.norm(f"{layer}enorm.weight", hidden)
        self.norm(f"{layer}hnorm.weight", hidden)
        self.linear(f"{layer}eh_proj.weight", hidden, 2 * hidden)
        self.mla(f"{layer}self_attn.", "full")
        self.moe(f"{layer}mlp.")
        self.norm(f"{layer}shared_head.norm.weight", hidden)

    def agree(self) -> None:
        """Makes both heads little more than the same function of the newest token."""
        hidden = self.text["hidden_size"]
        for name, value in self.tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value *= 0.06
        layer = f"{TEXT}layers.{self.text['num_hidden_layers']}."
        eh_proj = self.tensors[f"{layer}eh_proj.weight"]
        eh_proj[:, :hidden] = np.eye(hidden)
        eh_proj[:, hidden:] *= 0.06
        self.tensors[f"{layer}enorm.weight"][:] = 1.0
        self.tensors[f"{layer}shared_head.norm.weight"] = self.tensors[f"{TEXT}norm.weight"].copy()

    def vision(self, vision: dict[str, Any]) -> None:
        hidden, out = vision["hidden_size"], vision["out_hidden_size"]
        inner, projection = vision["intermediate_size"], vision["projection_intermediate_size"]
        head_dim = hidden // vision["num_heads"]
        patch = (
            vision["in_channels"],
            vision["temporal_patch_size"],
            vision["patch_size"],
            vision["patch_size"],
        )
        shapes: dict[str, tuple[int, ...]] = {
            "patch_embed.proj.weight": (hidden, *patch),
            "patch_embed.proj.bias": (hidden,),
            "post_layernorm.weight": (hidden,),
            "downsample.weight": (out, hidden, vision["spatial_merge_size"], vision["spatial_merge_size"]),
            "downsample.bias": (out,),
            "merger.proj.weight": (out, out),
            "merger.post_projection_norm.weight": (out,),
            "merger.post_projection_norm.bias": (out,),
            "merger.gate_proj.weight": (projection, out),
            "merger.up_proj.weight": (projection, out),
            "merger.down_proj.weight": (out, projection),
        }
        for block in range(vision["depth"]):
            prefix = f"blocks.{block}."
            shapes |= {
                f"{prefix}norm1.weight": (hidden,),
                f"{prefix}norm2.weight": (hidden,),
                f"{prefix}attn.qkv.weight": (3 * hidden, hidden),
                f"{prefix}attn.qkv.bias": (3 * hidden,),
                f"{prefix}attn.proj.weight": (hidden, hidden),
                f"{prefix}attn.proj.bias": (hidden,),
                f"{prefix}attn.q_norm.weight": (head_dim,),
                f"{prefix}attn.k_norm.weight": (head_dim,),
                f"{prefix}mlp.gate_proj.weight": (inner, hidden),
                f"{prefix}mlp.gate_proj.bias": (inner,),
                f"{prefix}mlp.up_proj.weight": (inner, hidden),
                f"{prefix}mlp.up_proj.bias": (inner,),
                f"{prefix}mlp.down_proj.weight": (hidden, inner),
                f"{prefix}mlp.down_proj.bias": (hidden,),
            }
        for name, shape in shapes.items():
            self.normal(VISUAL + name, *shape, std=0.2)


def random_checkpoint(config: dict[str, Any], seed: int, regime: str = "plain") -> dict[str, np.ndarray]:
    """Tensors {on-disk name: array} of a random checkpoint for a config.json dictionary.

    Arrays are bfloat16 and float32 exactly where the released (unquantised) checkpoint's are; the MTP
    layer and the vision tower are included when the configuration has them.
    """
    draw = _Draw(config["text_config"], seed, regime)
    draw.text_model()
    if config["text_config"]["num_nextn_predict_layers"]:
        draw.mtp()
    if regime == AGREEING:
        draw.agree()
    if config.get("vision_config"):
        draw.vision(config["vision_config"])
    return {
        name: value if name.endswith(FLOAT32_SUFFIXES) else value.astype(ml_dtypes.bfloat16)
        for name, value in draw.tensors.items()
    }


def _is_fp8(name: str, tensors: dict[str, np.ndarray]) -> bool:
    """Whether the released checkpoint has it in fp8: MLP and MLA matrices, but not kv_b or the indexer."""
    if not name.startswith(TEXT) or not name.endswith(".weight"):
        return False
    module = name.removesuffix(".weight")
    if module.endswith(FP8_PROJECTIONS):
        return True
    attention = module.removesuffix("o_proj")
    return module.endswith("self_attn.o_proj") and f"{attention}kv_b_proj.weight" in tensors


def quantized_twins(
    tensors: dict[str, np.ndarray], seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The same checkpoint in the released fp8 layout, and its dequantised twin (those weights in float32).

    The scales are not powers of two, so that the product value * scale really rounds; the twin is computed
    here element by element, W[i, j] = value[i, j] * scale[i // 128, j // 128] in float32.
    """
    random = np.random.default_rng(seed)
    quantized, dequantized = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not _is_fp8(name, tensors):
            continue
        full = weight.astype(np.float32)
        rows, columns = (-(-size // BLOCK) for size in full.shape)
        scales = np.empty((rows, columns), np.float32)
        for i in range(rows):
            for j in range(columns):
                tile = full[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                scales[i, j] = np.abs(tile).max() / 448.0 * random.uniform(1.0, 1.5)
        spread = scales.repeat(BLOCK, 0).repeat(BLOCK, 1)[: full.shape[0], : full.shape[1]]
        values = (full / spread).astype(ml_dtypes.float8_e4m3fn)
        quantized[name] = values
        quantized[f"{name}_scale_inv"] = scales
        dequantized[name] = values.astype(np.float32) * spread
    return quantized, dequantized


QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.f_a_proj"],
}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes one .safetensors file: 8 bytes of header length, the JSON header, the raw little-endian data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + value.nbytes],
        }
        offset += value.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def write_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 2
) -> Path:
    """Writes a Hugging Face folder: config.json, the shards and their index. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(value.dtype == ml_dtypes.float8_e4m3fn for value in tensors.values()):
        config = {**config, "quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    names = list(tensors)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        # Names go round robin over the shards, so that parts of one module lie in different files.
        part = {name: tensors[name] for name in names[shard::shards]}
        write_safetensors(folder / file, part)
        index |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=0)
    )
    return folder
