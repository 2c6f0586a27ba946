"""The engine: takes requests, yields tokens. All but `prepare` belongs to the one thread that steps it.

A step plans on the host's tables, dispatches at most one prefill and one decode, and reads the outputs of the
step before: the device works on step n + 1 while the host turns step n into text. Nothing a plan needs waits
for an output: positions and drafts of running answers live on the device.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np

from glm_jax.config import Config
from glm_jax.params import Params
from glm_jax.sampling_params import MOST_LOGPROBS, SamplingParams
from glm_jax.steps import DecodeBatch, PrefillBatch, StepOutput
from glm_jax.tokenizer import Tokenizer
from serving import batches
from serving.block_pool import BlockPool
from serving.engine_config import EngineConfig
from serving.errors import QueueFullError
from serving.grammar import mask_of
from serving.intake import Intake
from serving.memory_plan import MemoryPlan, geometry, plan_memory
from serving.model_runner import ModelRunner, Runner
from serving.plan import Chunk, Plan, Window
from serving.prefix_cache import PrefixCache
from serving.request import Answer, Delta, Request, Status
from serving.sampler_tables import needs_tables, tables_of
from serving.scheduler import Scheduler
from serving.state_pool import StatePool
from serving.statistics import Statistics
from serving.token_logprobs import LogprobReader
from serving.trace import Trace


class Model(Protocol):
    """What the engine reads of `glm_jax.load`'s result."""

    @property
    def config(self) -> Config: ...
    @property
    def params(self) -> Params: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """A step on the device."""

    plan: Plan
    prefill: StepOutput | None = None
    decode: StepOutput | None = None
    first_logprobs: LogprobReader | None = None  # of the tokens that prefill draws
    logprobs: LogprobReader | None = None  # of decode's
    prompt_logprobs: LogprobReader | None = None


