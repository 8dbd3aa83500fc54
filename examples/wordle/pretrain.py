"""Teaches the policy to play badly, by imitation. The checkpoint in the repository was made by

    python examples/wordle/pretrain.py examples/wordle/policy

It watches two kinds of players. The careful open with one of a few words, and then guess only what fits all marks so
far; the careless guess any word. First it is shown what a careful guess is, whoever made those before. Then it watches
whole games, most of them of careless players, and learns to play as they come: badly. What is left of the other kind is
for the trainer to find and to amplify.

Knows both kinds, and how to learn from them; nothing of rewards, servers or buckets. The same seed gives the same games,
and the same number of threads on the same machine the same bits.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from game import LETTERS, TURNS, WORDS, marks_for
from policy import OPENING, marked, new_policy, save_policy, spelled

__all__ = ["Games", "Teachers", "imitate", "main"]

OPENERS = 12  # words that careful players open with
CAREFUL = 0.2  # of the games in the second lesson
LUCK = 0.1  # of the guesses of careless players are careful all the same

_STRIDE = len(OPENING) + 2 * LETTERS  # tokens of a turn
_ASKED = torch.tensor([turn * _STRIDE + place for turn in range(TURNS) for place in range(LETTERS)])


@dataclass(frozen=True)
class Games:
    """Side by side, as the policy sees them: tokens, and which turns to imitate."""

    tokens: torch.Tensor
    shown: torch.Tensor


class Teachers:
    """Players of both kinds. They know all words, and the marks of any for any other."""

    def __init__(self) -> None:
        marks = [[marks_for(guess, answer) for answer in WORDS] for guess in WORDS]
        numbers = {kind: number for number, kind in enumerate(sorted({one for row in marks for one in row}))}
        self._kinds = torch.tensor([[numbers[one] for one in row] for row in marks])
        self._guesses = torch.tensor([[*OPENING, *spelled(word)] for word in WORDS])
        self._answers = torch.tensor([[marked(word, one)[:-1] for one in row] for word, row in zip(WORDS, marks)])
        self._openers = torch.randperm(len(WORDS))[:OPENERS]

    def guesses(self, count: int) -> Games:
        """What careful guesses are, after turns of any kind."""
        return self._play(torch.full((count,), 0.6), openers=torch.zeros(count, dtype=torch.bool), all_shown=False)

    def games(self, count: int) -> Games:
        """Whole games, as they come."""
        careful = torch.rand(count) < CAREFUL
        return self._play(torch.where(careful, 1.0, LUCK), openers=careful, all_shown=True)

    def _play(self, care: torch.Tensor, *, openers: torch.Tensor, all_shown: bool) -> Games:
        """Each game with a chance of its own that a guess is careful."""
        count = len(care)
        answer = torch.randint(len(WORDS), (count,))
        fits = torch.ones(count, len(WORDS), dtype=torch.bool)
        going = torch.ones(count, dtype=torch.bool)
        tokens, shown = [], []
        for turn in range(TURNS):
            careful = torch.rand(count) < care
            guess = torch.where(careful, torch.multinomial(fits.float(), 1)[:, 0], torch.randint(len(WORDS), (count,)))
            if turn == 0:
                guess = torch.where(openers, self._openers[torch.randint(OPENERS, (count,))], guess)
            tokens += [self._guesses[guess], self._answers[guess, answer]]
            shown.append(going & (careful | all_shown))
            fits &= self._kinds[guess] == self._kinds[guess, answer, None]
            going = going & (guess != answer)
        return Games(torch.cat(tokens, dim=1), torch.stack(shown, dim=1))


def imitate(policy: Any, games: Games) -> torch.Tensor:
    """The loss: how unlikely the guesses that it is shown are to it, in nats for each."""
    hidden = policy.model(games.tokens[:, : int(_ASKED[-1]) + 1]).last_hidden_state
    logits = policy.lm_head(hidden[:, _ASKED])
    unlikely = cross_entropy(logits.flatten(0, 1), games.tokens[:, _ASKED + 1].flatten(), reduction="none")
    guesses = unlikely.view(-1, TURNS, LETTERS).sum(-1)
    return (guesses * games.shown).sum() / games.shown.sum()
