"""Text to token ids and back, over a checkpoint's own tokenizer.json (byte-level BPE)."""

import codecs
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from glm_jax.chat import ChatTemplate, load_chat_template


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in a byte-level vocabulary (GPT-2's convention): bytes that print
    keep their own Latin-1 character, the others take the code points from 256 up, in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Tokenizer:
    """A tokenizer with the checkpoint's chat template, if it has one.

    Decoding works on bytes: a text is the UTF-8 reading of its tokens' bytes, with U+FFFD for what is no
    UTF-8, whether it is decoded at once or token by token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(f"the tokenizer's decoder must be ByteLevel, got {backend.decoder!r}")
        self._backend = backend
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The tokenizer in the form of a tokenizer.json."""
        return self._backend.to_str()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that carry no text of their own (role markers, end of text, ...)."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return {token_id: self._token_bytes(token) for token, token_id in vocabulary.items()}

    @staticmethod
    def _token_bytes(token: str) -> bytes:
        if all(character in _ALPHABET for character in token):
            return bytes(_ALPHABET[character] for character in token)
        return token.encode()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens spelled out in it become themselves.

        `add_special_tokens` adds what the tokenizer's post-processor wraps a text in (the released one:
        nothing).
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids outside the vocabulary have none."""
        raw = b"".join(self.token_bytes(int(i), skip_special_tokens=skip_special_tokens) for i in token_ids)
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        return self._bytes.get(token_id, b"")

    def id_of(self, token: str) -> int | None:
        """The id of a token spelled as in the vocabulary, None if there is no such token."""
        return self._backend.token_to_id(token)


class Detokenizer:
    """Text of a growing answer: what can be said for sure so far, never half a character.

    Holds back bytes that may become one UTF-8 character with the next token, and nothing else; the pieces
    joined equal `Tokenizer.decode` of all the tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip))

    def finish(self) -> str:
        """What was held back: U+FFFD if the tokens ended inside a character."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Cuts a growing text at the first of some stop strings.

    Only a tail that may still become a stop string is held back. The result does not depend on how the text
    was split into pieces, as long as each token's text comes as one piece.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """The text now safe to show. After a match, `matched` is set and the text has ended.

        Without `may_match` a stop string that this text completes does not count.
        """
        if not self._stops:
            return text
        held, text = len(self._held), self._held + text
        # Only what this text completes. The earliest match counts; of two starting together, the longer one.
        places = [(text.find(stop, max(0, held - len(stop) + 1)), -len(stop), stop) for stop in self._stops]
        found = [place for place in places if place[0] >= 0]
        if found and may_match:
            at, _, self.matched = min(found)
            self._held = ""
            return text[: at + len(self.matched)] if self._include else text[:at]
        keep = self._open_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back in case a stop string came, when the answer ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _open_length(self, text: str) -> int:
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer and chat template of a Hugging Face folder, None if it holds no tokenizer.json.

    Raises ValueError for a file that is no byte-level tokenizer.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is no tokenizer that the `tokenizers` package can read: {error}") from error
    return Tokenizer(backend, load_chat_template(folder))
