"""The rules of Wordle: the marks of a guess, the end of a game, and its reward. Pure.

A guess has five letters and costs one of six turns. Each letter gets a mark:

    +   correct and in the right place
    ?   in the answer, but in another place
    -   not in the answer, or not that often
    !   on all five letters: not a word of the list
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
_PER_TURN = 0.1  # subtracted from the reward of a won game for each turn before the last


def answer_for(seed: int) -> str:
    """The same seed always gives the same word."""
    return random.Random(seed).choice(WORDS)


def marks_for(guess: str, answer: str) -> str:
    """Marks a letter at most as often as the answer contains it: correct places first, then from the left."""
    marks = ["+" if mine == its else "-" for mine, its in zip(guess, answer, strict=True)]
    left = Counter(its for mine, its in zip(guess, answer, strict=True) if mine != its)
    for place, letter in enumerate(guess):
        if marks[place] == "-" and left[letter]:
            marks[place] = "?"
            left[letter] -= 1
    return "".join(marks)


@dataclass(frozen=True)
class Turn:
    """A guess and its marks."""

    guess: str
    marks: str


@dataclass(frozen=True)
class Game:
    """The state of a game. A guess returns a new state."""

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
        """1 if the first guess is correct, 0.1 less for each further guess, 0 until the game is won."""
        return 1 - _PER_TURN * (len(self.turns) - 1) if self.solved else 0.0
