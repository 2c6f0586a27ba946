"""Decoding against the `tokenizers` package's own, token by token and at once; stop strings against a plain
search."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_jax.tokenizer import Detokenizer, StopMatcher, Tokenizer, load_tokenizer

SPECIAL = ["<|endoftext|>", "<|user|>", "</s>"]
TEXTS = [
    "plain words, twice: plain words",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "漢字かな交じり文",
    "family \U0001f468‍\U0001f469‍\U0001f467 and flag \U0001f1e8\U0001f1ff",
    " leading, trailing \n\t tabs ",
    "bytes \x00\x7f",
]


def backend() -> tokenizers.Tokenizer:
    """A byte-level BPE with few merges, so that characters fall apart into several tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["plain words and words again", "漢字"], trainer)
    made.add_tokens(["<think>"])
    return made


BACKEND = backend()
TOKENIZER = Tokenizer(BACKEND)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == BACKEND.encode(text).ids
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_are_left_out_only_when_asked() -> None:
    ids = TOKENIZER.encode("a<|user|>b<think>c</s>")
    assert TOKENIZER.decode(ids) == "ab<think>c"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "a<|user|>b<think>c</s>"
    assert TOKENIZER.special_ids == {BACKEND.token_to_id(token) for token in SPECIAL}


def test_ids_past_the_vocabulary_have_no_text() -> None:
    assert TOKENIZER.decode([TOKENIZER.vocab_size, *TOKENIZER.encode("x"), 10**6]) == "x"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BACKEND.get_vocab_size() - 1), max_size=24))
def test_any_ids_decode_as_the_library_decodes_them(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == BACKEND.decode(ids)
    stream = Detokenizer(TOKENIZER)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == BACKEND.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12), st.integers(0, 40))
def test_streams_never_show_half_a_character(text: str, cut: int) -> None:
    ids = TOKENIZER.encode(text)[:cut]
    stream = Detokenizer(TOKENIZER)
    shown = "".join(stream.push(token) for token in ids)
    assert "�" not in shown.replace("�", "", text.count("�"))
    assert TOKENIZER.decode(TOKENIZER.encode(text)).startswith(shown)
    # Only an answer that ends inside a character ends in a replacement character.
    assert (stream.finish() == "") == (BACKEND.decode(ids) == shown)


def test_a_character_appears_with_its_last_byte() -> None:
    ids = TOKENIZER.encode("\U0001f600!")
    assert len(ids) == 5
    stream = Detokenizer(TOKENIZER)
    assert [stream.push(token) for token in ids] == ["", "", "", "\U0001f600", "!"]


def first_stop(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    """The whole-text definition: after the first piece with any stop string in the text so far, cut there."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            at, _, stop = min(found)
            return text[: at + len(stop) * include], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("abc", max_size=4), max_size=10),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_stop_strings_in_any_split(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        shown += matcher.finish()
    assert (shown, matcher.matched) == first_stop(pieces, stops, include)


def test_only_an_open_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["Question:", "</s>", "<|im_end|>"])
    assert matcher.push("no reason to wait") == "no reason to wait"
    assert matcher.push(" Quest") == " "
    assert matcher.push("s") == "Quests"
    assert matcher.push("<|im_") == ""
    assert matcher.finish() == "<|im_"


def test_load_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None and loaded.encode("words") == TOKENIZER.encode("words")
    assert loaded.chat_template is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None and loaded.chat_template is not None


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(tmp_path)
    other = backend()
    other.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ValueError, match="must be ByteLevel"):
        Tokenizer(other)
