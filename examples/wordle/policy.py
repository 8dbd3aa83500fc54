"""The policy: a small Qwen3, its tokens, and how a game is written in them.

    >cranec-r?a-n-e+>fiver      the policy wrote crane, and after its marks fiver

A letter is a token, and so is a letter with the mark that it got. `>` asks for a guess, five letters are one, and the
same five come back with their marks; of what is no word, five `!` come back. So a game is one text, to which every turn
only adds: eleven tokens, of which the policy writes five.

Knows torch, transformers and the marks of `game.py`; nothing of learning.
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
    """What the policy wrote, as text: five letters, if it plays by the rules."""
    return "".join(TOKENS[number] for number in tokens)


def spelled(guess: str) -> list[int]:
    """The other way round."""
    return [_NUMBERS[letter] for letter in guess]


def marked(guess: str, marks: str) -> list[int]:
    """What a guess brings, and the question for the next."""
    answer = list(marks) if marks == UNKNOWN else [letter + mark for letter, mark in zip(guess, marks, strict=True)]
    return [_NUMBERS[token] for token in (*answer, _ASK)]


def tokenizer() -> Any:
    """The same tokens for those who send text: servers, and people with curl."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(_NUMBERS, unk_token=_NO_WORD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z][+?-]|."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=_END, pad_token=_END, unk_token=_NO_WORD)


def new_policy() -> Any:
    """Untaught, in float32; torch's seed decides which.

    Wide and shallow: where many weights pull in the same direction, it takes only a small step of each to learn.
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
    """A checkpoint in bfloat16, with all that a server needs. The policy is then in bfloat16 too."""
    policy.bfloat16().save_pretrained(directory)
    tokenizer().save_pretrained(directory)
