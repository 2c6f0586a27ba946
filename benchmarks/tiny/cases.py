"""Held-out test cases: a prompt as a client would send it, and the one right answer."""

import dataclasses
import random
from collections.abc import Callable

import numpy as np

from benchmarks.tiny import recall
from benchmarks.tiny.documents import Message, draw_tools, problem_turns, render
from benchmarks.tiny.problems import draw_problem
from benchmarks.tiny.tools import Tool, json_turns, tool_turns

# Of a recall case, measured: everything but the list, and a record of it.
OVERHEAD_TOKENS = 28
RECORD_TOKENS = 7

Encode = Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True)
class Case:
    """ids: prompt and answer, the answer's closing role token last; the answer begins at start.

    Greedy decoding gives exactly this answer when at every row from start - 1 on the best token is the next.
    """

    ids: list[int]
    start: int

    @property
    def stop(self) -> int:
        return len(self.ids)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Cases padded on the right: tokens [cases, time] int32; start, stop [cases] of the answers."""

    tokens: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def problem_case(r: random.Random, encode: Encode, shots: int) -> Case:
    """`shots` solved problems of the training side, then a held-out one, each with its thought."""
    turns = [m for _ in range(shots) for m in problem_turns(draw_problem(r), thinking=True)]
    turns += problem_turns(draw_problem(r, test=True), thinking=True)
    return _case(encode, turns, (), "<|user|>")


def recall_case(r: random.Random, encode: Encode, tokens: int) -> Case:
    """One question about a held-out record somewhere in a list that brings the prompt to about `tokens`."""
    count = max(2, (tokens - OVERHEAD_TOKENS) // RECORD_TOKENS)
    records = list(recall.draw_records(r, count, held_out_key=True).items())
    key, value = records[-1]
    r.shuffle(records)
    question = recall.list_text(r, dict(records)) + recall.question(r, key)
    answer = {
        "role": "assistant",
        "reasoning_content": recall.thought(key, value),
        "content": f"#### {value}",
    }
    return _case(encode, [{"role": "user", "content": question}, answer], (), "<|user|>")


def tool_case(r: random.Random, encode: Encode) -> Case:
    """A held-out call, asked after two used tools of the training side; the call ends in <|observation|>."""
    tools = draw_tools(r, 2048)
    while all(not tool.arguments for tool in tools):
        tools = draw_tools(r, 2048)
    turns = tool_turns(r, tools) + tool_turns(r, tools) + tool_turns(r, tools, test=True)[:2]
    return _case(encode, turns, tools, "<|observation|>")


def json_case(r: random.Random, encode: Encode) -> Case:
    """A held-out sentence after two of the training side."""
    return _case(encode, json_turns(r) + json_turns(r) + json_turns(r, test=True), (), "<|user|>")


def _case(encode: Encode, turns: list[Message], tools: tuple[Tool, ...], closing: str) -> Case:
    prompt = encode(render(turns[:-1], tools, generate=True))
    whole = encode(render(turns, tools) + closing)
    if whole[: len(prompt)] != prompt:
        raise ValueError("the prompt's tokens are not a prefix of the conversation's")
    return Case(whole, len(prompt))


def collate(cases: list[Case], pad_id: int, multiple: int = 128) -> Batch:
    """Pads to a common length, rounded up so that similar sets share a compiled program."""
    time = -(-max(case.stop for case in cases) // multiple) * multiple
    tokens = np.full((len(cases), time), pad_id, np.int32)
    for row, case in zip(tokens, cases, strict=True):
        row[: case.stop] = case.ids
    return Batch(tokens, np.array([c.start for c in cases]), np.array([c.stop for c in cases]))
