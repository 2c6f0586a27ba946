"""Guided decoding: which tokens an answer's grammar allows next, drafts included.

llguidance does the parsing.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from glm_jax.errors import RequestError
from glm_jax.sampling import GrammarMask
from glm_jax.tokenizer import Tokenizer

ANYTHING = np.uint32(0xFFFFFFFF)


class GrammarState:
    """How far one answer has got in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, words: int, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._ends = ends

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Allowed tokens at each position of a window, `[1 + len(drafts), words]` uint32.

        Position w allows what may follow the answer and the first w drafts. Behind a draft that the grammar
        forbids nothing is masked: that draft cannot be accepted.
        """
        masks = np.full((1 + len(drafts), self._words), ANYTHING)
        consumed = 0
        for position in range(len(masks)):
            if self._matcher.is_stopped():
                masks[position] = 0
                for token in self._ends:
                    masks[position, token // 32] |= np.uint32(1 << token % 32)
                break
            llguidance.numpy.fill_next_token_bitmask(self._matcher, masks.view(np.int32), position)
            if position < len(drafts):
                if self._matcher.validate_tokens([drafts[position]]) != 1:
                    break
                self._matcher.consume_token(drafts[position])
                consumed += 1
        if consumed:
            self._matcher.rollback(consumed)
        return masks

    def accept(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens, all drawn under `masks`."""
        for token in tokens:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)


class Grammars:
    """Compiles what requests ask for; safe on any thread."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._backend: llguidance.LLTokenizer | None = None  # made with the first guided request

    def start(self, structure: Mapping[str, Any]) -> GrammarState:
        """The state before an answer's first token.

        Raises RequestError for a grammar that does not compile.
        """
        if self._tokenizer is None:
            raise RequestError(
                "structured_outputs need a tokenizer, and this checkpoint has none", "structured_outputs"
            )
        if self._backend is None:
            self._backend = llguidance.LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=list(self._eos)
            )
        matcher = llguidance.LLMatcher(self._backend, _grammar(structure))
        if matcher.is_error():
            raise RequestError(f"structured_outputs: {matcher.get_error()}", "structured_outputs")
        return GrammarState(matcher, -(-self._vocab_size // 32), self._eos)


def _grammar(structure: Mapping[str, Any]) -> str:
    ((kind, value),) = structure.items()
    compile_ = llguidance.LLMatcher
    try:
        if kind == "json":
            return compile_.grammar_from_json_schema(value if isinstance(value, str) else json.dumps(value))
        if kind == "json_object":
            return compile_.grammar_from_json_schema('{"type": "object"}')
        if kind == "regex":
            return compile_.grammar_from_regex(value)
        if kind == "choice":
            return compile_.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in value))
        return compile_.grammar_from_lark(value)
    except (TypeError, ValueError) as error:
        raise RequestError(f"structured_outputs: {error}", "structured_outputs") from error


def mask_of(
    masks: Sequence[np.ndarray | None], rows: int, window: int, vocab_size: int
) -> GrammarMask | None:
    """The rows' masks as one batch, None if no row is guided; missing rows and positions allow anything."""
    if all(mask is None for mask in masks):
        return None
    # the fields are declared as `jax.Array`; jit takes numpy arrays in their place
    words: Any = np.full((rows, window, -(-vocab_size // 32)), ANYTHING)
    active: Any = np.True_
    for row, mask in enumerate(masks):
        if mask is not None:
            words[row, : len(mask)] = mask
    return GrammarMask(words, active)
