"""From what a caller hands in to a request the engine can run, or one clear error."""

import secrets
from collections.abc import Sequence

import numpy as np

from glm_jax.config import Config
from glm_jax.errors import RequestError
from glm_jax.sampling_params import SamplingParams
from glm_jax.tokenizer import Tokenizer
from serving.block_hash import root_hash
from serving.grammar import Grammars
from serving.output import AnswerProcessor
from serving.request import Answer, Request


class Intake:
    """Checks and builds requests; keeps no state, safe on any thread."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        fingerprint: str,
        shared_cache: bool,
    ) -> None:
        """`fingerprint`: what cached blocks depend on besides tokens; `shared_cache`: whether requests may
        read one another's."""
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._fingerprint = fingerprint
        self._shared_cache = shared_cache
        self._grammars = Grammars(tokenizer, config.vocab_size, config.eos_token_ids)

    def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Raises RequestError naming the value and the bound."""
        tokens = self._tokens(prompt)
        room = self._max_model_len - len(tokens)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        if sampling.stop_strings and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none", "stop")
        self._check_ids("allowed_token_ids", sampling.allowed_ids)
        self._check_ids("logit_bias", sampling.biased_ids)
        salt = cache_salt if self._shared_cache else secrets.token_hex(16)
        request = Request(
            prompt=tokens,
            sampling=sampling,
            seed=secrets.randbits(32) if sampling.seed is None else _fold(sampling.seed),
            limit=len(tokens) + max_tokens - 1,
            root=root_hash(self._fingerprint, salt),
            priority=priority,
        )
        eos = self._config.eos_token_ids
        structure = sampling.structured_outputs
        request.answers = tuple(
            Answer(
                request,
                index,
                AnswerProcessor(sampling, eos, max_tokens, self._tokenizer),
                None if structure is None else self._grammars.start(structure),
            )
            for index in range(sampling.n)
        )
        return request

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        vocabulary = self._config.vocab_size
        outside = [token for token in ids if not 0 <= token < vocabulary]
        if outside:
            raise RequestError(
                f"{name}: token id {outside[0]} is outside the vocabulary [0, {vocabulary})", name
            )

    def _tokens(self, prompt: str | Sequence[int]) -> np.ndarray:
        """The prompt as `[tokens]` int32, checked."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer, and this checkpoint has none", "prompt")
            prompt = self._tokenizer.encode(prompt)
        if len(prompt) == 0:
            raise RequestError("The decoder prompt cannot be empty", "prompt")
        tokens = np.asarray(prompt)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise RequestError("a prompt must be text or a list of integer token ids", "prompt")
        vocabulary, longest = self._config.vocab_size, self._max_model_len
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
