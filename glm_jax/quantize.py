"""Writes the fp8 twin of a checkpoint: `python -m glm_jax.quantize IN OUT`.

The weights that the released checkpoint keeps in fp8 are rounded to blocks of 128 x 128; all others stay as
they are.
"""

import argparse
import dataclasses
from collections.abc import Sequence

import jax

from glm_jax.config_schema import FP8_BLOCK
from glm_jax.loading import Model, load
from glm_jax.parameter_layers import abstract
from glm_jax.parameter_spec import ParameterSpec, is_spec
from glm_jax.quantization import BlockScaled, Weight, dequantize, quantize
from glm_jax.saving import save


def quantized(model: Model) -> Model:
    """The model with every weight that is fp8 in the released layout rounded to fp8 blocks."""

    compiled = jax.jit(quantize)  # one program a shape

    def leaf(spec: ParameterSpec, weight: Weight) -> Weight:
        return compiled(weight) if spec.block_scaled and not isinstance(weight, BlockScaled) else weight

    params = jax.tree.map(leaf, abstract(model.config), model.params, is_leaf=is_spec)
    return dataclasses.replace(
        model, params=params, config=dataclasses.replace(model.config, quantization=FP8_BLOCK)
    )


def dequantized(model: Model, dtype: str = "float32") -> Model:
    """The model with every fp8 weight multiplied out to `dtype`: the twin whose float32 logits are equal."""

    compiled = jax.jit(dequantize, static_argnums=1)

    def leaf(spec: ParameterSpec, weight: Weight) -> Weight:
        return compiled(weight, dtype) if isinstance(weight, BlockScaled) else weight

    params = jax.tree.map(leaf, abstract(model.config), model.params, is_leaf=is_spec)
    return dataclasses.replace(
        model, params=params, config=dataclasses.replace(model.config, quantization=None)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m glm_jax.quantize", description=__doc__)
    parser.add_argument("source", metavar="IN", help="a checkpoint folder, a Hub id or 'tiny'")
    parser.add_argument("target", metavar="OUT", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a checkpoint folder")
    options = parser.parse_args(arguments)
    save(quantized(load(options.source, dtype=None)), options.target, overwrite=options.overwrite)


if __name__ == "__main__":
    main()
