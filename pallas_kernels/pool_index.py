"""The k-pool indexer: which pools of `kpool` consecutive tokens a query may attend to.

Token t belongs to pool t // kpool, at slot t % kpool. A pool has one key once its last token is known, and
is visible to the queries from that token on. Every query scores its visible pools, keeps the best, and
always sees the tokens of the pool that is still open (the tail). Ties go to the lowest pool, with -0.0
equal to +0.0: ReLU makes them common.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import pool_index_kernel
from pallas_kernels.dispatch import resolve

_TILE_BYTES = 64 * 2**20


def pool_keys(keys: jax.Array, gates: jax.Array, ape: jax.Array) -> jax.Array:
    """One key for each pool: a mean weighted by a softmax over the slots, for every channel by itself.

    keys, gates: [..., kpool, dim]; ape: [kpool, dim], added to the gates. Returns [..., dim] in keys.dtype,
    computed in at least float32.
    """
    accumulate = jnp.promote_types(keys.dtype, jnp.float32)
    weights = jax.nn.softmax(gates.astype(accumulate) + ape.astype(accumulate), axis=-2)
    return (weights * keys.astype(accumulate)).sum(axis=-2).astype(keys.dtype)


def score_pools(q: jax.Array, head_weights: jax.Array, pooled: jax.Array) -> jax.Array:
    """sum over heads of head_weights * relu(dim**-0.5 * q . pooled), with -0.0 made +0.0.

    q: [..., tokens, heads, dim]; head_weights: [..., tokens, heads], the factor heads**-0.5 included;
    pooled: [..., pools, dim]. Returns [..., tokens, pools], at least float32. Holds [tile, heads, pools]
    for one tile of tokens at a time.
    """
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    batch = q.shape[:-3]
    tokens, heads, _ = q.shape[-3:]
    pools = pooled.shape[-2]
    query_bytes = max(1, heads * pools * jnp.dtype(accumulate).itemsize)
    for size in batch:
        query_bytes *= max(1, size)
    tile = max(1, min(tokens, _TILE_BYTES // query_bytes))
    if tile >= tokens:
        return _score(q, head_weights, pooled)
    tiles = -(-tokens // tile)
    padding = tiles * tile - tokens

    def tiled(x: jax.Array, trailing: int) -> jax.Array:
        padded = jnp.pad(x, [(0, 0)] * len(batch) + [(0, padding)] + [(0, 0)] * trailing)
        return jnp.moveaxis(padded.reshape(*batch, tiles, tile, *x.shape[len(batch) + 1 :]), len(batch), 0)

    scores = jax.lax.map(lambda xs: _score(xs[0], xs[1], pooled), (tiled(q, 2), tiled(head_weights, 1)))
    return jnp.moveaxis(scores, 0, len(batch)).reshape(*batch, tiles * tile, pools)[..., :tokens, :]


def _score(q: jax.Array, head_weights: jax.Array, pooled: jax.Array) -> jax.Array:
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    q, head_weights, pooled = (x.astype(accumulate) for x in (q, head_weights, pooled))
    dots = jnp.einsum("...thd,...pd->...thp", q, pooled, precision=highest)
    active = jax.nn.relu(dots * q.shape[-1] ** -0.5)
    scores = jnp.einsum("...thp,...th->...tp", active, head_weights, precision=highest)
    return jnp.where(scores == 0, 0, scores)


def select_pools(scores: jax.Array, counts: jax.Array, k: int) -> jax.Array:
    """The best min(k, counts) pools of every query, ascending by pool, the rest -1.

    scores: [..., tokens, pools]; counts: [..., tokens] int32, pools [0, counts) are candidates, whatever
    the others' scores hold. Ties go to the lowest pool; -0.0 equals +0.0. Returns [..., tokens, k] int32.
    """
    pools = scores.shape[-1]
    kept = min(k, pools)
    visible = jnp.arange(pools) < counts[..., None]
    canonical = jnp.where(scores == 0, 0, scores)
    # Pools outside the count rank behind every candidate: theirs is the lowest score, and the higher index.
    _, best = jax.lax.top_k(jnp.where(visible, canonical, -jnp.inf), kept)
    chosen = jnp.arange(kept) < counts[..., None]
    ascending = jnp.sort(jnp.where(chosen, best, pools).astype(jnp.int32), axis=-1)
    ids = jnp.where(ascending < pools, ascending, -1)
    return jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, k - kept)], constant_values=-1)


def select_paged(
    q: jax.Array,
    head_weights: jax.Array,
    pooled: jax.Array,
    layer: int | jax.Array,
    block_tables: jax.Array,
    row_of_token: jax.Array,
    counts: jax.Array,
    k: int,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Scores and selects the pools of every token from its own row's blocks.

    q: [tokens, heads, dim]; head_weights: [tokens, heads]; pooled: [layers, blocks, pools_per_block, dim];
    layer: an index, traced or not; block_tables: [rows, width] int32, -1 where unused; row_of_token:
    [tokens] int32, -1 for a padding token; counts: [tokens] int32, complete pools visible to the token, all
    within the row's blocks. Returns pool ids [tokens, k] int32 as `select_pools` does, all -1 for padding.
    """
    chosen = resolve(implementation, supported=pool_index_kernel.supported(q, pooled, k))
    arrays = (q, head_weights, pooled, layer, block_tables, row_of_token, counts)
    if chosen == "xla":
        return select_paged_reference(*arrays, k)
    return pool_index_kernel.select_paged(*arrays, k, interpret=chosen == "interpret")


