"""Greedy generation by the two compiled steps, without the engine: whole prompts, then decode windows."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import glm_jax
from glm_jax import cache as caches
from glm_jax import steps
from glm_jax.sampling import SamplingRows

BLOCK = 16

_prefill = partial(jax.jit, static_argnums=(1,), donate_argnums=(2,))(
    partial(steps.prefill, implementation="xla")
)
_decode = partial(jax.jit, static_argnums=(1,), donate_argnums=(2,))(
    partial(steps.decode, implementation="xla")
)


@dataclass(frozen=True)
class Drafted:
    """Drafts made for one request: `sequence` are the tokens committed by then, the newest included."""

    sequence: list[int]
    drafts: list[int]


def greedy(
    model: glm_jax.Model, prompts: list[list[int]], new_tokens: int, drafts: int
) -> tuple[list[list[int]], list[list[Drafted]], list[int]]:
    """Continues all prompts in one batch: -> answers, drafts made per request, accepted counts."""
    config, params = model.config, model.params
    rows = len(prompts)
    longest = max(map(len, prompts)) + new_tokens + drafts + 1
    per_row = -(-longest // BLOCK)
    cache = caches.create(
        config,
        fill=np.nan,
        num_blocks=rows * per_row,
        block_size=BLOCK,
        num_state_slots=rows,
        num_request_slots=rows,
        drafts=drafts,
        dtype=params.embed_tokens.dtype,
    )
    ids = jnp.arange(rows, dtype=jnp.int32)
    none = jnp.full(rows, -1, jnp.int32)
    tables = jnp.arange(rows * per_row, dtype=jnp.int32).reshape(rows, per_row)
    limits = jnp.full(rows, longest, jnp.int32)
    sampling = SamplingRows(
        temperature=jnp.zeros(rows, jnp.float32),
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=jnp.ones(rows, jnp.float32),
        min_p=jnp.zeros(rows, jnp.float32),
        seeds=jnp.zeros(rows, jnp.uint32),
        choices=jnp.zeros(rows, jnp.int32),
        repetition=jnp.ones(rows, jnp.float32),
        frequency=jnp.zeros(rows, jnp.float32),
        presence=jnp.zeros(rows, jnp.float32),
        ends_from=jnp.zeros(rows, jnp.int32),
        processed=jnp.zeros(rows, bool),
    )
    lengths = np.array([len(prompt) for prompt in prompts])
    out, cache = _prefill(
        params,
        config,
        cache,
        steps.PrefillBatch(
            tokens=jnp.asarray(np.concatenate(prompts), jnp.int32),
            next_tokens=jnp.asarray(np.concatenate([[*prompt[1:], -1] for prompt in prompts]), jnp.int32),
            row_of_token=jnp.asarray(np.repeat(np.arange(rows), lengths), jnp.int32),
            positions=jnp.asarray(np.concatenate([np.arange(n) for n in lengths]), jnp.int32),
            cu_seqlens=jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32),
            row_starts=jnp.zeros(rows, jnp.int32),
            block_tables=tables,
            state_slots=ids,
            initial_slots=none,
            snapshot_after=jnp.zeros((rows, 0), jnp.int32),
            snapshot_slots=jnp.zeros((rows, 0), jnp.int32),
            request_slots=ids,
            sample=jnp.ones(rows, bool),
            limits=limits,
            sampling=sampling,
        ),
    )
    batch = steps.DecodeBatch(
        block_tables=tables,
        state_slots=ids,
        request_slots=ids,
        limits=limits,
        publish_positions=none,
        publish_slots=none,
        sampling=sampling,
    )
    answers: list[list[int]] = [[] for _ in prompts]
    drafted: list[list[Drafted]] = [[] for _ in prompts]
    accepted: list[int] = []
    while True:
        tokens, counts = np.asarray(out.tokens), np.asarray(out.counts)
        windows = np.asarray(cache.rows.tokens)
        for row, answer in enumerate(answers):
            answer += tokens[row, : counts[row]].tolist()
            # A row that ran ahead of the others stops at the cache's end, and so do its drafts.
            if counts[row] > 0 and lengths[row] + len(answer) + drafts <= longest:
                drafted[row].append(Drafted(prompts[row] + answer, windows[row, 1:].tolist()))
        if min(map(len, answers)) >= new_tokens:
            return [answer[:new_tokens] for answer in answers], drafted, accepted
        out, cache = _decode(params, config, cache, batch)
        accepted += np.asarray(out.counts).tolist()
