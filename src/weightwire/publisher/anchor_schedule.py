"""When the next anchor is due. Pure: counts what was published since the last one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weightwire.catchup import ChainPath
from weightwire.chain import ANCHOR, DELTA, Commit, Shortcut, seal, shortcut_path

__all__ = ["AnchorSchedule"]

_ANCHOR_SHARE = 0.66  # what an anchor takes of the raw weights, until one has been made


@dataclass(frozen=True)
class AnchorSchedule:
    """`every` so many versions; without that, when the deltas since the last anchor add up to half of one."""

    every: int | None = None
    anchor_bytes: int = 0  # of the newest; 0 where there is none
    delta_bytes: int = 0
    deltas: int = 0
    newest: str = ""  # the path of the newest that is beside the chain

    def after_path(self, path: ChainPath) -> AnchorSchedule:
        """How it stands at the end of a path from the newest anchor."""
        return replace(
            self,
            anchor_bytes=path.start.nbytes if path.start else 0,
            delta_bytes=sum(commit.record.nbytes for commit in path.commits),
            deltas=sum(commit.record.kind == DELTA for commit in path.commits),
            newest=shortcut_path(seal(path.start)) if isinstance(path.start, Shortcut) else self.newest,
        )

    def after_commit(self, commit: Commit) -> AnchorSchedule:
        if commit.kind == ANCHOR:
            return replace(self, anchor_bytes=commit.nbytes, delta_bytes=0, deltas=0)
        return replace(self, delta_bytes=self.delta_bytes + commit.nbytes, deltas=self.deltas + 1)

    def restarted(self) -> AnchorSchedule:
        """An anchor is on its way: counts from here."""
        return replace(self, delta_bytes=0, deltas=0)

    def after_shortcut(self, shortcut: Shortcut, path: str) -> AnchorSchedule:
        """The anchor has arrived; what was published meanwhile counts for the next one."""
        return replace(self, anchor_bytes=shortcut.nbytes, newest=path)

    def is_due(self, weights_bytes: int) -> bool:
        if self.every is not None:
            return self.deltas >= self.every
        return self.delta_bytes > (self.anchor_bytes or _ANCHOR_SHARE * weights_bytes) / 2
