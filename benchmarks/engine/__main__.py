"""Decode, prefill, drafting and compile time of the engine's steps; rows as data, a table last."""

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np

from benchmarks.engine.device_time import kernel_seconds
from benchmarks.engine.model import cut_config, model_shapes, random_model
from benchmarks.kernels.harness import Harness, Row, table, write
from glm_jax import cache as caches
from glm_jax import compiled_steps
from glm_jax.sampling_params import MOST_LOGPROBS, SamplingParams
from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.memory_plan import geometry

STEPS = 20
WHOLE_LAYERS = 45
PARTS = ("compile", "drafts", "whole")


class Bench:
    def __init__(self, tiny: bool, layers: int) -> None:
        self.harness = Harness(tiny=tiny)
        self.tiny = tiny
        self.layers = layers
        self.config = cut_config(layers, tiny=tiny)
        self.model = random_model(self.config)
        self.context = 512 if tiny else 4096
        self.rows: list[Row] = []
        self.begun = time.monotonic()

    def add(self, name: str, value: float, unit: str, **more: Any) -> None:
        self.rows.append(self.harness.row(f"{name}, {self.layers} layers", value, unit=unit, **more))
        print(
            f"[{time.monotonic() - self.begun:5.0f} s] {self.rows[-1]['name']}: {value:.4g} {unit}",
            flush=True,
        )
        if not self.tiny:
            write(self.rows, "engine")  # a run that is cut short keeps what it has

    def engine(self, drafts: int, seqs: int, tokens: int) -> Engine:
        limits = EngineConfig(
            max_model_len=2 * self.context, max_num_seqs=seqs, max_num_batched_tokens=tokens,
            num_gpu_blocks_override=(seqs + 1) * 2 * self.context // 64,
            num_state_slots_override=3 * seqs + 8,
            speculative_config={"method": "mtp", "num_speculative_tokens": drafts},
        )  # fmt: skip
        return Engine(self.model, limits)

    def compile_all(self, engine: Engine, label: str) -> None:
        """Time of every bucket's program, compiled several at once as the server's warm-up does it."""
        prefills, decodes = engine.padding_batches()
        names = [f"prefill {batch.tokens.shape[0]} tokens" for batch in prefills]
        names += [f"decode {batch.request_slots.shape[0]} rows" for batch in decodes]
        begin = time.perf_counter()
        seconds = engine._runner.compile(prefills, decodes)
        self.add(f"compile all {len(names)} programs, {label}", time.perf_counter() - begin, "s")
        for name, took in zip(names, seconds, strict=True):
            self.add(f"compile {name}, {label}", took, "s")

    def compile_whole_model(self, rows: int, tokens: int) -> None:
        """Compile time of programs of all the released layers; only shapes, so they need no memory."""
        config = cut_config(WHOLE_LAYERS, tiny=self.tiny)
        engine = self.engine(0, rows, tokens)
        params = model_shapes(config)
        sizes = geometry(params, engine.config, engine.plan.num_blocks, engine.plan.num_state_slots)
        cache = jax.eval_shape(functools.partial(caches.create, config, **sizes))
        run = compiled_steps.compile_steps(params, config, fp8_latents=False, top_logprobs=MOST_LOGPROBS)
        prefills, decodes = engine.padding_batches()
        for name, step, batch in (
            (f"decode {rows} rows", run.decode, decodes[-1]),
            (f"prefill {tokens} tokens", run.prefill, prefills[-1]),
        ):
            batch = engine._runner._with_mask(batch, 1)
            begin = time.perf_counter()
            lowered = step.lower(params, cache, batch)
            lowering = time.perf_counter() - begin
            lowered.compile()
            seconds = time.perf_counter() - begin
            label = f"compile {name}, {WHOLE_LAYERS} layers of shapes alone, beside a model"
            self.add(f"{label}, tracing and lowering", lowering, "s")
            self.add(label, seconds, "s", target=30.0)

    def decode(self, engine: Engine, drafts: int, rows: int) -> float:
        """Milliseconds of an engine step with `rows` decoding answers, everything included."""
        rng = np.random.default_rng(0)
        sampling = SamplingParams(temperature=0, max_tokens=self.context - 64, ignore_eos=True)
        requests = [
            engine.submit(rng.integers(0, self.config.vocab_size, self.context // 2).tolist(), sampling)
            for _ in range(rows)
        ]
        while engine._scheduler.waiting or any(not a.placement.decoding for a in engine._scheduler.running):
            engine.step()
        for _ in range(5):
            engine.step()

        def steps() -> None:
            for _ in range(STEPS):
                engine.step()
            while engine._unread:
                engine._read(engine._unread.popleft())

        begin = time.perf_counter()
        steps()
        wall = (time.perf_counter() - begin) / STEPS
        busy, by_name = kernel_seconds(steps)
        self.add(
            f"decode step, {rows} rows, {drafts} drafts", wall * 1e3, "ms", floor=busy / STEPS * 1e3 or None
        )
        if busy:
            overhead = (wall * STEPS / busy - 1) * 100
            self.add(f"decode overhead over kernels, {rows} rows, {drafts} drafts", overhead, "%", target=15)
            for name, seconds in by_name.most_common(24):
                print(f"  {seconds / STEPS * 1e3:8.3f} ms  {name[:100]}")
        for request in requests:
            engine.abort(request)
        engine.run_until_idle()
        return wall * 1e3

    def prefill(self, engine: Engine, tokens: int) -> None:
        rng = np.random.default_rng(1)
        sampling = SamplingParams(temperature=0, max_tokens=1)
        length = min(self.context, tokens)
        count = 4 * tokens // length

        def run() -> None:
            for _ in range(count):
                engine.submit(rng.integers(0, self.config.vocab_size, length).tolist(), sampling)
            engine.run_until_idle()

        run()
        begin = time.perf_counter()
        run()
        rate = count * length / (time.perf_counter() - begin)
        busy, by_name = kernel_seconds(run)
        floor = count * length / busy if busy else None
        self.add(f"prefill, chunks of {tokens}", rate, "tokens/s", better="higher", floor=floor)
        for name, seconds in by_name.most_common(24):
            print(f"  {seconds / 4 * 1e3:8.3f} ms a chunk  {name[:100]}")

    def run(self, parts: Sequence[str]) -> None:
        jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        rows = (1, 2, 3) if self.tiny else (1, 32, 64)
        chunk = 64 if self.tiny else 8192
        engine = self.engine(0, rows[-1], chunk)
        if "compile" in parts:
            self.compile_all(engine, "cold")
            jax.clear_caches()
            compiled_steps._single_device.cache_clear()
            engine = self.engine(0, rows[-1], chunk)
            self.compile_all(engine, "from the persistent cache")
        # Requests come and go, so every bucket's program is needed, not only those measured.
        engine.warm_up()
        plain = {n: self.decode(engine, 0, n) for n in rows}
        self.prefill(engine, chunk)
        if "drafts" in parts:
            drafting = self.engine(3, rows[1], chunk)
            drafting.warm_up()
            drafted = self.decode(drafting, 3, rows[1])
            name = f"a step with 3 drafts over one without, {rows[1]} rows"
            self.add(name, drafted / plain[rows[1]], "x")
        if "whole" in parts:
            self.compile_whole_model(rows[1], chunk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes on a CPU: a rehearsal, nothing written"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS,
        help="besides decode and prefill: compile times of every bucket, drafts, programs of all 45 layers",
    )  # fmt: skip
    options = parser.parse_args()
    bench = Bench(options.tiny, options.layers)
    try:
        bench.run(options.parts)
    finally:
        print(table(bench.rows))


if __name__ == "__main__":
    main()
