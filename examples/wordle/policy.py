"""The policy: a small Qwen3, its tokens, and how a game is encoded.

    >cranec-r?a-n-e+>fiver      the policy wrote crane, got its marks, and wrote fiver

A letter is a token, and so is a letter with its mark. `>` asks for a guess. The policy writes five letters, and the
same letters follow with their marks, or five `!` if the guess is not a known word. Each turn appends eleven tokens, of
which the policy writes five.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from game import LETTERS, TURNS, UNKNOWN

__all__ = ["LONGEST", "OPENING", "TOKENS", "guess_of", "marked", "new_policy", "save_policy", "spelled", "tokenizer"]

_END, _ASK, _NO_WORD = "<end>", ">", "!"
TOKENS = (_END, _ASK, _NO_WORD, *ascii_lowercase, *(letter + mark for mark in "+?-" for letter in ascii_lowercase))

_NUMBERS = {token: number for number, token in enumerate(TOKENS)}
OPENING = (_NUMBERS[_ASK],)
LONGEST = TURNS * (1 + 2 * LETTERS)  # tokens


def guess_of(tokens: Sequence[int]) -> str:
    """Decodes what the policy wrote: five letters, if it plays by the rules."""
    return "".join(TOKENS[number] for number in tokens)


def spelled(guess: str) -> list[int]:
    """Encodes a guess."""
    return [_NUMBERS[letter] for letter in guess]


def marked(guess: str, marks: str) -> list[int]:
    """Encodes the marks of a guess, and the prompt for the next guess."""
    answer = list(marks) if marks == UNKNOWN else [letter + mark for letter, mark in zip(guess, marks, strict=True)]
    return [_NUMBERS[token] for token in (*answer, _ASK)]


def tokenizer() -> Any:
    """A tokenizer for clients that send text, such as curl."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(_NUMBERS, unk_token=_NO_WORD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z][+?-]|."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=_END, pad_token=_END, unk_token=_NO_WORD)


def new_policy() -> Any:
    """An untrained policy in float32, initialized from torch's seed.

    Wide and shallow: when many weights pull in the same direction, a small step of each is enough to learn.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(TOKENS),
            hidden_size=384,
            intermediate_size=768,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=6,
            head_dim=64,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=_NUMBERS[_END],
            pad_token_id=_NUMBERS[_END],
        )
    )


def save_policy(policy: Any, directory: Path) -> None:
    """Writes a bfloat16 checkpoint with the tokenizer. Converts the policy itself to bfloat16."""
    policy.bfloat16().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
