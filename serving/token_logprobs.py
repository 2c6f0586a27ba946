"""Log-probabilities as callers see them."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from glm_jax.sampling import Logprobs


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of the raw logits at one position."""

    token_id: int
    logprob: float
    rank: int  # 1 for the most probable token
    top: tuple[tuple[int, float], ...]  # the most probable (id, logprob), best first


class LogprobReader:
    """Host copies of one output's log-probabilities, fetched when first asked for."""

    def __init__(self, logprobs: Logprobs) -> None:
        self._device = logprobs
        self._host: tuple[np.ndarray, ...] | None = None

    def at(self, index: tuple[int, ...], token_id: int, top: int) -> TokenLogprobs:
        """At one position (`[row, window]` or `[token]`), with the `top` best alternatives."""
        if self._host is None:
            d = self._device
            self._host = tuple(np.asarray(x) for x in (d.token, d.rank, d.top_ids, d.top))
        token, rank, ids, values = (x[index] for x in self._host)
        best = tuple(zip(ids[:top].tolist(), values[:top].tolist(), strict=True))
        return TokenLogprobs(token_id, float(token), int(rank), best)

    def along(self, row: int, token_ids: list[int], top: int) -> Iterator[TokenLogprobs]:
        """Of the first tokens of a row's window."""
        for column, token_id in enumerate(token_ids):
            yield self.at((row, column), token_id, top)
