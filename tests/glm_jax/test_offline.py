"""`generate` on a random model: mixed lengths in one call are what each prompt gets by teacher forcing."""

import dataclasses

import jax
import numpy as np
import pytest

import glm_jax
from glm_jax.errors import RequestError
from glm_jax.offline import generate
from glm_jax.parameter_init import init
from glm_jax.sampling_params import SamplingParams
from tests.serving.tiny_text import TOKENIZER, config

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["a", "something longer than that", [1, 2, 3], "z" * 40]
NEAR = 2e-5  # of the largest logit: summation order differs between the cached and the whole-sequence form


@pytest.fixture(scope="module")
def model() -> glm_jax.Model:
    made = config()
    return glm_jax.Model(made, init(made, jax.random.key(3)), TOKENIZER)


def test_mixed_prompts(model: glm_jax.Model) -> None:
    outputs = generate(model, PROMPTS, GREEDY)
    assert [o.prompt_token_ids for o in outputs] == [
        TOKENIZER.encode(p) if isinstance(p, str) else p for p in PROMPTS
    ]
    rows = [o.prompt_token_ids + o.token_ids for o in outputs]
    longest = max(map(len, rows))
    tokens = np.array([row + [0] * (longest - len(row)) for row in rows], np.int32)
    mask = np.arange(longest) < np.array([[len(row)] for row in rows])
    logits = np.asarray(glm_jax.forward(model.params, model.config, tokens, mask))
    for row, output in enumerate(outputs):
        assert len(output.token_ids) == 6 and output.finish_reason == "length"
        assert output.text == TOKENIZER.decode(output.token_ids)
        for step, token in enumerate(output.token_ids):
            scores = logits[row, len(output.prompt_token_ids) + step - 1]
            assert scores.max() - scores[token] <= NEAR * np.abs(scores).max()


def test_one_prompt_one_answer_and_parameters_for_each(model: glm_jax.Model) -> None:
    together = generate(model, PROMPTS, [dataclasses.replace(GREEDY, max_tokens=n) for n in (6, 6, 3, 6)])
    assert [len(output.token_ids) for output in together] == [6, 6, 3, 6]
    assert generate(model, [], GREEDY) == []


def test_bad_prompts_generate_nothing(model: glm_jax.Model) -> None:
    with pytest.raises(RequestError, match="token id 300 is outside"):
        generate(model, [[1], [300]], GREEDY)
    with pytest.raises(RequestError, match="cannot be empty"):
        generate(model, "", GREEDY)
    with pytest.raises(ValueError, match="4 prompts need as many SamplingParams or a single one, got 2"):
        generate(model, PROMPTS, [GREEDY, GREEDY])
