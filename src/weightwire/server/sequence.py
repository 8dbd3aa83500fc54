"""A sequence of tokens: what is asked for, and what has been generated so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = ["Running", "Sampling", "Task"]

_GREEDY = 1e-5  # a lower temperature means greedy decoding


@dataclass(frozen=True)
class Sampling:
    """The settings that decide which token comes next. The defaults change nothing.

    - `top_k`: keep this many tokens; 0 and -1 keep all.
    - `min_p`: keep tokens that are at least this fraction as likely as the most likely one.
    - `repetition_penalty`: for tokens of the prompt and the completion; above 1 makes them less likely.
    - `presence_penalty`, `frequency_penalty`: for tokens of the completion, once and for each occurrence.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def is_greedy(self) -> bool:
        # With top_k=1, equally likely tokens must not be drawn by chance either.
        return self.temperature < _GREEDY or self.top_k == 1


@dataclass(frozen=True)
class Task:
    """One completion of a prompt.

    - `most`: the maximum number of tokens.
    - `stops`: texts that end it.
    - `tops`: the number of most likely tokens whose log-probabilities are reported at each step.
    - `seed`, `index`: determine the random numbers, independent of other sequences.
    """

    prompt: tuple[int, ...]
    most: int
    sampling: Sampling = Sampling()
    stops: tuple[str, ...] = ()
    tops: int = 0
    seed: int = 0
    index: int = 0


@dataclass(eq=False)
class Running:
    """A sequence in progress. When it finishes, `text` is set, and then `reason`.

    The thread that generates appends to the lists, `tops` last. Other threads may read them meanwhile.
    """

    task: Task
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        key = np.array([self.task.seed % 2**64, self.task.index], np.uint64)  # NumPy would round a list to floats
        self.random = np.random.Generator(np.random.Philox(key=key))
