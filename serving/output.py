"""From sampled tokens to an answer: text, and where it ends."""

from collections.abc import Sequence

from glm_jax.sampling_params import SamplingParams
from glm_jax.tokenizer import Detokenizer, StopMatcher, Tokenizer


class AnswerProcessor:
    """Takes an answer's tokens one by one; the result is the same however they were grouped into steps.

    An end token counts as a token of the answer but adds no text. A stop string ends the answer with the
    token that completes it and cuts the text before it (after it with `include_stop_str_in_output`), unless
    that is one of the first `min_tokens` tokens.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        eos_token_ids: Sequence[int],
        max_tokens: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._max_tokens = max_tokens
        self._min_tokens = sampling.min_tokens
        self._include_stop = sampling.include_stop_str_in_output
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(sampling.stop_ids)
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        )
        self._matcher = StopMatcher(sampling.stop_strings, include_stop=self._include_stop)

    def push(self, token_id: int) -> str:
        """Adds a token, returns the text that can now be shown. Not to be called once `finish_reason` is
        set."""
        self.token_ids.append(token_id)
        ends = token_id in self._eos or token_id in self._stop_ids
        shown = ""
        if self._detokenizer is not None and (not ends or self._include_stop):
            may_stop = len(self.token_ids) > self._min_tokens
            shown = self._matcher.push(self._detokenizer.push(token_id), may_match=may_stop)
        if ends:
            reason = None if token_id in self._eos and token_id not in self._stop_ids else token_id
            shown += self._finish("stop", reason)
        elif self._matcher.matched is not None:
            shown += self._finish("stop", self._matcher.matched)
        elif len(self.token_ids) >= self._max_tokens:
            shown += self._finish("length", None)
        self.text += shown
        return shown

    def stop(self, reason: str) -> None:
        """Ends the answer from outside (abort, error); what was held back becomes part of the text."""
        self.text += self._finish(reason, None)

    def _finish(self, reason: str, stop_reason: str | int | None) -> str:
        """Ends the answer, returns the text held back so far."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer is None or self._matcher.matched is not None:
            return ""
        rest = self._matcher.push(self._detokenizer.finish())
        return rest + self._matcher.finish()
