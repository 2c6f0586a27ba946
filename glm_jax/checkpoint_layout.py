"""Every tensor a checkpoint of a configuration holds: text parameters, block scales and the vision tower."""

from glm_jax.config import Config, VisionConfig
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import SCALE_SUFFIX, DiskDtype, ParameterSpec, block_grid, is_spec, named_leaves

VISION_PREFIX = "model.visual."
TensorDescription = tuple[tuple[int, ...], DiskDtype]


def checkpoint_tensors(config: Config) -> dict[str, TensorDescription]:
    """`{on-disk name: (shape, dtype)}` of a released checkpoint, MTP layer, scales and vision included.

    dtype is "F8_E4M3", "BF16" or "F32", as in a safetensors header. A weight is fp8 exactly when the name
    with `_scale_inv` appended is there too.
    """
    tensors: dict[str, TensorDescription] = {}
    for spec in named_leaves(abstract(config), is_spec).values():
        tensors.update(source_tensors(spec))
    if config.vision is not None:
        tensors.update(vision_tensors(config.vision))
    return tensors


def source_tensors(spec: ParameterSpec) -> dict[str, TensorDescription]:
    """The disk tensors one leaf is made of, its block scales included."""
    tensors: dict[str, TensorDescription] = {}
    for source in spec.sources:
        tensors[source.name] = (source.shape, spec.dtype)
        if spec.dtype == "F8_E4M3":
            tensors[source.name + SCALE_SUFFIX] = (block_grid(source.shape), "F32")
    return tensors


def vision_tensors(vision: VisionConfig) -> dict[str, TensorDescription]:
    """The tensors of the vision tower (MODEL.md b.9), all BF16."""
    hidden, width, out = vision.hidden_size, vision.intermediate_size, vision.out_hidden_size
    patch, merge, projection = (
        vision.patch_size,
        vision.spatial_merge_size,
        vision.projection_intermediate_size,
    )
    head_dim = hidden // vision.num_heads
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    shapes["patch_embed.proj.weight"] = (hidden, vision.in_channels, vision.temporal_patch_size, patch, patch)
    shapes["patch_embed.proj.bias"] = (hidden,)
    for index in range(vision.depth):
        block = f"blocks.{index}."
        shapes[f"{block}norm1.weight"] = shapes[f"{block}norm2.weight"] = (hidden,)
        linear(f"{block}attn.qkv", 3 * hidden, hidden, vision.attention_bias)
        linear(f"{block}attn.proj", hidden, hidden, vision.attention_bias)
        shapes[f"{block}attn.q_norm.weight"] = shapes[f"{block}attn.k_norm.weight"] = (head_dim,)
        linear(f"{block}mlp.gate_proj", width, hidden, vision.attention_bias)
        linear(f"{block}mlp.up_proj", width, hidden, vision.attention_bias)
        linear(f"{block}mlp.down_proj", hidden, width, vision.attention_bias)
    shapes["post_layernorm.weight"] = (hidden,)
    shapes["downsample.weight"] = (out, hidden, merge, merge)
    shapes["downsample.bias"] = (out,)
    linear("merger.proj", out, out, bias=False)
    shapes["merger.post_projection_norm.weight"] = shapes["merger.post_projection_norm.bias"] = (out,)
    linear("merger.gate_proj", projection, out, bias=False)
    linear("merger.up_proj", projection, out, bias=False)
    linear("merger.down_proj", out, projection, bias=False)
    return {VISION_PREFIX + name: (shape, "BF16") for name, shape in shapes.items()}
