"""A request's logit-processing tables, built on the host when it is admitted."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from glm_jax.cache import SamplerTables
from glm_jax.sampling_params import SamplingParams
from serving.request import Answer


def needs_tables(sampling: SamplingParams) -> bool:
    """Whether anything but temperature and filters shapes the request's logits."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.min_tokens
        or sampling.logit_bias
        or sampling.allowed_token_ids is not None
    )


def tables_of(answer: Answer | None, eos: Sequence[int], vocabulary: int) -> SamplerTables:
    """`[vocabulary]` arrays for an answer as known now (resumed: with what it generated); None: neutral."""
    counts = np.zeros(vocabulary, np.int32)
    prompt = np.zeros(vocabulary, np.bool_)
    bias = np.zeros(vocabulary, np.float32)
    ends = np.zeros(vocabulary, np.bool_)
    if answer is not None:
        sampling = answer.request.sampling
        prompt[answer.request.prompt] = True
        np.add.at(counts, np.array(answer.token_ids, np.int64), 1)
        if sampling.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(sampling.allowed_ids)] = 0
        for token, value in (sampling.logit_bias or {}).items():
            bias[int(token)] += value
        # min_tokens holds back every way to end, the end-of-sequence tokens also under ignore_eos, as in vLLM
        ends[[*eos, *sampling.stop_ids]] = True
    return SamplerTables(counts=_array(counts), prompt=_array(prompt), bias=_array(bias), ends=_array(ends))


def _array(values: np.ndarray) -> Any:
    """The fields are declared as `jax.Array`; jit takes numpy arrays in their place."""
    return values
