"""Tokens are drawn from the distribution that the settings of their sequence describe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weightwire.server.sampling import choose_tokens
from weightwire.server.sequence import Running, Sampling, Task

WORDS = 24
DRAWS = 4000
LOGITS = torch.tensor(np.random.default_rng(3).normal(0, 0.8, WORDS), dtype=torch.float32)
ORDER = LOGITS.argsort(descending=True).tolist()


def running(sampling: Sampling, *, prompt: tuple[int, ...] = (0,), tokens: tuple[int, ...] = (), index: int = 0) -> Any:
    one = Running(Task(prompt, 9, sampling, seed=11, index=index))
    one.tokens.extend(tokens)
    return one


def shares(sampling: Sampling, **given: Any) -> Any:
    """How often each token is drawn."""
    sequences = [running(sampling, index=index, **given) for index in range(DRAWS)]
    chosen = choose_tokens(sequences, LOGITS.expand(DRAWS, WORDS))
    return np.bincount(chosen.numpy(), minlength=WORDS) / DRAWS


def check_drawn_from(logits: Any, sampling: Sampling, **given: Any) -> None:
    found, expected = shares(sampling, **given), logits.double().softmax(0).numpy()
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected / DRAWS) + 1e-3)
    assert not found[expected == 0].any()


def cut_to(tokens: list[int], logits: Any = LOGITS) -> Any:
    kept = torch.full_like(logits, -torch.inf)
    kept[tokens] = logits[tokens]
    return kept


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_samples_follow_the_distribution(temperature: float) -> None:
    check_drawn_from(LOGITS / temperature, Sampling(temperature))


@pytest.mark.parametrize("top_k", [2, 5, 1000])
def test_top_k_keeps_the_most_likely_tokens(top_k: int) -> None:
    check_drawn_from(cut_to(ORDER[:top_k]), Sampling(top_k=top_k))


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_can_be_turned_off(top_k: int) -> None:
    check_drawn_from(LOGITS, Sampling(top_k=top_k))


def test_top_k_of_one_is_greedy_among_equal_tokens() -> None:
    logits = LOGITS.clone()
    logits[ORDER[1]] = logits[ORDER[0]]
    sequences = [running(Sampling(temperature=3.0, top_k=1), index=index) for index in range(50)]
    assert len(set(choose_tokens(sequences, logits.expand(50, WORDS)).tolist())) == 1


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    sums = LOGITS.softmax(0)[ORDER].cumsum(0)
    count = int((sums < 0.6).sum()) + 1
    assert 1 < count < WORDS
    check_drawn_from(cut_to(ORDER[:count]), Sampling(top_p=0.6))


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    likely = LOGITS.softmax(0)
    kept = (likely >= 0.2 * likely.max()).nonzero()[:, 0].tolist()
    assert 1 < len(kept) < WORDS
    check_drawn_from(cut_to(kept), Sampling(min_p=0.2))


def test_temperature_comes_before_the_cuts() -> None:
    likely = (LOGITS / 2).softmax(0)
    kept = (likely >= 0.2 * likely.max()).nonzero()[:, 0].tolist()
    check_drawn_from(cut_to(kept, LOGITS / 2), Sampling(temperature=2.0, min_p=0.2))


def test_repetition_penalty_is_for_prompt_and_completion() -> None:
    logits = LOGITS.clone()
    assert logits[ORDER[1]] > 0 > logits[ORDER[-1]]
    logits[ORDER[:2]] /= 2
    logits[ORDER[-1]] *= 2
    penalized = Sampling(repetition_penalty=2.0)
    check_drawn_from(logits, penalized, prompt=(ORDER[0],) * 3, tokens=(ORDER[1], ORDER[-1]))
    check_drawn_from(logits, penalized, prompt=(ORDER[1], ORDER[-1]), tokens=(ORDER[0],) * 3)


def test_presence_and_frequency_penalties_are_for_the_completion() -> None:
    prompt, tokens, logits = (ORDER[0],), (ORDER[1], ORDER[1], ORDER[2]), LOGITS.clone()
    logits[ORDER[1]] -= 0.7
    logits[ORDER[2]] -= 0.7
    check_drawn_from(logits, Sampling(presence_penalty=0.7), prompt=prompt, tokens=tokens)
    logits = LOGITS.clone()
    logits[ORDER[1]] -= 2 * 0.7
    logits[ORDER[2]] -= 0.7
    check_drawn_from(logits, Sampling(frequency_penalty=0.7), prompt=prompt, tokens=tokens)


def test_penalties_work_before_the_first_token() -> None:
    penalties = Sampling(presence_penalty=1.0, frequency_penalty=1.0)
    check_drawn_from(LOGITS, penalties)


def test_a_greedy_choice_is_penalized_too() -> None:
    for sampling in (
        Sampling(0.0, repetition_penalty=100.0),
        Sampling(0.0, frequency_penalty=2.0, presence_penalty=2.0),
    ):
        tokens = (ORDER[0],) * 3
        assert choose_tokens([running(sampling, prompt=tokens, tokens=tokens)], LOGITS[None]).tolist() == [ORDER[1]]


def test_every_sequence_has_its_own_settings() -> None:
    greedy, penalized = Sampling(temperature=0.0), Sampling(temperature=0.0, repetition_penalty=100.0)
    long, short = running(penalized, prompt=tuple(ORDER[:3])), running(penalized, prompt=(ORDER[0],))
    sequences = [running(greedy), long, running(Sampling(top_k=1)), short, running(greedy)]
    best = choose_tokens(sequences, LOGITS.expand(5, WORDS)).tolist()
    assert best == [ORDER[0], ORDER[3], ORDER[0], ORDER[1], ORDER[0]]


@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_no_settings_make_a_choice_impossible(penalty: float) -> None:
    extreme = Sampling(1e-4, 1e-6, 10**30, 1.0, penalty, -2.0, 2.0)
    chosen = choose_tokens([running(extreme, tokens=(3, 3))], 60 * LOGITS[None])
    assert 0 <= int(chosen) < WORDS


def test_sequences_with_different_settings_keep_their_own_logits() -> None:
    logits = torch.stack([LOGITS.roll(row) for row in range(5)])
    settings = [Sampling(0.0), Sampling(top_k=1)]
    chosen = choose_tokens([running(settings[row % 2]) for row in range(5)], logits)
    assert chosen.tolist() == logits.argmax(1).tolist()
