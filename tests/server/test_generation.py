"""Sequences generated together equal sequences generated alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from support.vllm_server import tiny_config
from weightwire.server.generation import Generation
from weightwire.server.sequence import Running, Sampling, Task

Prompt = tuple[int, ...]

END = 2


@cache
def model_of(kind: str) -> Any:
    """In float32, so that the order of additions does not change the most likely token."""
    from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, Qwen3ForCausalLM

    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": END, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if kind == "qwen3":
            model = Qwen3ForCausalLM(tiny_config())
        elif kind == "a window":
            model = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=8))
        else:
            config = GPT2Config(vocab_size=320, n_positions=128, n_embd=64, n_layer=2, n_head=4, eos_token_id=END)
            model = GPT2LMHeadModel(config)
        for parameter in model.parameters():  # the initial weights give nearly the same output for every prompt
            parameter.data.mul_(3) if parameter.dim() > 1 else None
    return model.requires_grad_(False).eval()


def prompts(*lengths: int) -> list[Prompt]:
    numbers = random.Random(5)
    return [tuple(numbers.randrange(3, 320) for _ in range(length)) for length in lengths]


def task(prompt: Prompt, most: int = 12, *, sampling: Sampling | None = None, **fields: Any) -> Task:
    """A greedy task, unless it has sampling settings."""
    return Task(prompt, most, sampling or Sampling(temperature=0.0), **fields)


def as_letters(tokens: list[int]) -> str:
    return "".join(chr(0x100 + token) for token in tokens)


def generation(model: Any, ends: tuple[int, ...] = (END,)) -> Generation:
    return Generation(model, lambda: nullcontext(4), ends=ends, decode=as_letters)


def finish(running: Generation, *tasks: Task) -> list[Running]:
    sequences = [Running(one) for one in tasks]
    running.join(sequences)
    while running.running:
        running.advance()
    assert all(one.reason for one in sequences)
    return sequences


def generate_alone(model: Any, prompt: Prompt, most: int) -> list[int]:
    """Generates with transformers' own method."""
    tokens = torch.tensor([prompt])
    made = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=most, pad_token_id=0
    )
    return [int(token) for token in made[0, len(prompt) :]]


