"""Chat templates: what transformers gives them, they get here; what they refuse is one clear error."""

import json
from pathlib import Path

import pytest

from glm_jax.chat import ChatTemplate, load_chat_template
from glm_jax.errors import RequestError

USER = {"role": "user", "content": "hi"}


def render(source: str, messages: list[dict] | None = None, **variables: object) -> str:
    return ChatTemplate(source).render(messages or [USER], **variables)


def test_blocks_are_trimmed() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n<{{ m.content }}>\n"
    source += "    {% endif %}\n{% endfor %}\n"
    assert render(source) == "<hi>\n"


def test_generation_prompt_and_switches() -> None:
    source = "{{ reasoning_effort or 'Max' }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    assert render(source) == "Max<|assistant|>"
    assert render(source, add_generation_prompt=False, reasoning_effort="High") == "High"
    assert render(source, reasoning_effort=None) == "Max<|assistant|>"


def test_json_keeps_text_as_it_is() -> None:
    tools = [{"name": "f", "about": "<é> & 'x'"}]
    assert render("{{ tools[0] | tojson }}", tools=tools) == json.dumps(tools[0], ensure_ascii=False)
    assert render("{{ tools | tojson(indent=2) }}", tools=tools) == json.dumps(
        tools, indent=2, ensure_ascii=False
    )


def test_loop_controls_and_generation_blocks() -> None:
    source = "{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"


def test_null_fields_are_missing_fields() -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": None}]
    assert render("{{ 'content' in messages[0] }}{{ 'tool_calls' in messages[0] }}", messages) == "FalseFalse"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_any_of_its_names(name: str) -> None:
    messages = [{"role": "assistant", "content": "x", name: "because"}]
    assert render("{{ messages[0].reasoning_content }}", messages) == "because"


def test_tool_call_arguments_are_objects() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"city": "Brno", "days": 2}'},
    }
    messages = [{"role": "assistant", "tool_calls": [call]}]
    source = (
        "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    )
    assert render(source, messages) == "city=Brno;days=2;"
    call["function"]["arguments"] = ""
    assert render(source, messages) == ""
    call["function"]["arguments"] = "{"
    with pytest.raises(RequestError, match="arguments of the tool call 'f' must be JSON"):
        render(source, messages)


def test_special_tokens_are_given(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "[gMASK]"}, "eos_token": "<|endoftext|>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}")
    template = load_chat_template(tmp_path)
    assert template is not None and template.render([USER]) == "[gMASK]<|endoftext|>False"


def test_template_in_the_tokenizer_config(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "in the config"}))
    template = load_chat_template(tmp_path)
    assert template is not None and template.render([USER]) == "in the config"
    (tmp_path / "chat_template.jinja").write_text("a file of its own")
    template = load_chat_template(tmp_path)
    assert template is not None and template.render([USER]) == "a file of its own"


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", [USER], "roles must alternate"),
        ("{{ messages[3].content }}", [USER], "cannot render"),
        ("{{ messages[0].content + 1 }}", [USER], "cannot render"),
        ("{{ ''.__class__.__mro__ }}", [USER], "cannot render"),
        ("x", [], "at least one message"),
    ],
)
def test_refusals(source: str, messages: list[dict], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(source).render(messages)
    assert caught.value.parameter == "messages"


def test_a_broken_template_is_refused_on_load(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("line one\n{% if %}")
    with pytest.raises(ValueError, match="not valid: line 2"):
        load_chat_template(tmp_path)
