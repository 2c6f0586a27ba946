"""The rules of the engine, one by one (docs/ENGINE.md lists all tests that hold each).

Over the fake device, which fails on any read of a stale, foreign or missing row or state. The same rules with
the real model: `tests/float64/test_rules.py`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax import cache as caches
from glm_jax import steps
from glm_jax.collectives import argmax_last
from glm_jax.errors import RequestError
from glm_jax.layers.kda import kda_inputs, split_qkv
from glm_jax.layers.mla import index_inputs, mla_inputs
from glm_jax.layers.mlp import route
from glm_jax.layers.norms import rms_norm
from glm_jax.sampling_params import SamplingParams
from pallas_kernels.hyper_connection import hyper_connection_pre
from pallas_kernels.pool_index import score_pools, select_pools
from serving import batches
from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.scheduler import MAX_PREFILL_ROWS
from tests.random_models import random_params, small_config
from tests.serving.cache_audit import audit, published_boundaries
from tests.serving.fake_device import answer_to
from tests.serving.test_edges import made_for, run
from tests.serving.test_engine import GREEDY, assert_idle, engine
from tests.serving.tiny_text import weightless_model

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


# --- 1: every run gives the tokens of a plain one ------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_rule_1_every_run_gives_the_tokens_of_a_plain_one(drafts: int, ahead: bool) -> None:
    """Cached, chunked, batched, drafted and preempted at once, greedy and sampled; what a plain run gives is
    known by definition."""
    made, device = made_for(
        drafts,
        ahead,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=17,
        max_model_len=120,
        max_num_seqs=3,
    )
    device.right = 0.5
    shared = list(range(33))
    sampled = SamplingParams(n=2, seed=5, max_tokens=40, ignore_eos=True)
    asked = []
    for turn in range(3):
        asked += [(made.submit([*shared, turn], LONG), 0), (made.submit(shared[: 20 + turn], sampled), 6)]
        for _ in range(12):
            made.step()
    run(made)
    for request, seed in asked:
        for answer in request.answers:
            assert answer.token_ids == answer_to(request.prompt_token_ids, 40, seed=seed + answer.index)
    stats = made.stats()
    assert stats["preemptions"] and stats["prefix_cache_hits"]
    assert bool(stats["accepted_draft_tokens"]) == (drafts > 0)
    assert_idle(made)


# --- 2: one boundary with every leg --------------------------------------------------------------------


def test_rule_2_a_hit_leaves_a_token_to_run() -> None:
    """At most length - 1, decided before rounding: a prompt that ends on a boundary reads one block less."""
    for length, hit in ((15, 8), (16, 8), (17, 16), (24, 16), (25, 24)):
        made, _ = engine(snapshot_spacing=8)
        made.submit(list(range(40)), GREEDY)
        run(made)
        request = made.submit(list(range(length)), GREEDY)
        run(made)
        assert request.cached_tokens["device"] == hit
        assert request.token_ids == answer_to(range(length), 5)


@pytest.mark.parametrize(
    ("leg", "depth", "hit"),
    [("state", 4, 24), ("state", 3, 32), ("block", 4, 24), ("block", 2, 8), ("block", 1, 0), ("both", 4, 24)],
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_rule_2_a_missing_leg_shortens_the_hit(drafts: int, leg: str, depth: int, hit: int) -> None:
    """`depth`: which block, or the snapshot behind it, is gone. Cached to 40, asked with 39 tokens."""
    made, _ = made_for(drafts, True, snapshot_spacing=8)
    prompt = list(range(39))
    first = made.submit(prompt, GREEDY)
    run(made)
    content = made._cache.hashes(first.answers[0], 4)[depth - 1]
    if leg in ("state", "both"):
        made._cache.states.drop(content)
    if leg in ("block", "both"):
        block = made._cache.blocks.find(content)
        assert block is not None
        made._cache.blocks.hold([block])
        made._cache.blocks.withdraw([block])
        made._cache.blocks.release([block])
    again = made.submit(prompt, GREEDY)
    run(made)
    assert again.cached_tokens["device"] == hit
    assert again.token_ids == first.token_ids
    assert_idle(made)


# --- 3: only computed states are published -------------------------------------------------------------


@pytest.mark.parametrize("budget", [16, 17, 19, 23, 40, 400])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_rule_3_no_boundary_is_stepped_over(drafts: int, budget: int) -> None:
    """PITFALLS B10, B53: decodes eat the budget, chunks end anywhere, and a chunk has more boundaries than it
    can keep; every boundary on the spacing is kept, and each snapshot holds just its prefix."""
    made, device = made_for(
        drafts, True, snapshot_spacing=8, max_num_batched_tokens=budget, num_state_slots_override=60,
        max_num_seqs=4,
    )  # fmt: skip
    decoding = [made.submit([90 + i], LONG) for i in range(3)]
    for _ in range(2):
        made.step()
    prompt = list(range(85))
    request = made.submit(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    while not request.finished:
        made.step()
        audit(made, device, (r.root for r in (*decoding, request)))
    kept = [
        len(tokens) for tokens in published_boundaries(made, device) if list(tokens) == prompt[: len(tokens)]
    ]
    assert kept == list(range(8, 81, 8))
    run(made)
    audit(made, device, [request.root])


def test_rule_3_without_a_slot_a_boundary_is_not_offered() -> None:
    made, device = engine(num_state_slots_override=6, max_num_seqs=2, snapshot_spacing=8)
    other = made.submit([50] * 30, LONG)
    made.step()
    request = made.submit(list(range(60)), GREEDY)
    while not request.finished:
        made.step()
        audit(made, device, [request.root])
    run(made)
    assert other.token_ids == answer_to([50] * 30, 40)
    assert_idle(made)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_rule_3_answers_publish_what_was_committed(drafts: int) -> None:
    """PITFALLS B09: windows step over boundaries; the last one of the answer is kept, and a follow-up that
    changes what came next resumes there with the right state."""
    for right in (0.0, 0.5, 1.0):
        made, device = made_for(drafts, True)
        device.right = right
        first = made.submit([1, 2, 3], LONG)
        while made.has_work:
            made.step()
            audit(made, device, [first.root])
        follow_up = [*first.prompt_token_ids, *first.token_ids[:38], 90, 91]
        second = made.submit(follow_up, GREEDY)
        run(made)
        assert second.cached_tokens["device"] == 40  # 3 + 38 = 41 tokens in common
        assert second.token_ids == answer_to(follow_up, 5)


# --- 4: rejected drafts --------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.9])
def test_rule_4_rejected_drafts_are_never_read(drafts: int, right: float) -> None:
    """The device writes rows for every draft of a window, wrong ones too, and checks all it reads."""
    made, device = made_for(drafts, True, block_size=16, snapshot_spacing=16)
    device.right = right
    requests = [made.submit([i] * (13 + i), LONG) for i in range(4)]
    while made.has_work:
        made.step()
        audit(made, device, [requests[0].root])
    assert [r.token_ids for r in requests] == [answer_to([i] * (13 + i), 40) for i in range(4)]
    stats = made.stats()
    assert stats["draft_tokens"] > stats["accepted_draft_tokens"]


# --- 5: padding ----------------------------------------------------------------------------------------


def test_rule_5_padding_names_no_row_slot_or_block() -> None:
    made, _ = engine(max_num_batched_tokens=64)
    made.submit(list(range(10)), LONG)
    made.submit(list(range(20)), LONG)
    plan = made._scheduler.schedule(may_preempt=True)
    assert plan is not None
    prefill = batches.prefill_batch(plan.prefill, made._scheduler, 64)
    real = np.arange(64) < 30
    assert ((np.asarray(prefill.row_of_token) >= 0) == real).all()
    rows = np.arange(prefill.request_slots.shape[0])
    padding = rows >= 2
    for ids in (prefill.request_slots, prefill.state_slots, prefill.initial_slots):
        assert (np.asarray(ids)[padding] == -1).all()
    for table in (prefill.block_tables, prefill.snapshot_slots, prefill.snapshot_after):
        assert (np.asarray(table)[padding] == -1).all()
    assert not np.asarray(prefill.sample)[padding].any()
    assert np.asarray(prefill.cu_seqlens).tolist() == [0, 10] + [30] * (len(rows) - 1)
    plan = made._scheduler.schedule(may_preempt=True)
    assert plan is not None and len(plan.decode) == 2
    decode = batches.decode_batch(plan.decode, made._scheduler, 4)
    for ids in (decode.request_slots, decode.state_slots, decode.publish_slots, decode.publish_positions):
        assert (np.asarray(ids)[2:] == -1).all()
    assert (np.asarray(decode.block_tables)[2:] == -1).all()
    for empty in (
        batches.prefill_batch((), made._scheduler, 64),
        batches.decode_batch((), made._scheduler, 4),
    ):
        assert (np.asarray(empty.request_slots) == -1).all() and (np.asarray(empty.block_tables) == -1).all()


def test_rule_5_more_prompts_than_a_prefill_has_rows() -> None:
    made, _ = engine(max_num_seqs=16, max_num_batched_tokens=256)
    requests = [made.submit([i, 1, 2], GREEDY) for i in range(16)]
    made.step()
    assert made.stats()["running"] == MAX_PREFILL_ROWS
    run(made)
    assert [r.token_ids for r in requests] == [answer_to([i, 1, 2], 5) for i in range(16)]


# --- 6: slots and blocks change hands ------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 3])
def test_rule_6_a_reused_slot_starts_empty(drafts: int) -> None:
    """PITFALLS B16: one row and the fewest slots, used by one request after the other, aborts in between."""
    made, _ = made_for(
        drafts, True, max_num_seqs=1, num_state_slots_override=3, num_gpu_blocks_override=8, max_model_len=64
    )
    for length in (30, 1, 17, 2, 40, 3):
        prompt = [length] * length
        gone = made.submit([99 - length] * 9, LONG)
        for _ in range(3):
            made.step()
        made.abort(gone)
        request = made.submit(prompt, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
        run(made)
        assert request.token_ids == answer_to(prompt, 10)
    assert_idle(made)


def test_rule_6_an_aborted_request_holds_nothing() -> None:
    for steps_run in range(14):
        made, _ = made_for(1, True)
        request = made.submit(list(range(7)), LONG)
        for _ in range(steps_run):
            made.step()
        made.abort(request)
        stats = made.stats()
        assert stats["free_blocks"] == stats["total_blocks"]
        assert stats["free_state_slots"] == stats["total_state_slots"]
        assert_idle(made)


def test_rule_6_the_engine_steps_until_the_last_boundary_is_kept() -> None:
    """A finished answer holds its row, blocks and slots until the device has committed its last state."""
    made, device = engine(max_num_seqs=1)
    request = made.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    while not request.finished:
        made.step()
    # 9 tokens are known, 8 of them ran: the state at 8 is committed by one more replay
    assert made.has_work and made.stats()["free_blocks"] < made.stats()["total_blocks"]
    assert [len(tokens) for tokens in published_boundaries(made, device)] == []
    run(made)
    assert [len(tokens) for tokens in published_boundaries(made, device)] == [8]
    assert_idle(made)


# --- 8: at least float32 -------------------------------------------------------------------------------


def test_rule_8_what_must_not_be_narrow_is_not() -> None:
    config = small_config()
    params = random_params(config, dtype="bfloat16")

    def wide(x: jax.Array, pooled: jax.Array) -> dict[str, Any]:
        kda, mla, moe = params.layers[0].attention, params.layers[1].attention, params.layers[1].mlp
        hc = params.layers[0].attention_hc
        inputs = kda_inputs(kda, config, x)
        streams = jnp.stack([x] * config.hc_streams, axis=1)
        _, post, comb = hyper_connection_pre(
            streams, hc.fn, hc.base, hc.scale, norm_eps=config.rms_norm_eps, hc_eps=config.hc_eps,
            sinkhorn_iterations=config.hc_sinkhorn_iterations, implementation="xla",
        )  # fmt: skip
        index = index_inputs(mla.indexer, config, x, mla_inputs(mla, config, x).query_residual)
        cache = caches.shapes(
            config, num_blocks=2, block_size=16, num_state_slots=2, num_request_slots=1, dtype=jnp.bfloat16
        )
        return {
            "forget gate": inputs.log_decay, "beta": inputs.beta,
            "l2 norms": split_qkv(inputs.qkv, config.kda_heads)[:2], "mixing": post, "Sinkhorn": comb,
            "expert weights": route(moe, config, x)[1], "head weights": index.head_weights,
            "index scores": score_pools(index.query, index.head_weights, pooled),
            "KDA state and records": jax.tree.map(
                lambda leaf: jnp.zeros((), leaf.dtype), (cache.kda_state, cache.records)
            ),
        }  # fmt: skip

    x = jax.ShapeDtypeStruct((6, config.hidden_size), jnp.bfloat16)
    pooled = jax.ShapeDtypeStruct((3, config.index_head_dim), jnp.bfloat16)
    for name, value in jax.eval_shape(wide, x, pooled).items():
        assert {leaf.dtype for leaf in jax.tree.leaves(value)} == {jnp.dtype("float32")}, name


def test_rule_8_norms_round_once() -> None:
    x = jax.random.normal(jax.random.key(0), (50, 32), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    normed = np.asarray(rms_norm(x, jnp.ones(32, jnp.bfloat16), 1e-5), np.float64)
    # one rounding to 8 bits; a mean or a reciprocal root in bfloat16 would add as much again
    assert (np.abs(normed - exact) <= 2.0**-8 * np.abs(exact) * (1 + 1e-5)).all()
    assert (np.abs(normed - exact) > 2.0**-10 * np.abs(exact)).any()


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_rule_8_matmul_precision_is_spelled(phase: str) -> None:
    """Every product of float32 values in a step asks for the highest precision: platform defaults differ."""
    config = small_config()
    params = random_params(config, dtype="float32")
    cache = caches.create(
        config,
        num_blocks=4,
        block_size=16,
        num_state_slots=6,
        num_request_slots=2,
        drafts=1,
        dtype=jnp.float32,
    )
    model = weightless_model(num_mtp_layers=1)
    limits = EngineConfig(
        max_num_seqs=2, block_size=16, snapshot_spacing=16, max_model_len=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )  # fmt: skip
    scheduler = Engine(model, limits, runner=made_for(1, False)[1])._scheduler
    if phase == "prefill":
        program: Any = steps.prefill
        batch: Any = batches.prefill_batch((), scheduler, 32)
    else:
        program, batch = steps.decode, batches.decode_batch((), scheduler, 2)
    closed = jax.make_jaxpr(lambda p, c, b: program(p, config, c, b, implementation="xla"))(
        params, cache, jax.tree.map(jnp.asarray, batch)
    )
    dots = [e for e in equations(closed.jaxpr) if e.primitive.name == "dot_general"]
    assert len(dots) > 50
    for equation in dots:
        if all(value.aval.dtype == jnp.float32 for value in equation.invars):
            precision = equation.params["precision"]
            highest = jax.lax.Precision.HIGHEST
            assert precision in (highest, (highest, highest)), equation.source_info.traceback


# --- 9: ties -------------------------------------------------------------------------------------------


def test_rule_9_ties_go_to_the_lowest_index() -> None:
    config = small_config()
    moe = random_params(config).layers[1].mlp
    alike = dataclasses.replace(
        moe, router=jnp.zeros_like(moe.router), router_bias=jnp.zeros_like(moe.router_bias)
    )
    experts, _ = route(alike, config, jnp.ones((3, config.hidden_size)))
    assert np.sort(np.asarray(experts), axis=1).tolist() == [[0, 1]] * 3
    scores = jnp.array([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]])
    assert select_pools(scores, jnp.array([6]), 4).tolist() == [[0, 1, 3, 5]]
    assert int(argmax_last(jnp.array([1.0, 3.0, 3.0, 2.0]), None)) == 1


def test_rule_9_zeros_of_both_signs_tie() -> None:
    """Keys that point away score zero whatever the head weight's sign; the sign must not rank them."""
    query = jnp.array([[[1.0, 1.0]]])
    pooled = jnp.array([[-1.0, 0.5], [0.0, -0.0], [-2.0, 1.0], [1.0, -1.0]])
    for weight in (1.0, -1.0):
        scores = score_pools(query, jnp.array([[weight]]), pooled)
        assert not np.signbit(np.asarray(scores)).any()
        assert select_pools(scores, jnp.array([4]), 2).tolist() == [[0, 1]]


