"""Writes the trained parameters as a Hugging Face folder: `python -m benchmarks.tiny.export --run runs/tiny`.

Names, orientation ([out, in]) and dtypes are those of the released checkpoint (MODEL.md b), bfloat16 except
its float32 islands. The folder's README is written by hand and left alone.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.tiny.documents import TEMPLATE_PATH
from benchmarks.tiny.shape import MLA_PERIOD, Shape, hugging_face_config
from benchmarks.tiny.state_files import load_shape, load_state
from benchmarks.tiny.tokenizer import EOS_TOKENS, PAD_TOKEN, SPECIAL_TOKENS, VISIBLE_TOKENS

DESTINATION = Path(__file__).parents[2] / "glm_jax" / "checkpoints" / "tiny"
FLOAT32_ENDINGS = ("_base", "_scale", "A_log", "dt_bias", "e_score_correction_bias")

HostParams = dict[str, np.ndarray]


def checkpoint_tensors(params: HostParams, s: Shape) -> dict[str, np.ndarray]:
    """On-disk name -> array, float32 islands kept and everything else rounded to bfloat16."""
    tensors = {
        "model.language_model.embed_tokens.weight": params["embed"],
        "model.language_model.norm.weight": params["norm"],
        "lm_head.weight": params["head"],
    }
    for layer in range(s.num_layers):
        prefix = f"model.language_model.layers.{layer}."
        for half, name in enumerate(("attn", "ffn")):
            for part in ("fn", "base", "scale"):
                tensors[f"{prefix}hc_{name}_{part}"] = params[f"hc.{part}"][layer, half]
        tensors |= _layer_norms(prefix, params["layer_norm"][layer])
        group, place = divmod(layer, MLA_PERIOD)
        if place == MLA_PERIOD - 1:
            tensors |= _mla(prefix, params, group)
        else:
            tensors |= _kda(prefix, params, group * (MLA_PERIOD - 1) + place, s)
        if layer == 0:
            tensors |= _mlp(prefix + "mlp.", *(params[f"dense.{part}"] for part in ("gate", "up", "down")))
        else:
            tensors |= _moe(prefix, params, layer, s)
    prefix = f"model.language_model.layers.{s.num_layers}."
    tensors |= _layer_norms(prefix, params["mtp.layer_norm"])
    tensors |= _mla(prefix, params, s.groups) | _moe(prefix, params, s.num_layers, s)
    tensors |= {
        f"{prefix}enorm.weight": params["mtp.e_norm"],
        f"{prefix}hnorm.weight": params["mtp.h_norm"],
        f"{prefix}eh_proj.weight": params["mtp.eh"].T,
        f"{prefix}shared_head.norm.weight": params["mtp.norm"],
    }
    return {name: _disk_dtype(name, tensor) for name, tensor in tensors.items()}


def _disk_dtype(name: str, tensor: np.ndarray) -> np.ndarray:
    dtype = np.float32 if name.endswith(FLOAT32_ENDINGS) else ml_dtypes.bfloat16
    return np.ascontiguousarray(tensor.astype(dtype))


def _layer_norms(prefix: str, norms: np.ndarray) -> HostParams:
    return {f"{prefix}input_layernorm.weight": norms[0], f"{prefix}post_attention_layernorm.weight": norms[1]}


def _kda(prefix: str, params: HostParams, i: int, s: Shape) -> HostParams:
    at = prefix + "self_attn."
    inner = s.kda_heads * s.kda_head_dim
    tensors = {
        f"{at}{name}_proj.weight": params[f"kda.{name}"][i].T
        for name in ("q", "k", "v", "f_a", "f_b", "g_a", "g_b")
    }
    for part, name in enumerate("qkv"):
        taps = params["kda.conv"][i][:, part * inner : (part + 1) * inner]
        tensors[f"{at}{name}_conv1d.weight"] = taps.T[:, None, :]
    tensors |= {
        f"{at}b_proj.weight": params["kda.beta"][i].T,
        f"{at}A_log": params["kda.A_log"][i],
        f"{at}dt_bias": params["kda.dt_bias"][i],
        f"{at}o_norm.weight": params["kda.o_norm"][i],
        f"{at}o_proj.weight": params["kda.o"][i].T,
    }
    return tensors


def _mla(prefix: str, params: HostParams, i: int) -> HostParams:
    at = prefix + "self_attn."
    return {
        f"{at}q_a_proj.weight": params["mla.q_a"][i].T,
        f"{at}q_a_layernorm.weight": params["mla.q_norm"][i],
        f"{at}q_b_proj.weight": params["mla.q_b"][i].T,
        f"{at}kv_a_proj_with_mqa.weight": params["mla.kv_a"][i].T,
        f"{at}kv_a_layernorm.weight": params["mla.kv_norm"][i],
        f"{at}kv_b_proj.weight": params["mla.kv_b"][i].T,
        f"{at}o_proj.weight": params["mla.o"][i].T,
        f"{at}indexer.wq_b.weight": params["index.q"][i].T,
        f"{at}indexer.wk.weight": params["index.k"][i].T,
        f"{at}indexer.k_norm.weight": params["index.k_norm"][i],
        f"{at}indexer.k_norm.bias": params["index.k_bias"][i],
        f"{at}indexer.weights_proj.weight": params["index.weights"][i].T,
        f"{at}indexer.index_kpool_compress_ape": params["index.ape"][i],
        f"{at}indexer.index_kpool_compress_gate": params["index.gate"][i].T,
    }


def _mlp(prefix: str, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> HostParams:
    return {f"{prefix}{name}_proj.weight": w.T for name, w in (("gate", gate), ("up", up), ("down", down))}


def _moe(prefix: str, params: HostParams, i: int, s: Shape) -> HostParams:
    at = prefix + "mlp."
    tensors = {
        f"{at}gate.weight": params["moe.router"][i].T,
        f"{at}gate.e_score_correction_bias": params["moe.bias"][i],
    }
    tensors |= _mlp(f"{at}shared_experts.", *(params[f"shared.{part}"][i] for part in ("gate", "up", "down")))
    for expert in range(s.num_experts):
        weights = (params[f"moe.{part}"][i, expert] for part in ("gate", "up", "down"))
        tensors |= _mlp(f"{at}experts.{expert}.", *weights)
    return tensors


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "TokenizersBackend",
        "model_max_length": 1048576,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": EOS_TOKENS[0],
        "pad_token": PAD_TOKEN,
        "extra_special_tokens": [token for token in SPECIAL_TOKENS if token not in VISIBLE_TOKENS],
    }


def export(params: HostParams, s: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Every file of the checkpoint but its README."""
    folder.mkdir(parents=True, exist_ok=True)
    special_ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    eos_ids = [special_ids[token] for token in EOS_TOKENS]
    generation = {
        "eos_token_id": eos_ids,
        "pad_token_id": eos_ids[0],
        "temperature": 1.0,
        "top_p": 0.95,
        "do_sample": True,
    }
    documents = {
        "config.json": hugging_face_config(s, special_ids, eos_ids),
        "generation_config.json": generation,
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    shutil.copyfile(TEMPLATE_PATH, folder / "chat_template.jinja")
    save_file(checkpoint_tensors(params, s), folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--to", type=Path, default=DESTINATION)
    args = parser.parse_args()
    params = {name: np.asarray(value) for name, value in load_state(args.run)[0].items()}
    export(params, load_shape(args.run), Tokenizer.from_file(str(args.run / "tokenizer.json")), args.to)
    size = sum(file.stat().st_size for file in args.to.iterdir())
    print(f"{args.to}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
