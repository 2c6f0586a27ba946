"""The engine: takes requests, yields tokens. Everything but `prepare` belongs to the one thread that steps
it."""

import secrets
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from glm_jax.config import Config
from glm_jax.errors import RequestError
from glm_jax.params import Params
from glm_jax.sampling_params import SamplingParams
from glm_jax.steps import StepOutput
from glm_jax.tokenizer import Tokenizer
from serving import batches
from serving.engine_config import EngineConfig
from serving.memory_plan import MemoryPlan, geometry, plan_memory
from serving.model_runner import ModelRunner, Runner
from serving.output import AnswerProcessor
from serving.request import Answer, Delta, Request, Status
from serving.scheduler import Plan, Scheduler


class Model(Protocol):
    """What the engine reads of `glm_jax.load`'s result."""

    @property
    def config(self) -> Config: ...
    @property
    def params(self) -> Params: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...


class Engine:
    """Continuous batching of requests over one model.

    Answers depend on the request alone: not on what else runs, how prompts are cut into chunks or the rows
    used.
    """

    def __init__(
        self, model: Model, config: EngineConfig | None = None, *, runner: Runner | None = None
    ) -> None:
        """`runner` replaces the device side, for tests. Raises ValueError where the limits do not fit."""
        self.config = config or EngineConfig()
        self.plan: MemoryPlan = plan_memory(model.params, model.config, self.config)
        self.tokenizer = model.tokenizer
        self._model_config = model.config
        self._runner = runner or ModelRunner(
            model.params, model.config, geometry(self.config, self.plan.num_blocks)
        )
        self._scheduler = Scheduler(
            self.config,
            num_blocks=self.plan.num_blocks,
            max_model_len=self.plan.max_model_len,
            window=self._runner.window,
        )
        self._token_buckets = batches.token_buckets(self.config.max_num_batched_tokens)
        self._row_buckets = batches.row_buckets(self.config.max_num_seqs)
        self._generated = self._prompted = self._steps = 0

    # --- requests -----------------------------------------------------------------------------------

    def prepare(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> Request:
        """Checks a request and builds it, changing nothing; safe on any thread.

        Raises RequestError naming the value and the bound.
        """
        sampling = sampling or SamplingParams()
        tokens = self._tokens(prompt)
        room = self.plan.max_model_len - len(tokens)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        if sampling.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none", "stop")
        request = Request(
            prompt=tokens,
            sampling=sampling,
            seed=secrets.randbits(32) if sampling.seed is None else _fold(sampling.seed),
            limit=len(tokens) + max_tokens - 1,
        )
        eos = self._model_config.eos_token_ids
        request.answers = tuple(
            Answer(request, index, AnswerProcessor(sampling, eos, max_tokens, self.tokenizer))
            for index in range(sampling.n)
        )
        return request

    def add(self, request: Request) -> None:
        """Queues a prepared request."""
        for answer in request.answers:
            self._scheduler.add(answer)

    def submit(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> Request:
        """Queues text or token ids. Raises RequestError, and queues nothing, if the request cannot be
        served."""
        request = self.prepare(prompt, sampling)
        self.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Ends a request at any moment of its life; what it holds is free at once. No effect once
        finished."""
        for answer in request.answers:
            if answer.status is not Status.FINISHED:
                answer.processor.stop("abort")
                self._scheduler.finish(answer)

    # --- running ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    def step(self) -> list[Delta]:
        """Runs one step and returns what it added to which answers; nothing to do is an empty list."""
        plan = self._scheduler.schedule()
        prefill, decode = self._dispatch(plan)
        deltas = []
        if prefill is not None:
            counts, tokens = np.asarray(prefill.counts), np.asarray(prefill.tokens)
            for row, chunk in enumerate(plan.prefill):
                self._prompted += chunk.length
                if chunk.last:
                    deltas.append(self._extend(chunk.answer, tokens[row, : counts[row]]))
        if decode is not None:
            counts, tokens = np.asarray(decode.counts), np.asarray(decode.tokens)
            for row, answer in enumerate(plan.decode):
                deltas.append(self._extend(answer, tokens[row, : counts[row]]))
        self._steps += 1
        return deltas

    def run_until_idle(self) -> None:
        while self.has_work:
            self.step()

    def warm_up(self) -> int:
        """Compiles every program that requests can need, by running each on padding. Returns how many."""
        for tokens in self._token_buckets:
            self._runner.prefill(batches.prefill_batch((), self._scheduler, tokens))
        for rows in self._row_buckets:
            output = self._runner.decode(batches.decode_batch((), self._scheduler, rows))
        np.asarray(output.counts)  # waits for the device
        return len(self._token_buckets) + len(self._row_buckets)

    def stats(self) -> dict[str, int]:
        """Counts since the start, and what is held now."""
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "total_blocks": scheduler.blocks.size,
            "free_blocks": scheduler.blocks.available,
            "total_state_slots": scheduler.state_slots.size,
            "free_state_slots": scheduler.state_slots.available,
            "steps": self._steps,
            "prompt_tokens": self._prompted,
            "generation_tokens": self._generated,
        }

    # --- inside -------------------------------------------------------------------------------------

    def _dispatch(self, plan: Plan) -> tuple[StepOutput | None, StepOutput | None]:
        prefill = decode = None
        if plan.prefill:
            needed = sum(chunk.length for chunk in plan.prefill)
            bucket = batches.smallest_bucket(self._token_buckets, needed)
            prefill = self._runner.prefill(batches.prefill_batch(plan.prefill, self._scheduler, bucket))
        if plan.decode:
            bucket = batches.smallest_bucket(self._row_buckets, len(plan.decode))
            decode = self._runner.decode(batches.decode_batch(plan.decode, self._scheduler, bucket))
        return prefill, decode

    def _extend(self, answer: Answer, tokens: np.ndarray) -> Delta:
        """Adds a window's tokens; those past the answer's end are dropped."""
        kept: list[int] = []
        text = ""
        for token in tokens.tolist():
            kept.append(token)
            text += answer.processor.push(token)
            if answer.finish_reason is not None:
                self._scheduler.finish(answer)
                break
        self._generated += len(kept)
        return Delta(answer, tuple(kept), text, answer.finish_reason, answer.processor.stop_reason)

    def _tokens(self, prompt: str | Sequence[int]) -> np.ndarray:
        """The prompt as `[tokens]` int32, checked."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer, and this checkpoint has none", "prompt")
            prompt = self.tokenizer.encode(prompt)
        if len(prompt) == 0:
            raise RequestError("The decoder prompt cannot be empty", "prompt")
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise RequestError("a prompt must be text or a list of integer token ids", "prompt")
        vocabulary, longest = self._model_config.vocab_size, self.plan.max_model_len
        if len(tokens) >= longest:
            raise RequestError(
                f"This model's maximum context length is {longest} tokens. However, your prompt contains "
                f"{len(tokens)} tokens, which leaves no room for an answer.",
                "prompt",
            )
        outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
        if len(outside):
            raise RequestError(f"token id {outside[0]} is outside the vocabulary [0, {vocabulary})", "prompt")
        return tokens.astype(np.int32)


def _fold(seed: int) -> int:
    """A seed of up to 64 bits as 32, all of them counting."""
    return (seed ^ (seed >> 32)) & 0xFFFFFFFF
