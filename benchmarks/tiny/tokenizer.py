"""The byte-level BPE tokenizer of the tiny checkpoint, trained on its own generated text."""

import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.tiny import words
from benchmarks.tiny.documents import KINDS, draw_document

VOCABULARY_SIZE = 1536

# Part of an answer's visible text, as in the released tokenizer: clients cut thoughts and calls out of it.
VISIBLE_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
)
# The order of the released checkpoint, <|endoftext|> first.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    *VISIBLE_TOKENS,
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
PAD_TOKEN = "<|endoftext|>"
EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

# Words, single digits and runs of punctuation, each with its leading space: a digit is a token of its own.
PIECES = r" ?[A-Za-z_]+| ?\d| ?[^\sA-Za-z_\d]+|\s+"


def _corpus(seed: int) -> Iterator[str]:
    r = random.Random(seed)
    for kind in KINDS:
        for _ in range(400):
            yield draw_document(kind, r, 1024)
    listed = words.KEYS + words.NAMES + words.ITEMS + words.CITIES + words.ROOMS + words.DAYS
    for word in listed:  # often enough that each becomes one token
        yield (" " + word) * 400
    for word in words.NAMES:  # sentences open with a name, without the space
        yield (word + "\n") * 400


def train_tokenizer(vocabulary_size: int = VOCABULARY_SIZE, seed: int = 0) -> Tokenizer:
    """Exactly `vocabulary_size` tokens: bytes, merges, then the special tokens at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    for token in SPECIAL_TOKENS:
        tokenizer.add_tokens([AddedToken(token, special=token not in VISIBLE_TOKENS, normalized=False)])
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocabulary_size}")
    return tokenizer
