"""Generates sequences together, token by token. Sequences join and leave at every step.

Prompts are padded on the left to the same width. Each step uses the current weights: `serving` holds off a new version
only during one step of the model. So a sequence may span versions, and every token records the version that chose it.
The KV cache is kept across a swap, as is usual in asynchronous training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from weightwire.server.sampling import choose_tokens
from weightwire.server.sequence import Running

__all__ = ["Generation"]

_SLACK = 8  # extra tokens to search for a stop text: some tokens have no text


class Generation:
    """The running sequences. `join` and `advance` add one token to each sequence and drop finished ones.

    - `serving`: a context in which the weights do not change. Yields their version.
    - `ends`: tokens that end a text.
    - `decode`: converts tokens to text.
    """

    def __init__(
        self,
        model: Any,
        serving: Callable[[], AbstractContextManager[int | None]],
        *,
        ends: Iterable[int],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.running: list[Running] = []
        self._model = model
        self._serving = serving
        self._ends = frozenset(ends)
        self._decode = decode
        self._cache: Any = None
        self._mask = torch.empty((0, 0), dtype=torch.long)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def join(self, newcomers: list[Running]) -> None:
        """Adds sequences. Equal prompts are read once."""
        from transformers import DynamicCache

        rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(one.task.prompt for one in newcomers))}
        tokens, mask = _padded(list(rows))
        # Full layers, also for sliding windows: window layers cannot be concatenated.
        cache = DynamicCache()
        logits, version = self._run(tokens, mask, cache)
        picked = torch.tensor([rows[one.task.prompt] for one in newcomers])
        self._add_tokens(newcomers, logits[picked], version)
        kept = [index for index, one in enumerate(newcomers) if not one.reason]
        if not kept:
            return
        picked = picked[kept]
        _each(cache, lambda old: old.index_select(0, picked))
        self._absorb(cache, mask[picked], [newcomers[index] for index in kept])

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def advance(self) -> None:
        """Adds one token to every running sequence."""
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(self.running), 1))], dim=1)
        tokens = torch.tensor([[one.tokens[-1]] for one in self.running])
        logits, version = self._run(tokens, self._mask, self._cache)
        self._add_tokens(self.running, logits, version)
        if any(one.reason for one in self.running):
            self.keep([not one.reason for one in self.running])

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def keep(self, wanted: list[bool]) -> None:
        """Drops unwanted sequences, and the padding that only they needed."""
        kept = [index for index, one in enumerate(wanted) if one]
        self.running = [self.running[index] for index in kept]
        if not kept:
            self._cache, self._mask = None, self._mask[:0, :0]
            return
        rows = torch.tensor(kept)
        mask = self._mask[rows]
        first = int(mask.any(0).int().argmax())
        self._mask = mask[:, first:]
        _each(self._cache, lambda old: old[:, :, first:].index_select(0, rows))

    def _run(self, tokens: Any, mask: Any, cache: Any) -> tuple[Any, int | None]:
        """The logits after the last token, in float32, and their version."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        with self._serving() as version:
            output = self._model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1].float(), version

    def _absorb(self, cache: Any, mask: Any, newcomers: list[Running]) -> None:
        """Adds newcomers to the running batch. Pads the narrower cache."""
        if not self.running:
            self._cache, self._mask, self.running = cache, mask, newcomers
            return
        width = max(mask.shape[1], self._mask.shape[1])
        for old, new in zip(self._cache.layers, cache.layers, strict=True):
            old.keys = torch.cat([_widened(old.keys, width), _widened(new.keys, width)])
            old.values = torch.cat([_widened(old.values, width), _widened(new.values, width)])
        masks = [torch.nn.functional.pad(one, (width - one.shape[1], 0)) for one in (self._mask, mask)]
        self._mask = torch.cat(masks)
        self.running = [*self.running, *newcomers]

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _add_tokens(self, sequences: list[Running], logits: Any, version: int | None) -> None:
        logprobs = logits.log_softmax(1)
        chosen = choose_tokens(sequences, logits)
        chosen_logprobs = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        most = max(one.task.tops for one in sequences)
        tops = logprobs.topk(most) if most else None
        for row, (one, token, logprob) in enumerate(zip(sequences, chosen.tolist(), chosen_logprobs, strict=True)):
            one.tokens.append(token)
            one.logprobs.append(logprob)
            one.versions.append(version)
            best = {token: logprob} if one.task.tops else {}
            if tops is not None:
                count = one.task.tops
                best |= zip(tops.indices[row, :count].tolist(), tops.values[row, :count].tolist(), strict=True)
            one.tops.append(best)
            self._finish(one)

    def _finish(self, one: Running) -> None:
        """Finishes the sequence if that was its last token."""
        if one.tokens[-1] in self._ends or self._has_stop(one):
            reason = "stop"
        elif len(one.tokens) >= one.task.most:
            reason = "length"
        else:
            return
        text = self._decode(one.tokens)
        one.text = text[: min((at for stop in one.task.stops if (at := text.find(stop)) >= 0), default=len(text))]
        one.reason = reason

    def _has_stop(self, one: Running) -> bool:
        if not one.task.stops:
            return False
        reach = max(len(stop.encode()) for stop in one.task.stops) + _SLACK
        tail = self._decode(one.tokens[-reach:])
        return any(stop in tail for stop in one.task.stops)


# --- tensors -----------------------------------------------------------------------------------------------------


def _padded(prompts: list[tuple[int, ...]]) -> tuple[Any, Any]:
    width = max(map(len, prompts))
    # The padding is masked.
    tokens = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([(0,) * (width - len(prompt)) + (1,) * len(prompt) for prompt in prompts])
    return tokens, mask


def _widened(states: Any, width: int) -> Any:
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[-2], 0))


def _each(cache: Any, change: Callable[[Any], Any]) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = change(layer.keys), change(layer.values)
