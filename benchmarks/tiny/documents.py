"""Conversations as text: each kind of document is many turns of one sort, cut to length by the batcher."""

import functools
import random
from pathlib import Path
from typing import Any

from benchmarks.tiny import recall, words
from benchmarks.tiny.problems import Problem, draw_problem
from benchmarks.tiny.tools import TOOLS, Tool, json_turns, tool_turns
from glm_jax.chat import ChatTemplate

Message = dict[str, Any]
TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")
KINDS = ("problems", "recall", "tools")

# Mean tokens of a turn, rounded down: a document gets enough turns to fill its length.
PROBLEM_TOKENS = 45
RECORD_TOKENS = 7
QUESTION_TOKENS = 16
TOOL_TURN_TOKENS = 45


@functools.cache
def _template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE_PATH.read_text(encoding="utf-8"))


def render(
    messages: list[Message], tools: tuple[Tool, ...] = (), *, effort: str = "max", generate: bool = False
) -> str:
    """The prompt text of a conversation; `generate` opens the assistant's next turn."""
    signatures = [tool.signature() for tool in tools]
    return _template().render(
        messages, tools=signatures, add_generation_prompt=generate, reasoning_effort=effort
    )


def problem_turns(problem: Problem, thinking: bool) -> list[Message]:
    """The thought stands inside <think> or, for clients that send no reasoning back, in the answer itself."""
    answer = f"#### {problem.answer}"
    if thinking:
        reply = {"role": "assistant", "reasoning_content": problem.thought, "content": answer}
    else:
        reply = {"role": "assistant", "content": f"{problem.thought}\n{answer}"}
    return [{"role": "user", "content": problem.question}, reply]


def recall_turns(question: str, key: str, value: str, thinking: bool) -> list[Message]:
    reply = {"role": "assistant", "content": f"#### {value}"}
    if thinking:
        reply["reasoning_content"] = recall.thought(key, value)
    return [{"role": "user", "content": question}, reply]


def draw_tools(r: random.Random, length: int) -> tuple[Tool, ...]:
    """One to four tools, few enough that their signatures leave room for turns."""
    return tuple(r.sample(TOOLS, r.randint(1, min(4, 1 + length // 400))))


def draw_document(kind: str, r: random.Random, length: int) -> str:
    """Text of a training document of about `length` tokens or more, ending in a next user turn's role token.

    kind: one of KINDS. Low reasoning effort goes with an empty <think>; so does a tenth of the rest, as
    clients that send no reasoning back make such chats.
    """
    thinking = r.random() < 0.8
    effort = r.choice(("max", "max", "max", "high")) if thinking or r.random() < 0.5 else "low"
    if kind == "problems":
        count = length // PROBLEM_TOKENS + 1
        messages = [m for _ in range(count) for m in problem_turns(draw_problem(r), thinking)]
        return render(messages, effort=effort) + "<|user|>"
    if kind == "recall":
        return _recall_document(r, length, thinking, effort)
    if kind == "tools":
        tools = draw_tools(r, length) if r.random() < 0.75 else ()
        messages = []
        for _ in range(length // TOOL_TURN_TOKENS + 1):
            draw = r.random()
            if tools and draw < 0.7:
                messages += tool_turns(r, tools)
            elif draw < 0.9:
                messages += json_turns(r)
            else:
                messages += problem_turns(draw_problem(r), thinking)
        return render(messages, tools, effort=effort) + "<|user|>"
    raise ValueError(f"document kind {kind!r} is none of {KINDS}")


def _recall_document(r: random.Random, length: int, thinking: bool, effort: str) -> str:
    most = min(int(0.96 * length - 40) // RECORD_TOKENS, len(words.KEYS))
    records = recall.draw_records(r, r.randint(max(2, most // 6), most))
    keys = list(records)
    count = (length - RECORD_TOKENS * len(records)) // QUESTION_TOKENS + 1
    asked = [key for _ in range(count // len(keys) + 1) for key in r.sample(keys, len(keys))][:count]
    messages: list[Message] = []
    for key in asked:
        messages += recall_turns(recall.question(r, key), key, records[key], thinking)
    messages[0]["content"] = recall.list_text(r, records) + messages[0]["content"]
    return render(messages, effort=effort) + "<|user|>"