# --- 10: one clear error -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs", "0", "1"]),
        ({"block_size": 12, "snapshot_spacing": 64}, ["snapshot_spacing", "12", "64"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "1.5", "at most 1"]),
        ({"kv_cache_dtype": "int3"}, ["kv_cache_dtype", "int3", "fp8"]),
        (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 8}},
            ["num_speculative_tokens", "8", "0 to 7"],
        ),
        ({"speculative_config": {"method": "ngram"}}, ["method", "ngram", "mtp"]),
        ({"max_model_len": 100_000}, ["max_model_len", "100000", "512"]),
        ({"max_num_batched_tokens": 3}, ["max_num_batched_tokens", "3", "4"]),
        ({"num_gpu_blocks_override": 1, "max_model_len": 64}, ["num_gpu_blocks_override", "1", "8"]),
        ({"num_state_slots_override": 11}, ["num_state_slots_override", "11", "12"]),
        ({"drafts": 7, "max_num_batched_tokens": 64}, ["block_size", "8", "8"]),
        (
            {"drafts": 3, "block_size": 4, "snapshot_spacing": 64},
            ["block_size", "4", "two decode windows of 4"],
        ),
    ],
)
def test_rule_10_bad_flags(limits: dict, named: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        engine(**limits)
    assert all(word in str(caught.value) for word in named), caught.value


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ([1], {"temperature": 3.0}, ["temperature", "3.0", "2"]),
        ([1], {"top_p": 0.0}, ["top_p", "0.0", "1"]),
        ([1], {"max_tokens": 0}, ["max_tokens", "0", "1"]),
        ([1], {"max_tokens": 2, "min_tokens": 3}, ["min_tokens", "3", "2"]),
        ([1], {"logprobs": 21}, ["logprobs", "21", "20"]),
        ([1], {"n": 129}, ["n", "129", "128"]),
        ([1], {"logit_bias": {300: 1.0}}, ["logit_bias", "300", "[0, 300)"]),
        ([1], {"allowed_token_ids": [5, 301]}, ["allowed_token_ids", "301", "[0, 300)"]),
        ([301], {}, ["301", "[0, 300)"]),
        (list(range(200)), {}, ["200", "128"]),
    ],
)
def test_rule_10_a_bad_request_changes_nothing(prompt: list[int], sampling: dict, named: list[str]) -> None:
    made, _ = engine(max_model_len=128)
    running = made.submit([1, 2], LONG)
    made.step()
    before = made.stats()
    with pytest.raises(RequestError) as caught:
        made.submit(prompt, SamplingParams(**sampling))
    assert all(word in str(caught.value) for word in named), caught.value
    assert made.stats() == before
    run(made)
    assert running.token_ids == answer_to([1, 2], 40)