class Engine:
    """Continuous batching of requests over one model.

    Answers depend on the request alone: not on what else runs, how prompts are cut into chunks, the number of
    drafts, what was cached, or preemptions.
    """

    def __init__(
        self, model: Model, config: EngineConfig | None = None, *, runner: Runner | None = None
    ) -> None:
        """`runner` replaces the device side, for tests. Raises ValueError where the limits do not fit."""
        self.config = config or EngineConfig()
        self.plan: MemoryPlan = plan_memory(model.params, model.config, self.config)
        self.tokenizer = model.tokenizer
        self._vocab_size = model.config.vocab_size
        sizes = geometry(model.params, self.config, self.plan.num_blocks, self.plan.num_state_slots)
        self._runner = runner or ModelRunner(model.params, model.config, sizes, top_logprobs=MOST_LOGPROBS)
        self._cache = PrefixCache(
            BlockPool(self.plan.num_blocks),
            StatePool(self.plan.num_state_slots),
            self.config.block_size,
            spacing=self.config.snapshot_spacing,
        )
        self._scheduler = Scheduler(
            self.config, self._cache, max_model_len=self.plan.max_model_len, window=self._runner.window
        )
        self._intake = Intake(
            model.config,
            model.tokenizer,
            max_model_len=self.plan.max_model_len,
            fingerprint=repr((model.config, sizes["dtype"], sizes["latent_dtype"], self.config.block_size)),
            shared_cache=self.config.enable_prefix_caching,
        )
        self._eos = model.config.eos_token_ids
        self._token_buckets = batches.token_buckets(self.config.max_num_batched_tokens)
        self._row_buckets = batches.row_buckets(self.config.max_num_seqs)
        self._unread: deque[_Dispatched] = deque()
        self._statistics = Statistics(self._runner.window)

    # --- requests -----------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Checks a request and builds it, changing nothing; safe on any thread.

        `priority`: lower runs first; `cache_salt`: requests share cached prefixes only under the same salt.
        Raises RequestError naming the value and the bound.
        """
        return self._intake.prepare(
            prompt, sampling or SamplingParams(), priority=priority, cache_salt=cache_salt
        )

    def add(self, request: Request) -> None:
        """Queues a prepared request, whatever the queue's length: ask `check_room` first."""
        if self.config.trace_requests:
            request.trace = Trace()
        for answer in request.answers:
            answer.note("submitted", prompt=len(request.prompt), priority=request.priority)
            self._scheduler.add(answer)

    def check_room(self, more: int = 0) -> None:
        """Raises QueueFullError if the queue is at its limit, `more` requests on their way to it counted;
        safe on any thread."""
        most = self.config.max_num_queued_reqs
        if most is not None and self._scheduler.waiting_requests + more >= most:
            raise QueueFullError(f"{most} requests are waiting, the most that --max-num-queued-reqs allows")

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Queues text or token ids; arguments and errors are those of `prepare` and `check_room`."""
        request = self.prepare(prompt, sampling, priority=priority, cache_salt=cache_salt)
        self.check_room()
        self.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Ends a request at any moment of its life; what it holds is free at once. Nothing once finished."""
        for answer in request.answers:
            if answer.status is not Status.FINISHED:
                self._end(answer, "abort")

    def reset_prefix_cache(self, external: bool = False, timeout_s: float = 30.0) -> bool:
        """Forgets every cached prefix. False, and nothing is forgotten, while a request runs or waits.

        Finished answers whose last state is still being kept are waited for, up to `timeout_s` seconds.
        `external` also clears the tiers behind the device; there are none yet.
        """
        until = time.monotonic() + timeout_s
        while self.has_work and not self._scheduler.running and not self._scheduler.waiting:
            if time.monotonic() > until:
                return False
            self.step()
        if self.has_work:
            return False
        self._cache.blocks.forget_all()
        self._cache.states.forget_all()
        return True

    # --- running ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._unread)

    def step(self) -> list[Delta]:
        """Runs one step and returns what was read meanwhile, per answer; nothing to do is an empty list."""
        begin = time.monotonic()
        deltas: list[Delta] = []
        if self._scheduler.guided:
            while self._unread:
                deltas += self._read(self._unread.popleft())
        plan = self._scheduler.schedule(may_preempt=not self._unread)
        if plan is None:
            while self._unread:
                deltas += self._read(self._unread.popleft())
            plan = self._scheduler.schedule(may_preempt=True)
        if plan:
            self._unread.append(self._dispatch(plan))
        ahead = 1 if plan and self.config.async_scheduling else 0
        while len(self._unread) > ahead:
            deltas += self._read(self._unread.popleft())
        self._statistics.step(time.monotonic() - begin)
        return deltas

    def run_until_idle(self) -> None:
        while self.has_work:
            self.step()

    def warm_up(self) -> int:
        """Compiles every program that requests can need, running each on padding. Returns their number."""
        prefills, decodes = self.padding_batches()
        self._runner.compile(prefills, decodes)
        for tokens, batch in zip(self._token_buckets, prefills, strict=True):
            output = self._runner.prefill(batch)
            self._prompt_logprobs(output, np.zeros(tokens, np.int32))
        self._runner.logprobs(output)  # every chunk's output has the same rows
        for windows in decodes:
            output = self._runner.decode(windows)
            self._runner.logprobs(output)
        self._runner.write_sampler_row(0, tables_of(None, self._eos, self._vocab_size))
        np.asarray(output.counts)  # waits for the device
        return 2 * len(self._token_buckets) + 2 * len(self._row_buckets) + 2

    def padding_batches(self) -> tuple[list[PrefillBatch], list[DecodeBatch]]:
        """Empty batches of every shape that steps have."""
        prefills = [batches.prefill_batch((), self._scheduler, tokens) for tokens in self._token_buckets]
        return prefills, [batches.decode_batch((), self._scheduler, rows) for rows in self._row_buckets]

    def stats(self) -> dict[str, float]:
        """Counts since the start, and what is held now."""
        scheduler, blocks, states = self._scheduler, self._cache.blocks, self._cache.states
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "total_blocks": blocks.size,
            "free_blocks": blocks.available,
            "cached_blocks": blocks.cached,
            "block_evictions": blocks.evictions,
            "total_state_slots": states.size,
            "free_state_slots": states.available,
            "cached_snapshots": states.cached,
            "snapshot_evictions": states.evictions,
            "preemptions": scheduler.preemptions,
            "prefix_cache_queries": scheduler.queries,
            "prefix_cache_hits": scheduler.hits,
            **self._statistics.as_dict(),
        }

    # --- inside -------------------------------------------------------------------------------------

    def _dispatch(self, plan: Plan) -> _Dispatched:
        step = _Dispatched(plan)
        for chunk in plan.prefill:
            answer, place = chunk.answer, chunk.placement
            if chunk.start == place.resumed_at and needs_tables(answer.request.sampling):
                self._runner.write_sampler_row(place.row, tables_of(answer, self._eos, self._vocab_size))
        if plan.prefill:
            needed = sum(chunk.length for chunk in plan.prefill)
            bucket = batches.smallest_bucket(self._token_buckets, needed)
            batch = batches.prefill_batch(plan.prefill, self._scheduler, bucket)
            guided = [
                c.answer.grammar.masks(()) if c.answer.grammar and c.last else None for c in plan.prefill
            ]
            batch = dataclasses.replace(
                batch, grammar=mask_of(guided, batch.request_slots.shape[0], 1, self._vocab_size)
            )
            output = self._runner.prefill(batch)
            step = dataclasses.replace(step, prefill=output)
            asked = [chunk.answer.request.sampling for chunk in plan.prefill]
            if any(c.last and c.answer.request.sampling.logprobs is not None for c in plan.prefill):
                step = dataclasses.replace(step, first_logprobs=LogprobReader(self._runner.logprobs(output)))
            if any(sampling.prompt_logprobs is not None for sampling in asked):
                reader = self._prompt_logprobs(output, batch.next_tokens)
                step = dataclasses.replace(step, prompt_logprobs=reader)
        if plan.decode:
            bucket = batches.smallest_bucket(self._row_buckets, len(plan.decode))
            windows = batches.decode_batch(plan.decode, self._scheduler, bucket)
            guided = [
                w.answer.grammar.masks(w.placement.drafts) if w.answer.grammar and w.limit else None
                for w in plan.decode
            ]
            width = self._runner.window
            windows = dataclasses.replace(windows, grammar=mask_of(guided, bucket, width, self._vocab_size))
            output = self._runner.decode(windows)
            step = dataclasses.replace(step, decode=output)
            if any(w.limit and w.answer.request.sampling.logprobs is not None for w in plan.decode):
                step = dataclasses.replace(step, logprobs=LogprobReader(self._runner.logprobs(output)))
        return step

    def _prompt_logprobs(self, prefill: StepOutput, targets: Any) -> LogprobReader:
        hidden = prefill.hidden
        return LogprobReader(self._runner.prompt_logprobs(cast(jax.Array, hidden), targets))

    def _read(self, step: _Dispatched) -> list[Delta]:
        """Turns a step's outputs into answers; waits for the device where it is not done."""
        deltas = []
        if step.prefill is not None:
            output = _HostOutput(step.prefill, step.first_logprobs)
            first = 0
            for row, chunk in enumerate(step.plan.prefill):
                self._statistics.prompted(chunk.length)
                if step.prompt_logprobs is not None:
                    self._read_prompt_logprobs(chunk, step.prompt_logprobs, first)
                first += chunk.length
                if chunk.last and chunk.answer.placement is chunk.placement:
                    deltas.append(self._extend(chunk.answer, output, row, "first token"))
        if step.decode is not None:
            output = _HostOutput(step.decode, step.logprobs)
            for row, window in enumerate(step.plan.decode):
                if window.limit:
                    deltas += self._read_window(window, output, row)
        return deltas

    def _read_window(self, window: Window, output: "_HostOutput", row: int) -> list[Delta]:
        count = int(output.counts[row])
        self._scheduler.read_window(window, count)
        answer = window.answer
        if answer.placement is not window.placement:
            return []  # finished, aborted or preempted since: nobody wants these tokens
        self._statistics.verified(count)
        delta = self._extend(answer, output, row, "window")
        self._scheduler.publish_answer(answer)
        return [delta]

    def _read_prompt_logprobs(self, chunk: Chunk, reader: LogprobReader, first: int) -> None:
        request = chunk.answer.request
        top = request.sampling.prompt_logprobs
        if top is None or chunk.answer.index:
            return
        for offset in range(chunk.length):
            position = chunk.start + offset + 1
            if len(request.prompt_logprobs) == position < len(request.prompt):
                token = int(request.prompt[position])
                request.prompt_logprobs.append(reader.at((first + offset,), token, top))

    def _extend(self, answer: Answer, output: "_HostOutput", row: int, what: str) -> Delta:
        """Adds a window's tokens; those past the answer's end are dropped. `what`: for the trace."""
        if not output.healthy[row]:
            # NaN logits: the request fails alone, and nothing it computed is read again
            self._statistics.unhealthy()
            return self._end(answer, "error")
        kept: list[int] = []
        text = ""
        for token in output.tokens[row, : output.counts[row]].tolist():
            kept.append(token)
            text += answer.processor.push(token)
            if answer.finish_reason is not None:
                break
        if answer.grammar is not None:
            answer.grammar.accept(kept)
            if answer.placement is not None:
                answer.placement.drafts = tuple(output.drafts()[row].tolist())
        top = answer.request.sampling.logprobs
        if top is not None and output.logprobs is not None:
            answer.logprobs.extend(output.logprobs.along(row, kept, top))
        self._statistics.generated(len(kept))
        answer.note(what, accepted=int(output.counts[row]) - 1, kept=len(kept))
        if answer.finish_reason is not None:
            self._finish(answer)
        return Delta(answer, tuple(kept), text, answer.finish_reason, answer.processor.stop_reason)

    def _end(self, answer: Answer, reason: str) -> Delta:
        """Ends an answer from outside."""
        shown = len(answer.text)
        answer.processor.stop(reason)
        self._finish(answer)
        return Delta(answer, (), answer.text[shown:], reason, None)

    def _finish(self, answer: Answer) -> None:
        self._scheduler.finish(answer)
        self._statistics.finished(answer.finish_reason or "")
        answer.note("finished", reason=answer.finish_reason or "", generated=len(answer.token_ids))


class _HostOutput:
    """A step's output on the host; making one waits for the step."""

    def __init__(self, output: StepOutput, logprobs: LogprobReader | None) -> None:
        self.counts = np.asarray(output.counts)
        self.tokens = np.asarray(output.tokens)
        self.healthy = np.asarray(output.healthy)
        self._drafts = output.drafts
        self.logprobs = logprobs

    def drafts(self) -> np.ndarray:
        """`[rows, window - 1]`, copied only when asked for."""
        return np.asarray(self._drafts)
