"""Faults that people met in other engines, each as a probe of this one. B-numbers: docs/ENGINE.md, which also
names the tests elsewhere that hold the other rows.

What concerns scheduling and caching runs over the fake device, which fails on any stale or foreign read;
probes of operations run in float32, the dtype in which those faults showed.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.sampling_params import SamplingParams
from pallas_kernels import pool_index
from pallas_kernels.kda import kda_chunked
from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.plan import Plan
from tests.pallas_kernels import kda_oracle, sparse_oracles
from tests.serving.cache_audit import audit, published_boundaries
from tests.serving.fake_device import FakeDevice, answer_to
from tests.serving.test_edges import made_for, run
from tests.serving.test_engine import GREEDY, assert_idle, engine
from tests.serving.tiny_text import weightless_model

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("block", [16, 1024])
def test_b04_every_pool_has_a_place_of_its_own(block: int) -> None:
    """Pages counted in tokens where pools were meant: pools overwrote one another, or fell into block 0."""
    most, dim = 20, 2
    time = most * block
    write = jax.jit(pool_index.write_pools)
    keys = np.arange(time * dim, dtype=np.float32).reshape(-1, dim)
    for pages in (1, 2, 3, 19, 20):
        real, pools = np.arange(time) < pages * block, pages * block // 4
        table = np.full(most, -1, np.int32)
        table[:pages] = np.random.default_rng(pages).permutation(np.arange(1, 22))[:pages]
        _, pooled = write(
            np.full((1, 1, 8, 2, dim), np.nan, np.float32),
            np.full((1, 22, block // 4, dim), np.nan, np.float32), 0, keys, np.zeros_like(keys),
            np.zeros((4, dim), np.float32), np.where(real, 0, -1).astype(np.int32),
            np.arange(time, dtype=np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32), table[None],
        )  # fmt: skip
        written = np.asarray(pooled[0])
        assert (~np.isnan(written)).all(-1).sum() == pools
        assert np.isnan(written[0]).all()
        # equal gates: a pool's key is the mean of its four
        expected = keys[: pages * block].reshape(pools, 4, dim).mean(1)
        np.testing.assert_allclose(written[table[:pages]].reshape(pools, dim), expected, rtol=1e-6)


def test_b05_rows_of_a_batch_keep_apart() -> None:
    """Verification on an all-zero plan put every request into slot 0: acceptance fell to nothing."""
    made, device = made_for(3, True, block_size=16, snapshot_spacing=16)
    plans: list[Plan] = []
    schedule = made._scheduler.schedule
    made._scheduler.schedule = lambda **how: plans.append(schedule(**how)) or plans[-1]
    requests = [made.submit([i] * (5 + 9 * i), greedy(33)) for i in range(4)]
    run(made)
    assert [r.token_ids for r in requests] == [answer_to([i] * (5 + 9 * i), 33) for i in range(4)]
    for plan in filter(None, plans):
        places = [w.placement for w in plan.decode]
        assert len({p.row for p in places}) == len({p.state_slot for p in places}) == len(places)
        slots = [w.publish_slot for w in plan.decode] + [p.state_slot for p in places]
        assert len(set(slots)) == len(slots)
    # right drafts are all accepted: 32 tokens behind the first are 8 windows of 4
    assert made.stats()["acceptance_length"] == 4.0
    assert device.window == 4


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_b09_windows_step_over_boundaries(drafts: int) -> None:
    """The follow-up turn reads as much of the answer as it would without drafts."""
    made, device = made_for(drafts, True)
    device.right = 0.7
    first = made.submit([1] * 5, greedy(60))
    run(made)
    for common in (20, 33, 50, 64):
        conversation = [*first.prompt_token_ids, *first.token_ids][:common]
        second = made.submit([*conversation, 95, 96], GREEDY)
        run(made)
        assert second.token_ids == answer_to([*conversation, 95, 96], 5)
        audit(made, device, [first.root])
    # the last boundary of the answer: 64 of its 65 tokens ran
    assert second.cached_tokens["device"] == 64


@pytest.mark.parametrize("budget", [8, 21, 64])
def test_b10_the_last_full_block_and_the_tail_in_one_chunk(budget: int) -> None:
    """Two blocks and five tokens: snapshots are those of the boundaries, whatever the chunks were."""
    made, device = made_for(1, True, max_num_batched_tokens=budget, snapshot_spacing=8)
    prompt = list(range(21))
    made.submit(prompt, greedy(1))
    run(made)
    assert [list(tokens) for tokens in published_boundaries(made, device)] == [prompt[:8], prompt[:16]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drafts", [0, 3])
def test_b16_memory_for_one_request_and_a_half(seed: int, drafts: int) -> None:
    """Two long answers push one another out; besides, either is preempted at five random steps."""
    made, device = made_for(
        drafts, True, num_gpu_blocks_override=12, max_model_len=64, max_num_seqs=2, num_state_slots_override=6
    )
    device.right = 0.5
    chance = random.Random(seed)
    prompts = [[seed] * 9, [seed, 1] * 5]
    requests = [made.submit(p, greedy(50)) for p in prompts]
    at = set(chance.sample(range(2, 25), 5))
    for step in range(25):
        made.step()
        if step in at and made._scheduler.running:
            while made._unread:
                made._read(made._unread.popleft())
            if made._scheduler.running:
                made._scheduler.preempt(chance.choice(made._scheduler.running))
    run(made)
    assert [r.token_ids for r in requests] == [answer_to(p, 50) for p in prompts]
    assert made.stats()["preemptions"] >= 3
    assert_idle(made)


@pytest.mark.parametrize("seed", range(3))
def test_b18_the_order_of_the_batch_changes_every_step(seed: int) -> None:
    """Requests come and go and overtake one another: batch rows and request slots are different things."""
    chance = random.Random(seed)
    made, device = made_for(3, True, max_num_seqs=8, max_num_batched_tokens=40)
    device.right = 0.6
    requests, gone = [], []
    for turn in range(40):
        prompt = [turn, *([7] * chance.randint(0, 12))]
        request = made.submit(prompt, greedy(chance.randint(1, 25)), priority=chance.randint(-3, 3))
        (gone if chance.random() < 0.2 else requests).append(request)
        for _ in range(chance.randint(0, 2)):
            made.step()
        if gone:
            made.abort(gone[-1])
    run(made)
    for request in requests:
        expected = answer_to(request.prompt_token_ids, request.sampling.max_tokens or 0)
        assert request.token_ids == expected
    assert_idle(made)


@pytest.mark.parametrize("budget", [1, 3, 15, 16, 17, 35])
def test_b19_chunks_of_any_size(budget: int) -> None:
    """A chunk's state must reach the next chunk, wherever chunks and blocks end."""
    made, device = engine(
        block_size=16, snapshot_spacing=16, max_num_seqs=1, max_num_batched_tokens=budget, max_model_len=256
    )
    for length in (*LENGTHS, 160):
        prompt = [length, *range(length - 1)]
        request = made.submit(prompt, GREEDY)
        run(made)
        assert request.token_ids == answer_to(prompt, 5)
        assert max(device.prefills) <= budget


