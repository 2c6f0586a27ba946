"""Generation without a server: many prompts at once, through the engine that the server uses."""

from collections.abc import Sequence
from typing import Any

from glm_jax.loading import Model
from glm_jax.sampling_params import SamplingParams

Prompt = str | Sequence[int]
MOST_ANSWERS_AT_ONCE = 32
MOST_TOKENS_AT_ONCE = 2048


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    engine_config: Any = None,
) -> list[Any]:
    """Answers to one or many prompts of any lengths, in their order.

    Args:
        model: from `glm_jax.load`.
        prompts: text, taken as it is (render chats with `model.tokenizer.chat_template` first), or token ids.
        sampling: for all prompts, or one for each.
        engine_config: a `serving.EngineConfig`; None: room for these prompts, 32 answers at a time.

    Returns:
        A `serving.Request` for each prompt, with `token_ids`, `text`, `finish_reason` and, for n > 1,
        `answers`.

    Raises:
        RequestError: a prompt that cannot be served; nothing has been generated then.
        ValueError: as many SamplingParams as prompts are needed.
    """
    from serving import Engine

    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    wanted: list[Any] = [prompts] if single else list(prompts)
    if isinstance(sampling, Sequence) and len(sampling) != len(wanted):
        raise ValueError(
            f"{len(wanted)} prompts need as many SamplingParams or a single one, got {len(sampling)}"
        )
    if not wanted:
        return []
    each = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(wanted)
    if model.tokenizer is not None:
        encode = model.tokenizer.encode
        wanted = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in wanted]
    engine = Engine(model, engine_config or _room_for(model, wanted, each))
    requests = [engine.prepare(prompt, params) for prompt, params in zip(wanted, each, strict=True)]
    for request in requests:
        engine.add(request)
    engine.run_until_idle()
    return requests


def _room_for(model: Model, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> Any:
    """Limits that fit the prompts, in powers of two: calls of similar sizes share compiled programs."""
    from serving import EngineConfig

    longest = model.config.max_position_embeddings
    if all(params.max_tokens is not None for params in sampling):
        needed = (len(p) + (s.max_tokens or 0) for p, s in zip(prompts, sampling, strict=True))
        longest = min(longest, _power_of_two(max(needed)))
    answers = min(MOST_ANSWERS_AT_ONCE, _power_of_two(sum(params.n for params in sampling)))
    tokens = min(MOST_TOKENS_AT_ONCE, _power_of_two(sum(map(len, prompts))))
    return EngineConfig(
        max_model_len=longest, max_num_seqs=answers, max_num_batched_tokens=max(answers, tokens)
    )


def _power_of_two(at_least: int) -> int:
    return 1 << max(at_least - 1, 0).bit_length()
