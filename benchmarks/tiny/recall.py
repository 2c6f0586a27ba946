"""Recall: a long list of records, then questions about single records."""

import random

from benchmarks.tiny import words
from benchmarks.tiny.splits import held_out

DIGITS = 3
INTROS = ("Keep this list.", "Remember these numbers.", "Here are the numbers.")
QUESTIONS = ("What is {key}?", "Which number has {key}?", "Give me {key}.")


def draw_records(r: random.Random, count: int, held_out_key: bool = False) -> dict[str, str]:
    """`count` records {key: three digits} of the training side; with `held_out_key`, the last is held out.

    An instance is a key with its value.
    Raises ValueError when the list asks for more keys than there are words.
    """
    if not 1 <= count <= len(words.KEYS):
        raise ValueError(f"a recall list holds 1 to {len(words.KEYS)} records, not {count}")
    keys = r.sample(words.KEYS, count)
    return {key: _value(r, key, held_out_key and i == count - 1) for i, key in enumerate(keys)}


def _value(r: random.Random, key: str, test: bool) -> str:
    while True:
        value = str(r.randint(10 ** (DIGITS - 1), 10**DIGITS - 1))
        if held_out("recall", key, value) == test:
            return value


def list_text(r: random.Random, records: dict[str, str]) -> str:
    """The list as a user writes it: an opening line, then one record a line, ending in a newline."""
    return r.choice(INTROS) + "\n" + "".join(f"- {key}: {value}\n" for key, value in records.items())


def question(r: random.Random, key: str) -> str:
    return r.choice(QUESTIONS).format(key=key)


def thought(key: str, value: str) -> str:
    return f"- {key}: {value}"
