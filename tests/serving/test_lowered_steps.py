"""The engine's steps at the released model's widths, lowered for GPUs that need not be there.

At a branch or a loop whose end depends on data, the host of a GPU waits for the device: the next step could
not be dispatched while this one runs.
"""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.engine.model import cut_config, model_shapes
from glm_jax import cache as caches
from glm_jax import steps
from glm_jax.sampling import GrammarMask
from serving import batches
from serving.block_pool import BlockPool
from serving.engine_config import EngineConfig
from serving.memory_plan import geometry
from serving.prefix_cache import PrefixCache
from serving.scheduler import Scheduler
from serving.state_pool import StatePool
from tests.pallas_kernels import lowering

DRAFTS, BLOCKS, SLOTS = 1, 64, 16


def lowered(phase: str, platform: str) -> str:
    """StableHLO of a step of four layers: a dense one, KDA, MLA and experts are among them."""
    config = cut_config(4)
    params = model_shapes(config)
    limits = EngineConfig(
        max_model_len=2048, max_num_seqs=4, num_gpu_blocks_override=BLOCKS, num_state_slots_override=SLOTS,
        speculative_config={"method": "mtp", "num_speculative_tokens": DRAFTS},
    )  # fmt: skip
    sizes = geometry(params, limits, BLOCKS, SLOTS)
    cache = jax.eval_shape(partial(caches.create, config, **sizes))
    pools = PrefixCache(BlockPool(BLOCKS), StatePool(SLOTS), 64, spacing=2048)
    scheduler = Scheduler(limits, pools, max_model_len=2048, window=DRAFTS + 1)
    if phase == "prefill":
        program, width = steps.prefill, 1
        batch = batches.prefill_batch((), scheduler, 256)
    else:
        program, width = steps.decode, DRAFTS + 1
        batch = batches.decode_batch((), scheduler, 4)
    words = np.zeros((batch.request_slots.shape[0], width, config.vocab_size // 32), np.uint32)
    batch = dataclasses.replace(batch, grammar=GrammarMask(words, np.zeros((), bool)))

    def step(params, cache, batch):
        return program(params, config, cache, batch, implementation="triton")

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return lowering.lower(step, (params, cache, shapes), platform)


def data_dependent(text: str) -> list[str]:
    """Branches and loops of a StableHLO text that its constants do not decide."""
    found = [line for line in text.splitlines() if "stablehlo.while" in line or "stablehlo.if" in line]
    for function in text.split("func.func")[1:]:
        decided = set(re.findall(r"(%c\w*) = stablehlo.constant", function))
        for name, operand in re.findall(r'(%\w+)(?::\d+)? = "stablehlo.case"\((%\w+)\)', function):
            if operand in decided:
                decided.add(name)  # a branch index that platforms decide
            else:
                found.append(f"{name} = case({operand})")
    return found


def test_what_counts_as_data_dependent() -> None:
    def branches(x):
        return jax.lax.cond(x[0] > 0, lambda x: x + 1, lambda x: x - 1, x)

    def loops(x):
        return jax.lax.while_loop(lambda x: x[0] > 0, lambda x: x - 1, x)

    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert len(data_dependent(lowering.lower(branches, (x,), "cuda"))) == 1
    assert len(data_dependent(lowering.lower(loops, (x,), "cuda"))) == 1


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_no_step_makes_the_host_wait(phase: str, platform: str) -> None:
    text = lowered(phase, platform)
    assert text.count("triton") > 10
    assert data_dependent(text) == []