@pytest.mark.parametrize("drafts", [0, 3])
def test_b21_a_shared_prefix_is_hit_by_the_second_request(drafts: int) -> None:
    """With a snapshot at every block; `test_engine_fuzz.test_hit_rates` has the third request at the
    default spacing."""
    config = EngineConfig(
        max_num_seqs=4, snapshot_spacing=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts},
    )  # fmt: skip
    model = weightless_model(num_mtp_layers=1, max_position_embeddings=4096)
    made = Engine(model, config, runner=FakeDevice(64, drafts=drafts))
    shared = list(range(1, 290)) * 6
    hits = []
    for turn in range(3):
        request = made.submit([*shared[: 27 * 64], *[turn] * 100], GREEDY)
        run(made)
        hits.append(request.cached_tokens["device"])
    assert hits == [0, 27 * 64, 27 * 64]


def test_b24_neighbours_and_their_order_do_not_matter() -> None:
    prompts = {length: [length] * length for length in (3, 17, 64)}
    for order in ((3, 17, 64), (64, 3, 17), (17, 64, 3)):
        made, _ = made_for(1, False, max_num_batched_tokens=128)
        requests = {length: made.submit(prompts[length], greedy(9)) for length in order}
        run(made)
        for length, request in requests.items():
            assert request.token_ids == answer_to(prompts[length], 9)


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("gates", ["saturated", "weak"])
def test_b26_saturated_gates_in_float32(chunk: int, gates: str) -> None:
    """The bound of -5 over 64 tokens is exp(320): no positive exponent may be formed. Truth: numpy loops."""
    rng = np.random.default_rng(chunk)
    time = 256
    inputs = kda_oracle.tokens(rng, (1, time), gates=gates)
    initial = rng.normal(size=(1, 2, 8, 16))
    expected, state = kda_oracle.recurrence(*(x[0] for x in inputs), initial[0])
    narrow = [jnp.asarray(x, jnp.float32) for x in (*inputs, initial)]
    out, final = kda_chunked(*narrow, chunk=chunk, implementation="xla")
    for actual, wanted in ((out[0], expected), (final[0], state)):
        assert np.isfinite(np.asarray(actual)).all()
        assert np.abs(np.asarray(actual) - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_b30_long_contexts_are_scored_whole() -> None:
    """131,072 tokens of context: no query comes out zero, and the best pools are those of numpy, early ones
    included."""
    rng = np.random.default_rng(0)
    pools, dim, queries = 131_072 // 4, 8, 16
    keys = rng.normal(size=(pools, dim)).astype(np.float32)
    q = rng.normal(size=(queries, 2, dim)).astype(np.float32)
    weights = np.abs(rng.normal(size=(queries, 2))).astype(np.float32)
    table = rng.permutation(pools // 4)
    pooled = np.full((1, pools // 4, 4, dim), np.nan, np.float32)
    pooled[0, table] = keys.reshape(-1, 4, dim)
    ids = np.asarray(
        pool_index.select_paged(
            jnp.asarray(q), jnp.asarray(weights), jnp.asarray(pooled), 0, jnp.asarray(table[None], jnp.int32),
            jnp.zeros(queries, jnp.int32), jnp.full(queries, pools, jnp.int32), 64, implementation="xla",
        )
    )  # fmt: skip
    scores = sparse_oracles.scores(q, weights, keys)
    assert (ids.min(axis=1) < pools // 8).all()
    for row in range(queries):
        # float32 sums may order neighbours at the edge otherwise: what was left out is no better
        worst = scores[row, ids[row]].min()
        assert len(set(ids[row].tolist())) == 64
        assert np.delete(scores[row], ids[row]).max() <= worst + 1e-5 * abs(worst)


def test_b32_the_highest_blocks_serve_as_well_as_the_lowest() -> None:
    """JAX clamps an index past the end silently: every row asked for must exist."""
    answers = []
    for withheld in (0, 54):
        made, device = made_for(1, True, num_gpu_blocks_override=60, max_model_len=40)
        taken = made._cache.blocks.take(withheld)
        assert taken is not None
        request = made.submit(list(range(20)), greedy(15))
        run(made)
        answers.append(request.token_ids)
        used = {block for block, _ in device.target}
        assert max(used) < 60 and min(used) >= withheld
        table = made._scheduler.block_tables
        assert (table == -1).all()
    assert answers == [answer_to(range(20), 15)] * 2


def test_b38_drafts_never_change_an_answer() -> None:
    """Fifty prompts, every number of drafts, right or wrong; a drafter that is always right is used fully."""
    prompts = [[i, *range(i % 13)] for i in range(50)]
    for drafts in (0, 1, 2, 3, 7):
        for right in (0.0, 0.5, 1.0):
            made, device = made_for(drafts, True, block_size=16, snapshot_spacing=64)
            device.right = right
            requests = [made.submit(p, greedy(9)) for p in prompts]
            run(made)
            assert [r.token_ids for r in requests] == [answer_to(p, 9) for p in prompts]
            length = made.stats()["acceptance_length"]
            if right == 1.0 and drafts in (1, 3, 7):  # 8 tokens behind the first are whole windows
                assert length == drafts + 1
            if right == 0.0:
                assert length == 1.0


@pytest.mark.parametrize("drafts", [0, 3])
def test_b55_readers_that_go_away(drafts: int) -> None:
    """A hundred requests, each left at a random moment: queued, before its first token, while it answers."""
    chance = random.Random(drafts)
    made, _ = made_for(drafts, True)
    requests = []
    for turn in range(100):
        requests.append(made.submit([turn % 90] * chance.randint(1, 30), greedy(60)))
        for _ in range(chance.randint(0, 3)):
            made.step()
        made.abort(chance.choice(requests))
    for request in requests:
        made.abort(request)
    stats = made.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["free_blocks"] == stats["total_blocks"]
    assert stats["free_state_slots"] == stats["total_state_slots"]
    heard = stats["generation_tokens"]
    run(made)  # at most the step in flight, of which nothing is counted any more
    assert made.stats()["generation_tokens"] == heard
    reasons = [r.finish_reason for r in requests]
    assert set(reasons) <= {"abort", "length"} and reasons.count("abort") > 50
    assert_idle(made)
