"""Tool calls and JSON answers, in the formats that the model's chat template defines."""

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from benchmarks.tiny import words
from benchmarks.tiny.splits import held_out

Message = dict[str, Any]
Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function of the toy world: argument types by name, ways to ask for it, and what it answers.

    questions and reply are format strings over the arguments (and the result, in `reply`).
    """

    name: str
    description: str
    arguments: dict[str, str]
    questions: tuple[str, ...]
    sample: Callable[[random.Random], Arguments]
    result: Callable[[random.Random, Arguments], Any]
    reply: str

    def signature(self) -> dict[str, Any]:
        """The OpenAI-style description that a client sends."""
        properties = {name: {"type": kind} for name, kind in self.arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.arguments)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


TOOLS = (
    Tool(
        "get_weather",
        "Weather in a city",
        {"city": "string", "day": "string"},
        ("What is the weather in {city} on {day}?", "How warm is it in {city} on {day}?"),
        lambda r: {"city": r.choice(words.CITIES), "day": r.choice(words.DAYS)},
        lambda r, a: {"degrees": r.randint(1, 39)},
        "It is {degrees} degrees in {city}.",
    ),
    Tool(
        "get_day",
        "Day of today",
        {},
        ("What day is it?", "Which day is today?"),
        lambda r: {},
        lambda r, a: {"day": r.choice(words.DAYS)},
        "Today is {day}.",
    ),
    Tool(
        "add",
        "Add two numbers",
        {"a": "integer", "b": "integer"},
        ("Add {a} and {b}.", "What is {a} plus {b}?"),
        lambda r: {"a": r.randint(100, 999), "b": r.randint(100, 999)},
        lambda r, a: {"sum": a["a"] + a["b"]},
        "The sum is {sum}.",
    ),
    Tool(
        "count_items",
        "Count items in a room",
        {"item": "string", "room": "string"},
        ("How many {item} are in the {room}?", "Count the {item} in the {room}."),
        lambda r: {"item": r.choice(words.ITEMS), "room": r.choice(words.ROOMS)},
        lambda r, a: {"count": r.randint(2, 99)},
        "There are {count} {item} in the {room}.",
    ),
    Tool(
        "set_lock",
        "Lock a door",
        {"room": "string", "hour": "integer", "lock": "boolean"},
        ("{verb} the {room} door at {hour}.", "Please {verb} the door of the {room} at {hour}."),
        lambda r: {"room": r.choice(words.ROOMS), "hour": r.randint(1, 23), "lock": r.random() < 0.5},
        lambda r, a: {"ok": True},
        "Done.",
    ),
    Tool(
        "set_alarm",
        "Set an alarm",
        {"day": "string", "hour": "integer"},
        ("Wake me on {day} at {hour}.", "Set an alarm for {day} at {hour}."),
        lambda r: {"day": r.choice(words.DAYS), "hour": r.randint(1, 23)},
        lambda r, a: {"ok": True},
        "Your alarm is set for {day} at {hour}.",
    ),
    Tool(
        "send_note",
        "Send a note",
        {"to": "string", "text": "string"},
        ("Send {to} this note: buy {text}.", "Tell {to} to buy {text}."),
        lambda r: {"to": r.choice(words.NAMES), "text": f"{r.randint(2, 99)} {r.choice(words.ITEMS)}"},
        lambda r, a: {"ok": True},
        "I sent the note to {to}.",
    ),
)


def tool_turns(r: random.Random, tools: tuple[Tool, ...], test: bool = False) -> list[Message]:
    """User question, assistant call, tool result, assistant reply: one use of one of `tools`.

    An instance is a tool with its arguments; a call without arguments belongs to the training side.
    """
    while True:
        tool = r.choice(tools)
        arguments = tool.sample(r)
        if (held_out(tool.name, *arguments.values()) if arguments else False) == test:
            break
    values = dict(arguments, verb="lock" if arguments.get("lock") else "open")
    result = tool.result(r, arguments)
    call = {"id": "call_0", "type": "function", "function": {"name": tool.name, "arguments": arguments}}
    return [
        {"role": "user", "content": r.choice(tool.questions).format(**values)},
        {
            "role": "assistant",
            "reasoning_content": f"I call {tool.name}.",
            "content": "",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": json.dumps(result)},
        {"role": "assistant", "reasoning_content": "", "content": tool.reply.format(**values, **result)},
    ]


def _purchase(r: random.Random) -> tuple[str, Arguments]:
    record = {"name": r.choice(words.NAMES), "item": r.choice(words.ITEMS), "count": r.randint(2, 99)}
    return "{name} buys {count} {item}.".format(**record), record


def _meeting(r: random.Random) -> tuple[str, Arguments]:
    record = {"name": r.choice(words.NAMES), "day": r.choice(words.DAYS), "hour": r.randint(1, 23)}
    return "{name} comes on {day} at {hour}.".format(**record), record


def _trip(r: random.Random) -> tuple[str, Arguments]:
    record = {"from": r.choice(words.CITIES), "to": r.choice(words.CITIES), "days": r.randint(2, 30)}
    return "A trip from {from} to {to} takes {days} days.".format(**record), record


def _pair(r: random.Random) -> tuple[str, Arguments]:
    names, room = r.sample(words.NAMES, 2), r.choice(words.ROOMS)
    return f"{names[0]} and {names[1]} are in the {room}.", {"names": names, "room": room}


SENTENCES = (_purchase, _meeting, _trip, _pair)


def json_turns(r: random.Random, test: bool = False) -> list[Message]:
    """A sentence to be answered as one JSON object, with the keys named in the question."""
    while True:
        sentence = r.choice(SENTENCES)
        text, record = sentence(r)
        if held_out(sentence.__name__, *record.values()) == test:
            break
    keys = list(record)
    ask = r.choice(("Reply in JSON with {keys}: {text}", "Give JSON with {keys}: {text}"))
    question = ask.format(keys=", ".join(keys[:-1]) + " and " + keys[-1], text=text)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "reasoning_content": "I answer in JSON.", "content": json.dumps(record)},
    ]
