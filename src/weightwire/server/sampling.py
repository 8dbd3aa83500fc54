"""Chooses the next token of each sequence, by its own sampling settings.

The order is vLLM's: penalties, temperature, min_p, top_k, top_p. transformers has all of the processors but those for
presence and frequency. Each of them has one setting for all rows, so sequences with equal settings are processed
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from weightwire.server.sequence import Running, Sampling

__all__ = ["choose_tokens"]


def choose_tokens(sequences: Sequence[Running], logits: Any) -> Any:
    """A token for each sequence, which has a row of float32 logits."""
    groups: dict[Sampling, list[int]] = {}
    for row, one in enumerate(sequences):
        groups.setdefault(one.task.sampling, []).append(row)
    chosen = torch.empty(len(sequences), dtype=torch.long)
    for sampling, rows in groups.items():
        scores = logits if len(groups) == 1 else logits[rows]
        chosen[rows] = _choose([sequences[row] for row in rows], sampling, scores)
    return chosen


def _choose(sequences: list[Running], sampling: Sampling, scores: Any) -> Any:
    """The most likely token of each, or a sample with its own random number."""
    scores = _penalized(sequences, sampling, scores)
    if sampling.is_greedy:
        return scores.argmax(1)
    for processor in _processors(sampling):
        scores = processor(None, scores)
    sums = scores.softmax(1).double().cumsum(1)
    drawn = torch.tensor([[one.random.random()] for one in sequences], dtype=torch.float64)
    # The first with a larger sum: never a token with probability zero.
    return torch.searchsorted(sums, drawn * sums[:, -1:] * (1 - 1e-12), right=True)[:, 0]


@lru_cache(maxsize=1024)
def _processors(sampling: Sampling) -> tuple[Callable[[Any, Any], Any], ...]:
    """Those that change something."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    made: list[Callable[[Any, Any], Any]] = []
    if sampling.temperature != 1:
        made.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p > 0:
        made.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        made.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        made.append(TopPLogitsWarper(sampling.top_p))
    return tuple(made)


def _penalized(sequences: list[Running], sampling: Sampling, scores: Any) -> Any:
    if sampling.repetition_penalty != 1:
        from transformers import RepetitionPenaltyLogitsProcessor

        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(_seen(sequences), scores)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = torch.stack([torch.bincount(_tokens(one), minlength=scores.shape[1]) for one in sequences])
        scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    return scores


def _seen(sequences: list[Running]) -> Any:
    """The tokens of each prompt and completion. Short rows repeat a token, which does not penalize it twice."""
    rows = [tuple({*one.task.prompt, *one.tokens}) for one in sequences]
    width = max(map(len, rows))
    return torch.tensor([row + row[:1] * (width - len(row)) for row in rows])


def _tokens(one: Running) -> Any:
    return torch.tensor(one.tokens, dtype=torch.long)
