"""Guided answers follow their grammar, with any number of drafts, beside answers that are free."""

import json
import re

import pytest

from glm_jax.errors import RequestError
from glm_jax.sampling_params import SamplingParams
from serving.engine import Engine
from serving.engine_config import EngineConfig
from tests.serving.fake_device import FakeDevice, answer_to
from tests.serving.tiny_text import EOS, TOKENIZER, weightless_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Ben"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def engine(drafts: int) -> Engine:
    config = EngineConfig(
        block_size=16,
        snapshot_spacing=64,
        max_num_seqs=4,
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts},
    )
    device = FakeDevice(16, drafts=drafts, right=0.5)
    return Engine(weightless_model(num_mtp_layers=1), config, runner=device)


def guided(structure: dict, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=200, structured_outputs=structure, **changes)


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_guided_and_free_rows_together(drafts: int) -> None:
    made = engine(drafts)
    free = made.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    schema = made.submit("x", guided({"json": SCHEMA}))
    regex = made.submit("y", guided({"regex": "[ab]{3}-[0-9]{2}"}))
    choice = made.submit("z", guided({"choice": ["yes", "no", "yesterday"]}))
    made.run_until_idle()
    assert free.token_ids == answer_to([1, 2, 3], 60)
    said = json.loads(schema.text)
    assert set(said) == {"name", "age"} and said["name"] in ("Ada", "Ben") and 0 <= said["age"] <= 99
    assert re.fullmatch("[ab]{3}-[0-9]{2}", regex.text)
    assert choice.text in ("yes", "no", "yesterday")
    for request in (schema, regex, choice):
        assert request.finish_reason == "stop" and request.token_ids[-1] == EOS


def test_answers_do_not_depend_on_the_drafts() -> None:
    texts = set()
    for drafts in (0, 1, 2, 3):
        made = engine(drafts)
        request = made.submit("x", guided({"regex": "[a-e]{20,40}"}))
        made.run_until_idle()
        texts.add(request.text)
    assert len(texts) == 1


def test_a_grammar_survives_preemption() -> None:
    made = engine(1)
    request = made.submit("x", guided({"regex": "[a-e]{40}"}))
    whole = engine(1)
    expected = whole.submit("x", guided({"regex": "[a-e]{40}"}))
    whole.run_until_idle()
    for _ in range(5):
        made.step()
    while made._unread:
        made._read(made._unread.popleft())
    made._scheduler.preempt(request.answers[0])
    made.run_until_idle()
    assert request.text == expected.text and request.answers[0].preemptions == 1


def test_length_ends_a_guided_answer_too() -> None:
    made = engine(3)
    request = made.submit(
        "x", SamplingParams(max_tokens=5, structured_outputs={"regex": "[a-e]{40}"}, seed=1)
    )
    made.run_until_idle()
    assert (len(request.token_ids), request.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    "structure",
    [{"json": {"type": "nonsense"}}, {"regex": "("}, {"grammar": "start: undefined_rule"}, {"json": "{"}],
)
def test_grammars_that_do_not_compile(structure: dict) -> None:
    made = engine(0)
    with pytest.raises(RequestError, match="structured_outputs"):
        made.submit("x", guided(structure))
    assert not made.has_work


@pytest.mark.parametrize("structure", [{}, {"json": {}, "regex": "a"}, {"yaml": 1}, "json"])
def test_exactly_one_structure(structure: object) -> None:
    with pytest.raises(RequestError, match="exactly one of"):
        SamplingParams(structured_outputs=structure)


def test_no_tokenizer_no_grammar() -> None:
    model = weightless_model()
    model.tokenizer = None
    made = Engine(model, EngineConfig(block_size=8), runner=FakeDevice(8))
    with pytest.raises(RequestError, match="need a tokenizer"):
        made.submit([1], guided({"regex": "a"}))
    assert TOKENIZER is not None
