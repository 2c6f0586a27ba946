"""Chat messages to prompt text, by the checkpoint's own Jinja template.

The environment offers templates what Hugging Face transformers offers them, so that a template renders to the
same
text: trimmed blocks, loop controls, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML,
and the `{% generation %}` block, which marks answers for training and changes nothing here. Templates come
with checkpoints and are not trusted: they run in Jinja's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from glm_jax.config import read_json
from glm_jax.errors import RequestError

Message = Mapping[str, Any]

# Names that a message's reasoning goes by in clients; templates read the first.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` renders as what stands inside."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja declares

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _prepare(message: Message) -> dict[str, Any]:
    """A message as templates expect it: no null fields, reasoning under its first name, arguments as
    objects."""
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[name] for name in REASONING_FIELDS if name in prepared), None)
    if reasoning is not None:
        prepared["reasoning_content"] = reasoning
    if "tool_calls" in prepared:
        prepared["tool_calls"] = [_prepare_tool_call(call) for call in prepared["tool_calls"]]
    return prepared


def _prepare_tool_call(call: Message) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError as error:
            raise RequestError(
                f"the arguments of the tool call {function.get('name')!r} must be JSON: {error}", "messages"
            ) from error
    return {**call, "function": function}


class ChatTemplate:
    """A compiled chat template. Raises ValueError if the source is not valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid: line {error.lineno}: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        `variables` are the template's own switches, such as `reasoning_effort` and `clear_thinking`; None
        counts as not given. Raises RequestError where the template refuses the messages or trips over them.
        """
        if not messages:
            raise RequestError("messages must hold at least one message, got none", "messages")
        given = {name: value for name, value in variables.items() if value is not None}
        context = {
            **self._special_tokens,
            **given,
            "messages": [_prepare(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except RequestError:
            raise
        except Exception as error:  # a template can trip over a message in any way that Python code can
            raise RequestError(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from error


def load_chat_template(folder: str | Path) -> ChatTemplate | None:
    """The template of a Hugging Face folder: chat_template.jinja, or tokenizer_config.json's `chat_template`.

    None if the folder has neither. Raises ValueError if a file is broken.
    """
    folder = Path(folder)
    file, config_file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{config_file}: chat_template must be a string, got {type(source).__name__}")
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    values = ((name, config.get(name)) for name in names)
    return {name: _token_text(value) for name, value in values if value is not None}


def _token_text(value: Any) -> str:
    return value["content"] if isinstance(value, Mapping) else str(value)
