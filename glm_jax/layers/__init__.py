"""Per-token layer mathematics: what a layer computes before and after its sequence operation.

A layer's tokens lie on one flat axis `[tokens, hidden]`; the caller (`glm_jax.whole_sequence` or
`glm_jax.paged`) owns the sequence part: convolution, recurrence, cache and attention. Head counts are
read from the parameters' shapes, never from the configuration, so that a shard of the heads under
`shard_map` runs the same code.
"""
