"""Request bodies. Fields unknown here are ignored, as OpenAI clients expect; known ones are checked."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(Body):
    """Fields that chat and text completions share. None means: not given."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int = 0
    cache_salt: str = ""


class Message(Body):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionBody(SamplingBody):
    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
