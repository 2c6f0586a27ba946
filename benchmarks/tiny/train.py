"""Trains the tiny checkpoint: `python -m benchmarks.tiny.train --preset h200 --seconds 500 --out runs/tiny`.

The run ends after `--steps` optimizer steps or `--seconds` of wall time, start and compilation included,
whichever comes first; the schedule follows the nearer of the two. `--resume` goes on from the state in
`--out`. Metrics go to log.jsonl, one line every few seconds.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from benchmarks.tiny import optimizer, parameters
from benchmarks.tiny.data import PADDING, Batch, batches, initialise_worker
from benchmarks.tiny.optimizer import OptimizerState
from benchmarks.tiny.parameters import Params
from benchmarks.tiny.schedule import PRESETS, Phase, Preset, learning_rate
from benchmarks.tiny.state_files import load_state, save_state
from benchmarks.tiny.step import Compiler, Metrics
from benchmarks.tiny.tokenizer import train_tokenizer

ROUTING_BIAS_RATE = 0.01
SPARSE_SHARES = (
    1 / 16,
    1 / 4,
)  # of the length: pools a row may choose, drawn log-uniformly around those served


@dataclasses.dataclass
class Progress:
    """Where a run stands; written with the state. seconds: spent training, without start and compilation."""

    step: int = 0
    phase: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """Parameters, optimizer state and progress, moved on by `train`."""

    def __init__(self, preset: Preset, out: Path, seed: int, resume: bool, start_from: Path | None):
        self.preset, self.out, self.seed = preset, out, seed
        self.progress = Progress()
        if resume:
            self.params, self.state, saved = load_state(out)
            self.progress = Progress(**{f.name: saved[f.name] for f in dataclasses.fields(Progress)})
        else:
            fresh = start_from is None
            self.params: Params = (
                parameters.initialise(preset.shape, seed) if fresh else load_state(start_from)[0]
            )
            self.state: OptimizerState = optimizer.initialise(self.params)
        self._rng = np.random.default_rng((seed, self.progress.step))
        self._recall = 0.0

    @property
    def phase(self) -> Phase:
        return self.preset.phases[self.progress.phase]

    def train(
        self, pool: Pool, workers: int, steps: float, deadline: float, log_every: float, save_every: float
    ) -> None:
        """Until `steps` optimizer steps are done or the clock (time.time) reads `deadline`."""
        compiler = Compiler(self.preset, self.params, self.state, self.phase)
        program, data = compiler.program(self.phase), self._data(pool, workers)
        assert program is not None, "the first program is compiled before the compiler returns"
        budget = self.progress.seconds + deadline - time.time()
        last = saved = time.time()
        logged = 0.0
        with open(self.out / "log.jsonl", "a") as log:
            while (share := max(self.progress.step / steps, self.progress.seconds / budget)) < 1:
                following = self._following(share)
                if following is not None and (ready := compiler.program(self.preset.phases[following])):
                    program, self.progress.phase, self._recall, logged = ready, following, 0.0, 0.0
                    data = self._data(pool, workers)
                rate = learning_rate(self.preset, self.progress.step, share)
                ids, classes = next(data)
                bias_rate = ROUTING_BIAS_RATE * rate / self.preset.rate
                self.params, self.state, metrics = program(
                    self.params,
                    self.state,
                    ids,
                    classes,
                    self._pools(),
                    np.float32(rate),
                    np.float32(bias_rate),
                )
                jax.block_until_ready(metrics)
                self.progress.step += 1
                self.progress.tokens += int((classes != PADDING).sum())
                now = time.time()
                self.progress.seconds, last = self.progress.seconds + now - last, now
                if now - logged > log_every:
                    logged = now
                    line = json.dumps(self._line(metrics) | {"rate": rate})
                    print(line, file=log, flush=True)
                    print(line, flush=True)
                if now - saved > save_every:
                    saved = now
                    self.save()

    def save(self) -> None:
        save_state(self.out, self.params, self.state, dataclasses.asdict(self.progress))

    def _data(self, pool: Pool, workers: int) -> Iterator[Batch]:
        seed = (self.seed * 1000 + self.progress.phase) * 1_000_000 + self.progress.step
        return batches(pool, self.phase.batch, seed, 2 * workers)

    def _following(self, share: float) -> int | None:
        """The next phase's number when its time has come."""
        if share < self.phase.until and self._recall < self.phase.enough:
            return None
        following = self.progress.phase + 1
        return following if following < len(self.preset.phases) else None

    def _pools(self) -> np.ndarray:
        low, high = np.log(SPARSE_SHARES)
        shares = np.exp(self._rng.uniform(low, high, self.phase.batch.rows))
        return (self.phase.batch.length / self.preset.shape.index_kpool * shares).astype(np.int32)

    def _line(self, metrics: Metrics) -> dict[str, object]:
        """A line of the log; raises FloatingPointError when the loss is not finite."""
        line = {name: np.asarray(value).astype(float).round(4).tolist() for name, value in metrics.items()}
        if not math.isfinite(line["next_token"]):
            raise FloatingPointError(f"the loss at step {self.progress.step} is {line['next_token']}")
        self._recall = 0.5 * self._recall + 0.5 * line["recall"]
        batch = {"length": self.phase.batch.length, "sparse": self.phase.sparse}
        return line | batch | dataclasses.asdict(self.progress)


def main() -> None:
    begun = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="h200")
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--steps", type=float, default=math.inf, help="optimizer steps of the whole run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="wall time from here, start included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes that make data")
    parser.add_argument("--log-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--start-from", type=Path, default=None, help="parameters of another run's folder")
    args = parser.parse_args()
    if math.isinf(min(args.steps, args.seconds)):
        parser.error("give --steps, --seconds or both: nothing else ends a run")
    preset = PRESETS[args.preset]
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer_path = args.out / "tokenizer.json"
    if not tokenizer_path.exists():
        train_tokenizer(preset.shape.vocab_size).save(str(tokenizer_path))
    (args.out / "preset.json").write_text(json.dumps(dataclasses.asdict(preset), indent=1))
    tokenizer_json = Tokenizer.from_file(str(tokenizer_path)).to_str()
    # spawned, not forked: JAX runs threads
    with multiprocessing.get_context("spawn").Pool(
        args.workers, initialise_worker, (tokenizer_json,)
    ) as pool:
        trainer = Trainer(preset, args.out, args.seed, args.resume, args.start_from)
        print(f"{parameters.count(preset.shape)} parameters, {jax.devices()[0].device_kind}", flush=True)
        deadline = begun + args.seconds
        trainer.train(pool, args.workers, args.steps, deadline, args.log_every, args.save_every)
    trainer.save()


if __name__ == "__main__":
    main()
