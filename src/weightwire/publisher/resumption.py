"""Whether the first version of a publisher continues the run: a trainer that restarts from old weights is warned.

Pure: compares two commits.
"""

from __future__ import annotations

from dataclasses import dataclass

from weightwire.chain import BASE, DELTA, Commit

__all__ = ["Resumption"]


@dataclass(frozen=True)
class Resumption:
    """`first` is the first version of this publisher, and `newest` is the version it replaced."""

    url: str
    newest: Commit
    first: Commit
    weights: int  # how many a version has
    resumes: bool = True  # False: checkpoints come in any order, and only a smaller step is suspicious

    @property
    def is_suspicious(self) -> bool:
        """Whether `first` replaces trained weights although its step is not larger."""
        if self.newest.kind == BASE or self.newest.after == self.first.after:
            return False
        if self.newest.step is None or self.first.step is None:
            return self.resumes
        return self.first.step < self.newest.step or (self.resumes and self.first.step == self.newest.step)

    @property
    def warning(self) -> str:
        number = self.newest.version
        restore = f"weightwire restore {self.url} --version {number} -o DIR"
        if not self.resumes:
            return (
                f"{self.url}: version {number} has step {self.newest.step}, this checkpoint has step "
                f"{self.first.step}; published as version {self.first.version}. If this is a mistake, run `{restore}` "
                f"and publish DIR"
            )
        step = (
            f", and the step decreases from {self.newest.step} to {self.first.step}" if self._has_smaller_step else ""
        )
        return (
            f"{self.url}: the first weights of this publisher differ from version {number}, the newest"
            f"{self._difference}{step}. They are now version {self.first.version}. To continue from version {number} "
            f"instead, load its weights before you train: {restore}"
        )

    @property
    def note(self) -> str:
        step = "" if self.newest.step is None else f" (step {self.newest.step})"
        same = self.newest.after == self.first.after
        return f"{self.url}: continues from version {self.newest.version}{step}{'' if same else self._difference}"

    @property
    def _has_smaller_step(self) -> bool:
        return self.newest.step is not None and self.first.step is not None and self.first.step < self.newest.step

    @property
    def _difference(self) -> str:
        """Unknown for an anchor: it was not compared with anything."""
        if self.first.kind != DELTA or not self.weights:
            return ""
        share = 100 * self.first.changed / self.weights
        percent = f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"
        return f": {self.first.changed:,} of {self.weights:,} weights ({percent}) differ"
