"""Grade-school word problems: thirteen templates, each with its numbers, its steps and its answer."""

import dataclasses
import random
from collections.abc import Callable

from benchmarks.tiny import words
from benchmarks.tiny.splits import held_out

Numbers = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Template:
    """question and steps are format strings; sample draws the numbers, the results of the steps among them.

    answer names the number that answers; verbs are alternatives for {v}.
    """

    name: str
    question: str
    sample: Callable[[random.Random], Numbers]
    steps: tuple[str, ...]
    answer: str
    verbs: tuple[str, ...] = ("",)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One instance: question text, thought text and the integer answer."""

    question: str
    thought: str
    answer: int


def _sum(r: random.Random) -> Numbers:
    a, b = r.randint(2, 99), r.randint(2, 99)
    return {"a": a, "b": b, "x": a + b}


def _difference(r: random.Random) -> Numbers:
    a = r.randint(5, 99)
    b = r.randint(2, a - 1)
    return {"a": a, "b": b, "x": a - b}


def _product(r: random.Random) -> Numbers:
    a, b = r.randint(2, 12), r.randint(2, 12)
    return {"a": a, "b": b, "x": a * b}


def _factors(r: random.Random) -> tuple[int, int]:
    """From the small table or from that of `_times`: its held-out instances then hold no unseen product."""
    if r.random() < 0.5:
        return r.randint(2, 12), r.randint(2, 12)
    return r.randint(2, 25), r.randint(2, 6)


def _product_sum(r: random.Random) -> Numbers:
    (a, b), c = _factors(r), r.randint(2, 60)
    return {"a": a, "b": b, "c": c, "x": a * b, "y": a * b + c}


def _change(r: random.Random) -> Numbers:
    a, b = _factors(r)
    c = a * b + r.randint(1, 60)
    return {"a": a, "b": b, "c": c, "x": a * b, "y": c - a * b}


def _sum_difference(r: random.Random) -> Numbers:
    a, b = r.randint(5, 90), r.randint(2, 60)
    c = r.randint(2, min(a + b - 1, 99))
    return {"a": a, "b": b, "c": c, "x": a + b, "y": a + b - c}


def _more(r: random.Random) -> Numbers:
    a, b = r.randint(2, 70), r.randint(2, 40)
    return {"a": a, "b": b, "x": a + b, "y": a + a + b}


def _times(r: random.Random) -> Numbers:
    a, b = r.randint(2, 25), r.randint(2, 6)
    return {"a": a, "b": b, "x": a * b, "y": a + a * b}


def _share_add(r: random.Random) -> Numbers:
    a, b, c = r.randint(2, 12), r.randint(2, 12), r.randint(2, 30)
    return {"a": a, "b": b, "c": c, "n": a * b, "x": b, "y": b + c}


def _sell(r: random.Random) -> Numbers:
    rest, b, c = r.randint(2, 12), r.randint(2, 50), r.randint(2, 9)
    return {"a": rest + b, "b": b, "c": c, "x": rest, "y": rest * c}


def _two_rates(r: random.Random) -> Numbers:
    a, b, c, d = (r.randint(2, 12), r.randint(2, 9), r.randint(2, 12), r.randint(2, 9))
    return {"a": a, "b": b, "c": c, "d": d, "x": a * b, "y": c * d, "z": a * b + c * d}


def _boxes(r: random.Random) -> Numbers:
    a, b, c, d = (r.randint(2, 9) for _ in range(4))
    total = a * b + c * d
    e = r.randint(2, min(total - 1, 60))
    return {"a": a, "b": b, "c": c, "d": d, "e": e, "x": a * b, "y": c * d, "z": total, "w": total - e}


TEMPLATES = (
    Template(
        "sum",
        "{p} has {a} {i}. Then {p} {v} {b} more. How many {i} does {p} have now?",
        _sum,
        ("{a}+{b}={x}",),
        "x",
        ("buys", "finds", "gets"),
    ),
    Template(
        "difference",
        "{p} had {a} {i} and {v} {b} of them. How many {i} are left?",
        _difference,
        ("{a}-{b}={x}",),
        "x",
        ("sold", "lost", "gave away"),
    ),
    Template(
        "product",
        "There are {a} {v} with {b} {i} in each. How many {i} are there in all?",
        _product,
        ("{a}*{b}={x}",),
        "x",
        ("boxes", "bags"),
    ),
    Template(
        "share",
        "{p} shares {x} {i} equally among {a} friends. How many {i} does each friend get?",
        _product,
        ("{x}/{a}={b}",),
        "b",
    ),
    Template(
        "product_sum",
        "{p} has {a} bags of {b} {i} each and {c} more {i} on the desk. How many {i} does {p} have?",
        _product_sum,
        ("{a}*{b}={x}", "{x}+{c}={y}"),
        "y",
    ),
    Template(
        "change",
        "{p} buys {a} {i} for {b} dollars each and pays with {c} dollars. "
        "How many dollars does {p} get back?",
        _change,
        ("{a}*{b}={x}", "{c}-{x}={y}"),
        "y",
    ),
    Template(
        "sum_difference",
        "{p} had {a} {i}, found {b} more, and gave {c} to {q}. How many {i} does {p} have left?",
        _sum_difference,
        ("{a}+{b}={x}", "{x}-{c}={y}"),
        "y",
    ),
    Template(
        "more",
        "{p} has {a} {i}. {q} has {b} more {i} than {p}. How many {i} do they have together?",
        _more,
        ("{a}+{b}={x}", "{a}+{x}={y}"),
        "y",
    ),
    Template(
        "times",
        "{p} has {a} {i}. {q} has {b} times as many. How many {i} do they have together?",
        _times,
        ("{a}*{b}={x}", "{a}+{x}={y}"),
        "y",
    ),
    Template(
        "share_add",
        "{p} puts {n} {i} equally into {a} boxes and then adds {c} {i} to each box. "
        "How many {i} are in one box?",
        _share_add,
        ("{n}/{a}={x}", "{x}+{c}={y}"),
        "y",
    ),
    Template(
        "sell",
        "{p} had {a} {i}, lost {b}, and sold the others for {c} dollars each. How many dollars did {p} get?",
        _sell,
        ("{a}-{b}={x}", "{x}*{c}={y}"),
        "y",
    ),
    Template(
        "two_rates",
        "{p} makes {a} {i} a day for {b} days, then {c} {i} a day for {d} days. How many {i} does {p} make?",
        _two_rates,
        ("{a}*{b}={x}", "{c}*{d}={y}", "{x}+{y}={z}"),
        "z",
    ),
    Template(
        "boxes",
        "{p} has {a} boxes of {b} {i} and {c} boxes of {d} {i}. {p} gives {e} to {q}. How many {i} are left?",
        _boxes,
        ("{a}*{b}={x}", "{c}*{d}={y}", "{x}+{y}={z}", "{z}-{e}={w}"),
        "w",
    ),
)


def draw_problem(r: random.Random, test: bool = False) -> Problem:
    """A problem of the training side or, with `test`, of the held-out side.

    An instance is a template and its numbers.
    """
    while True:
        template = r.choice(TEMPLATES)
        numbers = template.sample(r)
        if held_out(template.name, *numbers.values()) == test:
            break
    person, other = r.sample(words.NAMES, 2)
    values = numbers | {"p": person, "q": other, "i": r.choice(words.ITEMS), "v": r.choice(template.verbs)}
    answer = numbers[template.answer]
    steps = [step.format(**numbers) for step in template.steps]
    thought = "First " + ". Then ".join(steps) + f". So the answer is {answer}."
    return Problem(template.question.format(**values), thought, answer)