def logprobs_of(model: Any, prompt: Prompt, tokens: list[int]) -> Any:
    """The log-probabilities of all tokens at each position, from one forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


class TestGreedy:
    @pytest.mark.parametrize("kind", ["qwen3", "a window", "gpt2"])
    def test_a_batch_gives_the_same_tokens_as_single_prompts(self, kind: str) -> None:
        model = model_of(kind)
        given = prompts(1, 5, 40, 17, 5)
        sequences = finish(generation(model), *(task(prompt) for prompt in given))
        assert [one.tokens for one in sequences] == [generate_alone(model, prompt, 12) for prompt in given]
        assert len({tuple(one.tokens) for one in sequences}) == len(given)

    @pytest.mark.parametrize("kind", ["qwen3", "a window", "gpt2"])
    def test_tokens_are_the_same_when_sequences_join_and_leave(self, kind: str) -> None:
        model = model_of(kind)
        given = prompts(30, 4, 9, 50, 1, 22)
        most = [3, 14, 6, 2, 9, 20]
        sequences = [Running(task(prompt, count)) for prompt, count in zip(given, most, strict=True)]
        running = generation(model)
        for one in sequences:  # wider and narrower than the running ones
            running.join([one])
            running.advance()
        while running.running:
            running.advance()
        expected = [generate_alone(model, prompt, count) for prompt, count in zip(given, most, strict=True)]
        assert [one.tokens for one in sequences] == expected

    def test_dropping_a_sequence_does_not_change_the_others(self) -> None:
        model = model_of("qwen3")
        given = prompts(40, 3, 11)
        running = generation(model)
        sequences = [Running(task(prompt)) for prompt in given]
        running.join(sequences)
        running.advance()
        running.keep([False, True, True])
        while running.running:
            running.advance()
        assert not sequences[0].reason
        assert [one.tokens for one in sequences[1:]] == [generate_alone(model, prompt, 12) for prompt in given[1:]]


class TestLogprobs:
    def test_logprobs_equal_those_of_one_forward_pass(self) -> None:
        model = model_of("qwen3")
        given = prompts(3, 25, 8)
        for one in finish(generation(model), *(task(prompt, sampling=Sampling(), seed=2) for prompt in given)):
            expected = logprobs_of(model, one.task.prompt, one.tokens)
            chosen = expected.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
            assert torch.tensor(one.logprobs) == pytest.approx(chosen.numpy(), abs=1e-4)

    def test_logprobs_include_the_most_likely_tokens(self) -> None:
        model = model_of("qwen3")
        [one, plain] = finish(
            generation(model), *(task(p, 4, sampling=Sampling(temperature=5.0), tops=3) for p in prompts(6, 4))
        )
        likeliest = logprobs_of(model, one.task.prompt, one.tokens).topk(3)
        for step, top in enumerate(one.tops):
            assert set(top) == {one.tokens[step], *likeliest.indices[step].tolist()}
            assert max(top.values()) == pytest.approx(float(likeliest.values[step, 0]), abs=1e-4)
        assert len(plain.tops) == 4


class TestSampling:
    def test_a_seed_gives_the_same_tokens_in_any_batch(self) -> None:
        model = model_of("qwen3")
        wanted, *others = prompts(9, 30, 2)
        seeded = task(wanted, sampling=Sampling(), seed=-5, index=1)
        [first] = finish(generation(model), seeded)
        *_, second = finish(generation(model), *(task(one, sampling=Sampling(), seed=9) for one in others), seeded)
        assert first.tokens == second.tokens
        for seed, index in ((6, 1), (-6, 1), (-5 + 2**63, 1), (-5, 2)):
            [third] = finish(generation(model), replace(seeded, seed=seed, index=index))
            assert third.tokens != first.tokens

    def test_a_tiny_temperature_is_greedy(self) -> None:
        model, [prompt] = model_of("qwen3"), prompts(7)
        [cold, colder] = finish(
            generation(model),
            task(prompt, sampling=Sampling(temperature=1e-4)),
            task(prompt, sampling=Sampling(temperature=1e-30)),
        )
        assert cold.tokens == colder.tokens == generate_alone(model, prompt, 12)


class TestFinish:
    def test_sequence_ends_at_max_tokens(self) -> None:
        [one] = finish(generation(model_of("qwen3")), task(prompts(4)[0], 3))
        assert (one.reason, len(one.tokens)) == ("length", 3)

    def test_sequence_ends_at_an_end_token(self) -> None:
        model, [prompt] = model_of("qwen3"), prompts(4)
        tokens = generate_alone(model, prompt, 6)
        [one] = finish(generation(model, ends=(tokens[2],)), task(prompt, 6))
        assert (one.reason, one.tokens) == ("stop", tokens[: tokens.index(tokens[2]) + 1])

    def test_sequence_ends_before_a_stop_text(self) -> None:
        model, [prompt] = model_of("qwen3"), prompts(4)
        text = as_letters(generate_alone(model, prompt, 12))
        [one] = finish(generation(model), task(prompt, stops=("never", text[4:6])))
        assert (one.reason, one.text) == ("stop", text[: text.index(text[4:6])])
        assert as_letters(one.tokens) == text[: text.index(text[4:6]) + 2]


def test_every_token_has_its_version() -> None:
    model, versions = model_of("qwen3"), iter([None, 1, 1, 5])

    @contextmanager
    def serving() -> Iterator[int | None]:
        yield next(versions)

    running = Generation(model, serving, ends=(), decode=as_letters)
    [one] = finish(running, task(prompts(3)[0], 4))
    assert one.versions == [None, 1, 1, 5]
