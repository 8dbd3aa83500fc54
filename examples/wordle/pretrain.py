"""Trains the initial policy by imitation: it plays badly. The checkpoint in the repository was made by

    python examples/wordle/pretrain.py examples/wordle/policy

The policy imitates two kinds of players. Careful players open with one of a few words and then guess only words that
fit all marks so far. Careless players guess any word. At first most games are careful, so that the policy learns that
style. At the end most are careless, so that it mostly plays badly. The trainer then amplifies the careful style.

The same seed gives the same games, and with the same number of threads the same bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from game import LETTERS, TURNS, WORDS, marks_for
from policy import OPENING, marked, new_policy, save_policy, spelled

__all__ = ["OPENERS", "Games", "Teachers", "imitate", "main"]

OPENERS = ("arise", "crane", "learn", "roast", "stone", "trail")  # of careful players

_STRIDE = len(OPENING) + 2 * LETTERS  # tokens of a turn
_ASKED = torch.tensor([turn * _STRIDE + place for turn in range(TURNS) for place in range(LETTERS)])


@dataclass(frozen=True)
class Games:
    """Tokens of many games side by side, and which turns were played before each game ended."""

    tokens: torch.Tensor
    played: torch.Tensor


class Teachers:
    """Players of both kinds. They know the marks of every word for every answer."""

    def __init__(self) -> None:
        marks = [[marks_for(guess, answer) for answer in WORDS] for guess in WORDS]
        numbers = {kind: number for number, kind in enumerate(sorted({one for row in marks for one in row}))}
        self._kinds = torch.tensor([[numbers[one] for one in row] for row in marks])
        self._guesses = torch.tensor([[*OPENING, *spelled(word)] for word in WORDS])
        self._answers = torch.tensor(
            [[marked(word, one)[:LETTERS] for one in row] for word, row in zip(WORDS, marks, strict=True)]
        )
        self._openers = torch.tensor([word in OPENERS for word in WORDS])

    def play(self, count: int, careful: float) -> Games:
        """Plays `count` games; `careful` is the share of careful players."""
        kind = (torch.rand(count) < careful)[:, None]
        answer = torch.randint(len(WORDS), (count,))
        fits = torch.ones(count, len(WORDS), dtype=torch.bool)
        going = torch.ones(count, dtype=torch.bool)
        tokens, played = [], []
        for turn in range(TURNS):
            choice = fits | ~kind if turn else self._openers == kind
            guess = torch.multinomial(choice.float(), 1)[:, 0]
            tokens += [self._guesses[guess], self._answers[guess, answer]]
            played.append(going)
            fits = fits & (self._kinds[guess] == self._kinds[guess, answer][:, None])
            going = going & (guess != answer)
        return Games(torch.cat(tokens, dim=1), torch.stack(played, dim=1))


def imitate(policy: Any, games: Games) -> torch.Tensor:
    """The loss: the negative log-likelihood of the guesses, in nats per guess."""
    hidden = policy.model(games.tokens[:, : int(_ASKED[-1]) + 1]).last_hidden_state
    logits = policy.lm_head(hidden[:, _ASKED])
    unlikely = cross_entropy(logits.flatten(0, 1), games.tokens[:, _ASKED + 1].flatten(), reduction="none")
    guesses = unlikely.view(-1, TURNS, LETTERS).sum(-1)
    return (guesses * games.played).sum() / games.played.sum()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    policy, teachers = new_policy(), Teachers()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=arguments.lr, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.perf_counter()
    for step in range(arguments.steps):
        done = step / arguments.steps
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min(1, (step + 1) / 20, (1 - done) / 0.7)
        games = teachers.play(arguments.games, careful=0.75 if done < 0.8 else 0.2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = imitate(policy, games)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == arguments.steps - 1:
            seconds = time.perf_counter() - started
            print(f"step {step}  loss {loss.item():.3f}  {seconds:.0f} s", file=sys.stderr, flush=True)
    save_policy(policy, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a new policy to play Wordle badly, by imitation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="directory for the checkpoint")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--games", type=int, default=64, help="games per step")
    parser.add_argument("--lr", type=float, default=1e-3, help="initial learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
