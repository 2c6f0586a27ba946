"""Every bad value of a request is refused with the field's name, its value and the bound."""

import dataclasses

import pytest

from glm_jax.errors import RequestError
from glm_jax.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n must be between 1 and 128, got 0"),
        ("n", 1000, "n must be between 1 and 128, got 1000"),
        ("n", 1.5, "n must be an integer, got 1.5"),
        ("temperature", -0.1, "temperature must be between 0 and 2, got -0.1"),
        ("temperature", 2.1, "temperature must be between 0 and 2, got 2.1"),
        ("temperature", float("nan"), "temperature must be between 0 and 2, got nan"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("temperature", True, "temperature must be a number, got True"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, got 0.0"),
        ("top_p", 1.01, "top_p must be above 0 and at most 1, got 1.01"),
        ("top_k", -2, "top_k must be at least -1, got -2"),
        ("min_p", -0.01, "min_p must be between 0 and 1, got -0.01"),
        ("min_p", 1.01, "min_p must be between 0 and 1, got 1.01"),
        ("seed", "x", "seed must be an integer, got 'x'"),
        ("seed", 2**64, "seed must be between"),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("stop", "", "stop must hold strings that are not empty, got ''"),
        ("stop", ["a", ""], "stop must hold strings that are not empty, got ''"),
        ("stop", ["x"] * 65, "stop must hold at most 64 strings, got 65"),
        ("stop_token_ids", [-1], "stop_token_ids must be at least 0, got -1"),
        ("ignore_eos", "yes", "ignore_eos must be true or false, got 'yes'"),
    ],
)
def test_bad_values(field: str, value: object, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert message in str(caught.value)
    assert caught.value.parameter == field


def test_several_choices_need_a_temperature() -> None:
    assert SamplingParams(n=2).n == 2
    with pytest.raises(RequestError, match="n must be 1 when using greedy sampling, got 2"):
        SamplingParams(n=2, temperature=0)


def test_values_are_brought_to_one_form() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3], top_k=-1, temperature=0.001)
    assert params.stop_strings == ("x",) and params.stop_ids == (3,)
    assert params.top_k == 0
    assert params.temperature == 0.01 and not params.greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert hash(params) == hash(SamplingParams(stop=["x"], stop_token_ids=(3,), temperature=0.01))


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2
