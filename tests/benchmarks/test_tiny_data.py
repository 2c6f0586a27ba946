"""Generated data: the splits, the tokenizer, the template's form and the classes that the loss weighs."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.tiny import words
from benchmarks.tiny.acceptance import accepted_drafts
from benchmarks.tiny.cases import collate, json_case, problem_case, recall_case, tool_case
from benchmarks.tiny.data import ANSWER, CONTEXT, LISTED, LOOKAHEAD, PADDING, RECALLED, BatchSpec, Encoder
from benchmarks.tiny.documents import KINDS, TEMPLATE_PATH, draw_document, render
from benchmarks.tiny.problems import TEMPLATES, draw_problem
from benchmarks.tiny.recall import draw_records
from benchmarks.tiny.splits import HELD_OUT_SHARE, held_out
from benchmarks.tiny.tokenizer import SPECIAL_TOKENS, VOCABULARY_SIZE, train_tokenizer
from benchmarks.tiny.tools import TOOLS, json_turns, tool_turns
from glm_jax.chat import ChatTemplate

SHIPPED = Path(__file__).parents[2] / "glm_jax" / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(tokenizer)


def test_the_splits_share_no_problem_instance() -> None:
    def instances(seed: int, test: bool, count: int) -> set[tuple[str, ...]]:
        r = random.Random(seed)
        drawn = (draw_problem(r, test) for _ in range(count))
        return {(p.thought, *re.findall(r"\d+", p.question)) for p in drawn}

    trained, held = instances(1, False, 20_000), instances(2, True, 3_000)
    assert not trained & held
    assert len(held) > 500


def test_about_a_tenth_is_held_out_and_the_hash_is_pinned() -> None:
    share = np.mean([held_out("any", i) for i in range(20_000)])
    assert share == pytest.approx(HELD_OUT_SHARE, abs=0.01)
    # a changed hash would let the shipped checkpoint be tested on what it was trained on
    assert [i for i in range(60) if held_out("sum", i, 7, i + 7)] == [3, 39, 40]


def test_every_problem_answers_itself() -> None:
    r = random.Random(3)
    for _ in range(2_000):
        problem = draw_problem(r)
        steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", problem.thought)
        operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
        for left, operation, right, result in steps:
            assert operations[operation](int(left), int(right)) == int(result)
        assert int(steps[-1][3]) == problem.answer >= 0


def test_held_out_products_of_the_times_template_occur_in_others() -> None:
    r = random.Random(4)
    seen = {product for _ in range(40_000) for product in re.findall(r"\d+\*\d+", draw_problem(r).thought)}
    times = next(t for t in TEMPLATES if t.name == "times")
    drawn = (times.sample(r) for _ in range(2_000))
    held = {f"{n['a']}*{n['b']}" for n in drawn if held_out("times", *n.values())}
    assert held and held <= seen


def test_recall_lists_hold_out_the_record_that_tests_ask_for() -> None:
    records = list(draw_records(random.Random(5), 200, held_out_key=True).items())
    sides = [held_out("recall", key, value) for key, value in records]
    assert sides == [False] * 199 + [True]
    with pytest.raises(ValueError, match=f"1 to {len(words.KEYS)} records, not 316"):
        draw_records(random.Random(0), 316)


def test_tool_and_json_turns_keep_to_their_side() -> None:
    r = random.Random(6)
    tools = tuple(TOOLS)
    for test in (False, True):
        for _ in range(300):
            function = tool_turns(r, tools, test)[1]["tool_calls"][0]["function"]
            if function["arguments"]:
                assert held_out(function["name"], *function["arguments"].values()) == test
            else:
                assert not test
    trained = {json_turns(r)[1]["content"] for _ in range(5_000)}
    assert not trained & {json_turns(r, test=True)[1]["content"] for _ in range(500)}


def test_tokenizer_has_the_released_special_tokens_last_and_words_and_digits_whole(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    first = VOCABULARY_SIZE - len(SPECIAL_TOKENS)
    assert [tokenizer.id_to_token(first + i) for i in range(len(SPECIAL_TOKENS))] == list(SPECIAL_TOKENS)
    # offsets from <|endoftext|> as released (MODEL.md i): 154820 + offset
    offsets = {"<|user|>": 7, "<|observation|>": 9, "</think>": 22, "<|image|>": 34, "<|video|>": 35}
    assert {t: tokenizer.token_to_id(t) - first for t in offsets} == offsets
    for word in (*words.KEYS, *words.NAMES, *words.ITEMS):
        assert len(tokenizer.encode(" " + word).ids) == 1, word
    assert len(tokenizer.encode("20971").ids) == 5
    text = "Ž🙂 日本\n\ttab  two  <|user|> x"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_shipped_files_are_what_the_code_makes(tokenizer: Tokenizer) -> None:
    shipped = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    text = draw_document("tools", random.Random(7), 500)
    assert shipped.get_vocab() == Tokenizer.from_str(shipped.to_str()).get_vocab()
    assert shipped.decode(shipped.encode(text).ids, skip_special_tokens=False) == text
    assert (SHIPPED / "chat_template.jinja").read_text() == TEMPLATE_PATH.read_text()
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 10_000_000


def test_classes_mark_what_an_assistant_says(encoder: Encoder) -> None:
    text = (
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Keep this list.\n- fox: 123\nWhat is fox?"
        "<|assistant|><think>- fox: 123</think>#### 123<|user|>"
    )
    ids, classes = encoder.encode(text, "recall")
    said = [encoder.tokenizer.decode([i], skip_special_tokens=False) for i in ids[classes >= ANSWER]]
    assert "".join(said) == "<think>- fox: 123</think>#### 123<|user|>"
    recalled = [encoder.tokenizer.decode([i]).strip() for i in ids[classes == RECALLED]]
    assert recalled == ["1", "2", "3"]  # the digits after #### repeat these
    assert set(classes[classes < ANSWER]) == {LISTED}
    assert set(encoder.encode(text, "problems")[1]) == {CONTEXT, ANSWER}


def test_batches_depend_on_the_seed_alone_and_fill_their_rows(encoder: Encoder) -> None:
    spec = BatchSpec(6, 256, (1 / 3, 1 / 3, 1 / 3))
    ids, classes = encoder.batch(spec, 11)
    again = encoder.batch(spec, 11)
    assert ids.shape == (6, 256 + LOOKAHEAD)
    np.testing.assert_array_equal(ids, again[0])
    assert (encoder.batch(spec, 12)[0] != ids).any()
    assert (classes == PADDING).mean() < 0.1
    assert [(classes[row] == LISTED).any() for row in range(6)] == [False, False, True, True, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_open_and_close_as_the_template_says(kind: str) -> None:
    text = draw_document(kind, random.Random(8), 400)
    assert text.startswith("[gMASK]<sop><|system|>Reasoning Effort: ")
    assert text.endswith("<|user|>")
    assert text.count("<think>") == text.count("</think>") == text.count("<|assistant|>")


def test_cases_put_the_prompt_before_the_answer(tokenizer: Tokenizer) -> None:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    r = random.Random(9)
    for make, end in (
        (lambda: problem_case(r, encode, 2), "<|user|>"),
        (lambda: recall_case(r, encode, 300), "<|user|>"),
        (lambda: tool_case(r, encode), "<|observation|>"),
        (lambda: json_case(r, encode), "<|user|>"),
    ):
        case = make()
        text = tokenizer.decode(case.ids[case.start - 2 : case.start], skip_special_tokens=False)
        assert text == "<|assistant|><think>"
        assert tokenizer.decode(case.ids[-1:], skip_special_tokens=False) == end
    for length in (250, 2000):
        assert abs(recall_case(r, encode, length).stop - length) <= 10
    batch = collate([problem_case(r, encode, 0), problem_case(r, encode, 2)], 0)
    assert batch.tokens.shape == (2, -(-batch.stop[1] // 128) * 128)
    assert (batch.tokens[0, batch.stop[0] :] == 0).all() and batch.stop[0] < batch.stop[1]


def test_accepted_drafts_by_hand() -> None:
    ids = np.arange(100, 112)
    drafts = np.stack([np.roll(ids, -2 - step) for step in range(3)])  # row t: t + 2, t + 3, t + 4
    # windows after tokens 2 and 6; a third would look past the end at 11
    assert accepted_drafts(ids, drafts, 2, 11) == [3, 3]
    drafts[1, 1] = 0  # the second draft after token 2 is wrong: one accepted, the next window begins at 4
    assert accepted_drafts(ids, drafts, 2, 11) == [1, 3]
    drafts[0, 3] = 0
    assert accepted_drafts(ids, drafts, 2, 11) == [1, 0, 3]


def template(messages: list[dict[str, object]], **variables: object) -> str:
    return ChatTemplate(TEMPLATE_PATH.read_text()).render(messages, **variables)


def test_template_efforts_and_media() -> None:
    content = [{"type": "text", "text": "Look: "}, {"type": "image_url"}, {"type": "video"}]
    media = "Look: <|begin_of_image|><|image|><|end_of_image|><|begin_of_video|><|video|><|end_of_video|>"
    for given, effort in (("low", "Low"), ("high", "High"), ("medium", "Max"), (None, "Max")):
        text = template([{"role": "user", "content": content}], reasoning_effort=given)
        assert text == f"[gMASK]<sop><|system|>Reasoning Effort: {effort}<|user|>{media}<|assistant|><think>"


def test_template_reasoning_is_kept_unless_cleared() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "r", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>s</think>d"},
    ]
    head = "[gMASK]<sop><|system|>Reasoning Effort: Max"
    kept = template(messages, add_generation_prompt=False)
    assert kept == head + ("<|user|>a<|assistant|><think>r</think>b<|user|>c<|assistant|><think>s</think>d")
    cleared = template(messages, add_generation_prompt=False, clear_thinking=True)
    assert cleared == kept.replace("<think>r</think>", "<think></think>")


def test_template_tools_calls_and_sorted_results() -> None:
    call = {"name": "f", "arguments": {"s": "raw", "n": 3, "b": True, "l": ["é"]}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "function": call}, {"function": {"name": "z"}}],
        },
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    text = template(messages, tools=[{"name": "f"}])
    assert "<|system|># Tools\n" in text and '<tools>\n{"name": "f"}\n</tools>' in text
    arguments = (
        "<arg_key>s</arg_key><arg_value>raw</arg_value><arg_key>n</arg_key><arg_value>3</arg_value>"
        '<arg_key>b</arg_key><arg_value>true</arg_value><arg_key>l</arg_key><arg_value>["é"]</arg_value>'
    )
    assert text.endswith(
        "<|system|>Be kind.<|user|>go<|assistant|><think></think>"
        f"<tool_call>f{arguments}</tool_call><tool_call>z</tool_call><|observation|>"
        "<tool_response>1</tool_response><tool_response>2</tool_response><|assistant|><think>"
    )


def test_render_is_what_the_template_gives() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert render(messages, generate=True) == template(messages)