def select_paged_reference(
    q: jax.Array,
    head_weights: jax.Array,
    pooled: jax.Array,
    layer: int | jax.Array,
    block_tables: jax.Array,
    row_of_token: jax.Array,
    counts: jax.Array,
    k: int,
) -> jax.Array:
    """`select_paged` in plain XLA: tiles of tokens, each gathering its row's pooled keys."""
    tokens, heads, dim = q.shape
    pools = block_tables.shape[1] * pooled.shape[2]
    itemsize = jnp.dtype(jnp.promote_types(q.dtype, jnp.float32)).itemsize
    tile = max(1, min(tokens, _TILE_BYTES // max(1, pools * (heads + dim) * itemsize)))
    counts = jnp.where(row_of_token >= 0, counts, 0)

    def select(tile_inputs: tuple[jax.Array, ...]) -> jax.Array:
        queries, weights, rows, visible = tile_inputs
        blocks = jnp.maximum(block_tables[jnp.maximum(rows, 0)], 0)
        keys = pooled[layer, blocks].reshape(blocks.shape[0], pools, dim)
        scores = _score(queries[:, None], weights[:, None], keys)[:, 0]
        return select_pools(scores, visible, k)

    inputs = (q, head_weights, row_of_token, counts)
    if tile >= tokens:
        return select(inputs)
    tiles = -(-tokens // tile)
    padding = tiles * tile - tokens
    padded = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in inputs)
    tiled = tuple(x.reshape(tiles, tile, *x.shape[1:]) for x in padded)
    return jax.lax.map(select, tiled).reshape(tiles * tile, k)[:tokens]


def expand_pools(ids: jax.Array, positions: jax.Array, kpool: int) -> jax.Array:
    """The tokens a query attends to: those of its chosen pools, then the tail up to itself.

    ids: [..., k] int32 pools, -1 for none; positions: [...] int32 absolute position of the query. Returns
    [..., k * kpool + kpool - 1] int32 token positions, -1 for none.
    """
    members = ids[..., None] * kpool + jnp.arange(kpool, dtype=jnp.int32)
    members = jnp.where(ids[..., None] >= 0, members, -1).reshape(*ids.shape[:-1], ids.shape[-1] * kpool)
    tail_start = kpool * ((positions + 1) // kpool)
    tail = tail_start[..., None] + jnp.arange(kpool - 1, dtype=jnp.int32)
    tail = jnp.where(tail <= positions[..., None], tail, -1)
    return jnp.concatenate([members, tail], axis=-1).astype(jnp.int32)


def physical_rows(
    token_ids: jax.Array, row_of_token: jax.Array, block_tables: jax.Array, block_size: int
) -> jax.Array:
    """Rows of the flattened cache for token positions.

    token_ids: [tokens, width] int32, -1 for none; row_of_token: [tokens] int32, -1 for padding;
    block_tables: [rows, blocks] int32, -1 where unused. Returns [tokens, width] int32; -1 for none, for
    padding, and wherever the table names no block.
    """
    rows = row_of_token[:, None]
    named = (token_ids >= 0) & (rows >= 0)
    column = jnp.where(named, token_ids // block_size, 0)
    block = block_tables.at[jnp.maximum(rows, 0), column].get(mode="fill", fill_value=-1)
    return jnp.where(named & (block >= 0), block * block_size + token_ids % block_size, -1).astype(jnp.int32)


def write_pools(
    ring: jax.Array,
    pooled: jax.Array,
    layer: int | jax.Array,
    keys: jax.Array,
    gates: jax.Array,
    ape: jax.Array,
    row_of_token: jax.Array,
    positions: jax.Array,
    row_starts: jax.Array,
    request_slots: jax.Array,
    block_tables: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Stores the key of every pool this batch closes, then the batch's raw keys and gates in the rings.

    ring: [layers, slots, ring_rows, 2, dim], key then gate, row = position % ring_rows, ring_rows >= kpool;
    pooled: [layers, blocks, pools_per_block, dim]; keys, gates: [tokens, dim]; ape: [kpool, dim];
    row_of_token: [tokens] int32, -1 for padding, a row's tokens side by side; positions: [tokens] int32
    absolute, consecutive within a row; row_starts: [rows] int32 absolute position of the row's first token
    in this batch; request_slots: [rows] int32; block_tables: [rows, width] int32, -1 where unused. Returns
    (ring, pooled). A pool's members come from this batch where they are in it, else from the ring as it was
    before. Of positions that share a ring row the latest stays. Padding writes nothing; a pool whose block
    the table does not name is dropped.
    """
    tokens = keys.shape[0]
    kpool = ape.shape[0]
    ring_rows = ring.shape[2]
    pools_per_block = pooled.shape[2]
    if ring_rows < kpool:
        raise ValueError(f"a ring of {ring_rows} rows cannot hold an open pool of {kpool} tokens")
    real = row_of_token >= 0
    rows = jnp.maximum(row_of_token, 0)
    slots = request_slots[rows]

    age = jnp.arange(kpool - 1, -1, -1, dtype=jnp.int32)
    member_positions = positions[:, None] - age
    in_batch = member_positions >= row_starts[rows][:, None]
    source = jnp.maximum(jnp.arange(tokens, dtype=jnp.int32)[:, None] - age, 0)
    stored = ring[layer, jnp.maximum(slots, 0)[:, None], member_positions % ring_rows]
    member_keys = jnp.where(in_batch[..., None], keys[source], stored[:, :, 0].astype(keys.dtype))
    member_gates = jnp.where(in_batch[..., None], gates[source], stored[:, :, 1].astype(gates.dtype))
    closed = pool_keys(member_keys, member_gates, ape)

    closes = real & (positions % kpool == kpool - 1)
    column = positions // (pools_per_block * kpool)
    block = block_tables.at[rows, column].get(mode="fill", fill_value=-1)
    block = jnp.where(closes & (block >= 0), block, pooled.shape[1])
    pool = positions // kpool % pools_per_block
    pooled = pooled.at[layer, block, pool].set(closed.astype(pooled.dtype), mode="drop")

    # A row's tokens are side by side, so a later token on the same ring row is exactly ring_rows further on.
    overwritten_by = jnp.pad(row_of_token, (0, ring_rows), constant_values=-1)[ring_rows:]
    stays = real & (slots >= 0) & (overwritten_by != row_of_token)
    slot = jnp.where(stays, slots, ring.shape[1])
    entries = jnp.stack([keys, gates.astype(keys.dtype)], axis=1).astype(ring.dtype)
    return ring.at[layer, slot, positions % ring_rows].set(entries, mode="drop"), pooled
