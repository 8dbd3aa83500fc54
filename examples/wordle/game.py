"""The rules of Wordle, pure: which marks a guess gets, when a game is over, and what it is worth.

A guess is five letters and costs a turn, of which there are six. Each of its letters gets a mark:

    +   right, and in the right place
    ?   in the answer, at another place
    -   not in the answer, or not as often
    !   all five of them: this is none of the words

Knows the list of words beside it. Knows nothing of models, prompts or servers.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LETTERS", "SOLVED", "TURNS", "UNKNOWN", "WORDS", "Game", "Turn", "answer_for", "marks_for"]

LETTERS = 5
TURNS = 6
SOLVED = "+" * LETTERS
UNKNOWN = "!" * LETTERS
WORDS = tuple(Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())

_KNOWN = frozenset(WORDS)
_PER_TURN = 0.1  # what each turn before the last one takes from the reward of a game that is won


def answer_for(seed: int) -> str:
    """The same seed, the same word."""
    return random.Random(seed).choice(WORDS)


def marks_for(guess: str, answer: str) -> str:
    """A letter that the guess has more often than the answer is marked as often as the answer has it: first where it is
    in its place, then from the left."""
    marks = ["+" if mine == its else "-" for mine, its in zip(guess, answer, strict=True)]
    left = Counter(its for mine, its in zip(guess, answer, strict=True) if mine != its)
    for place, letter in enumerate(guess):
        if marks[place] == "-" and left[letter]:
            marks[place] = "?"
            left[letter] -= 1
    return "".join(marks)


@dataclass(frozen=True)
class Turn:
    """A guess and the marks that it got."""

    guess: str
    marks: str


@dataclass(frozen=True)
class Game:
    """A game as far as it was played. To guess makes a new one."""

    answer: str
    turns: tuple[Turn, ...] = ()

    def guess(self, guess: str) -> Game:
        marks = marks_for(guess, self.answer) if guess in _KNOWN else UNKNOWN
        return Game(self.answer, (*self.turns, Turn(guess, marks)))

    @property
    def solved(self) -> bool:
        return bool(self.turns) and self.turns[-1].marks == SOLVED

    @property
    def done(self) -> bool:
        return self.solved or len(self.turns) == TURNS

    @property
    def reward(self) -> float:
        """Of a game: 1 if the first guess was right, a tenth less for each one more; 0 as long as none was."""
        return 1 - _PER_TURN * (len(self.turns) - 1) if self.solved else 0.0
