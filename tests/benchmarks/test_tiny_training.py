"""Optimizer, schedule, state files and the resuming of a run."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.tiny import optimizer, parameters, train
from benchmarks.tiny.data import LOOKAHEAD, Batch, BatchSpec
from benchmarks.tiny.logs import read_logs
from benchmarks.tiny.schedule import Phase, Preset, learning_rate
from benchmarks.tiny.shape import Shape
from benchmarks.tiny.state_files import PIECE_BYTES, load_state, save_state
from benchmarks.tiny.step import train_step

SHAPE = Shape(
    vocab_size=64,
    hidden_size=16,
    num_layers=4,
    dense_width=16,
    expert_width=8,
    num_experts=4,
    num_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_head_dim=8,
    v_head_dim=8,
    kda_heads=2,
    kda_head_dim=16,
    index_heads=2,
    index_head_dim=8,
    compute_dtype="float32",
    kda_chunk=16,
)
PRESET = Preset(
    SHAPE,
    phases=(
        Phase(BatchSpec(2, 32, (1.0, 0.0, 0.0)), until=0.5),
        Phase(BatchSpec(1, 64, (1.0, 0.0, 0.0)), until=1.0, sparse=True),
    ),
    rate=1e-2,
    warmup_steps=1,
)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    g = jnp.asarray(np.random.default_rng(0).standard_normal((3, 24, 48)), jnp.float32)
    for matrix in (g, jnp.swapaxes(g, -1, -2)):
        values = np.linalg.svd(np.asarray(optimizer.orthogonalise(matrix)), compute_uv=False)
        # the quintic of Muon is tuned for speed: it ends between 0.7 and 1.2, by design
        assert values.min() > 0.6 and values.max() < 1.3


def test_a_step_reaches_every_parameter_and_lowers_the_loss() -> None:
    params = parameters.initialise(SHAPE, 0)
    state = optimizer.initialise(params)
    r = np.random.default_rng(1)
    ids = jnp.asarray(np.tile(r.integers(0, 64, 12), 4)[None, : 32 + LOOKAHEAD].repeat(2, 0), jnp.uint16)
    classes = jnp.full(ids.shape, 3, jnp.uint8)
    step = jax.jit(train_step, static_argnames=("sparse", "preset"))
    before, losses = params, []
    for _ in range(8):
        params, state, metrics = step(
            params, state, ids, classes, jnp.full(2, 2), 1e-2, 1e-2, sparse=True, preset=PRESET
        )
        losses.append(float(metrics["next_token"]))
    assert losses[-1] < 0.7 * losses[0]
    still = {name for name, value in params.items() if bool((value == before[name]).all())}
    assert not still, "these parameters take no part in the loss"
    assert metrics["covered"].shape == (SHAPE.groups + 1,)


def test_learning_rate_warms_up_stays_and_falls() -> None:
    preset = dataclasses.replace(PRESET, warmup_steps=10, decay_from=0.5)
    assert learning_rate(preset, 0, 0.0) == pytest.approx(preset.rate / 10)
    assert learning_rate(preset, 50, 0.5) == pytest.approx(preset.rate)
    assert learning_rate(preset, 90, 0.75) == pytest.approx(preset.rate / 2)
    assert 0 < learning_rate(preset, 99, 1.0) < preset.rate / 100


def test_state_files_bring_back_every_bit_in_pieces(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, vocab_size=64_000)  # large enough for several pieces
    params = parameters.initialise(shape, 3)
    state = optimizer.initialise(params)._replace(steps=jnp.float32(7))
    save_state(tmp_path, params, state, {"step": 7})
    pieces = sorted(tmp_path.glob("state-*.npz"))
    assert len(pieces) > 1 and all(piece.stat().st_size < PIECE_BYTES + 1_000_000 for piece in pieces)
    loaded, loaded_state, progress = load_state(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, (loaded, loaded_state), (params, state))
    assert progress["step"] == 7
    pieces[0].unlink()
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path)


class InstantCompiler:
    """Programs that move one parameter by the batch's sum, in place of a minute of compilation."""

    def __init__(self, *_: Any):
        pass

    def program(self, phase: Phase) -> Callable[..., Any]:
        def step(
            params: Any,
            state: Any,
            ids: np.ndarray,
            classes: np.ndarray,
            pools: np.ndarray,
            rate: Any,
            _: Any,
        ):
            moved = params["norm"] + rate * (ids.sum() % 97 + phase.sparse * pools.sum())
            metrics = {"next_token": jnp.float32(1.0), "recall": jnp.float32(0.0)}
            return params | {"norm": moved}, state._replace(steps=state.steps + 1), metrics

        return step


def seeded_batches(_pool: Any, spec: BatchSpec, seed: int, _ahead: int) -> Any:
    while True:
        r = np.random.default_rng(seed)
        ids: Batch = (
            r.integers(0, 64, (spec.rows, spec.length)),
            np.ones((spec.rows, spec.length), np.uint8),
        )
        yield ids
        seed += 1


def test_a_resumed_run_ends_where_an_unbroken_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "Compiler", InstantCompiler)
    monkeypatch.setattr(train, "batches", seeded_batches)
    # one phase: the numbers drawn for sparse rows are a stream of their own in each run
    preset = dataclasses.replace(PRESET, phases=PRESET.phases[:1])

    def run(out: Path, resume: bool, until: int) -> train.Trainer:
        trainer = train.Trainer(preset, out, seed=5, resume=resume, start_from=None)
        schedule = 8  # the schedule is that of the whole run, wherever this part of it stops
        deadline = time.time() + 1e9
        original = train.learning_rate

        def stop(preset_: Preset, step: int, share: float) -> float:
            if step >= until:
                raise InterruptedError
            return original(preset_, step, share)

        with monkeypatch.context() as patch:
            patch.setattr(train, "learning_rate", stop)
            with contextlib.suppress(InterruptedError):
                trainer.train(None, 1, schedule, deadline, 0.0, 1e9)
        trainer.save()
        return trainer

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", False, 8)
    run(tmp_path / "parts", False, 3)
    parts = run(tmp_path / "parts", True, 8)
    np.testing.assert_array_equal(whole.params["norm"], parts.params["norm"])
    assert parts.progress.step == 8 and parts.progress.tokens == whole.progress.tokens
    logged = [
        json.loads(line)["step"] for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()
    ]
    assert logged == list(range(1, 9))


def test_phases_follow_the_share_of_the_run_and_a_nan_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "Compiler", InstantCompiler)
    monkeypatch.setattr(train, "batches", seeded_batches)
    trainer = train.Trainer(PRESET, tmp_path, seed=5, resume=False, start_from=None)
    trainer.train(None, 1, 8, time.time() + 1e9, 0.0, 1e9)
    lengths = [json.loads(line)["length"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lengths == [32] * 4 + [64] * 4
    with pytest.raises(FloatingPointError, match="step 8 is nan"):
        trainer._line({"next_token": jnp.float32(np.nan), "recall": jnp.float32(0)})


def test_logs_of_a_run_and_its_continuation_lie_on_one_time_axis(tmp_path: Path) -> None:
    logs = []
    for name, seconds in (("first", (5.0, 10.0)), ("second", (1.0, 2.5))):
        logs.append(tmp_path / name)
        lines = ({"seconds": second, "tokens": int(100 * second)} for second in seconds)
        logs[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    joined = read_logs(logs)
    assert [line["seconds"] for line in joined] == [5.0, 10.0, 11.0, 12.5]
    assert [line["tokens"] for line in joined] == [500, 1000, 1100, 1250]
    assert [line["run"] for line in joined] == [0, 0, 1, 1]
