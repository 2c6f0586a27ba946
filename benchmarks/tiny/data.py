"""Batches: token ids with a class for every token, made by worker processes from a seed and a counter."""

import dataclasses
import random
from collections import deque
from collections.abc import Iterator
from multiprocessing.pool import Pool

import numpy as np
from tokenizers import Tokenizer

from benchmarks.tiny import recall
from benchmarks.tiny.documents import KINDS, draw_document

# Token classes: what a token is to the loss that predicts it.
PADDING, LISTED, CONTEXT, ANSWER, RECALLED = range(5)
Batch = tuple[np.ndarray, np.ndarray]
LOOKAHEAD = 4  # targets past the last row: one for the next token, three more for the chained MTP steps


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """rows x length tokens; `mix` gives the shares of KINDS, which sum to 1."""

    rows: int
    length: int
    mix: tuple[float, float, float]


class Encoder:
    """Text to token ids and classes."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        roles = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
        self.roles = np.array([tokenizer.token_to_id(role) for role in roles])
        self.assistant = tokenizer.token_to_id("<|assistant|>")
        vocabulary = tokenizer.get_vocab()
        self.digits = np.array([i for text, i in vocabulary.items() if text.lstrip("\u0120").isdigit()])

    def encode(self, text: str, kind: str) -> Batch:
        """ids and classes, both [tokens]. A token is an ANSWER when the assistant has the turn before it."""
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        last_role = np.maximum.accumulate(np.where(np.isin(ids, self.roles), np.arange(len(ids)), 0))
        answered = np.roll(ids[last_role] == self.assistant, 1)
        answered[0] = False
        classes = np.where(answered, ANSWER, LISTED if kind == "recall" else CONTEXT)
        if kind == "recall":
            digits = answered & np.isin(ids, self.digits)
            place = np.cumsum(digits) - np.cumsum(digits)[last_role]
            classes[digits & (place <= recall.DIGITS)] = RECALLED  # later digits of a turn repeat the first
        return ids, classes.astype(np.uint8)

    def batch(self, spec: BatchSpec, seed: int) -> Batch:
        """ids uint16, classes uint8, both [rows, length + LOOKAHEAD]; kinds in proportion, in fixed order."""
        r = random.Random(seed)
        width = spec.length + LOOKAHEAD
        ids = np.zeros((spec.rows, width), np.uint16)
        classes = np.zeros((spec.rows, width), np.uint8)
        bounds = np.round(np.cumsum(spec.mix) * spec.rows)
        for row in range(spec.rows):
            kind = KINDS[int(np.searchsorted(bounds, row, side="right"))]
            tokens, token_classes = self.encode(draw_document(kind, r, width), kind)
            count = min(len(tokens), width)
            ids[row, :count] = tokens[:count]
            classes[row, :count] = token_classes[:count]
        return ids, classes


_encoder: Encoder | None = None


def initialise_worker(tokenizer_json: str) -> None:
    global _encoder
    _encoder = Encoder(Tokenizer.from_str(tokenizer_json))


def _worker_batch(spec: BatchSpec, seed: int) -> Batch:
    assert _encoder is not None, "initialise_worker runs first in every worker"
    return _encoder.batch(spec, seed)


def batches(pool: Pool, spec: BatchSpec, seed: int, ahead: int) -> Iterator[Batch]:
    """Endless batches number seed, seed + 1, ... with `ahead` of them in the making."""
    queue = deque(pool.apply_async(_worker_batch, (spec, seed + i)) for i in range(ahead))
    number = seed + ahead
    while True:
        ready = queue.popleft().get()
        queue.append(pool.apply_async(_worker_batch, (spec, number)))
        number += 1
        yield ready
