"""When the next anchor is due. Pure: counts the versions and bytes since the last one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weightwire.catchup import ChainPath
from weightwire.chain import ANCHOR, DELTA, Commit, Shortcut

__all__ = ["AnchorSchedule"]

_ANCHOR_SHARE = 0.66  # assumed size of an anchor relative to the weights, until one is known


@dataclass(frozen=True)
class AnchorSchedule:
    """An anchor is due every `every` versions. By default, when the deltas since the last one reach half its size."""

    every: int | None = None
    anchor_bytes: int = 0  # size of the newest; 0 if there is none
    delta_bytes: int = 0
    deltas: int = 0
    newest: str = ""  # path of the newest anchor beside the chain, if this publisher made it
    is_overdue: bool = False  # readers do not trust anchors that a replaced key signed

    def after_path(self, path: ChainPath) -> AnchorSchedule:
        """The schedule at the end of a path from the newest anchor."""
        return replace(
            self,
            anchor_bytes=path.start.nbytes if path.start else 0,
            delta_bytes=sum(commit.record.nbytes for commit in path.commits),
            deltas=sum(commit.record.kind == DELTA for commit in path.commits),
            is_overdue=any(commit.record.keys for commit in path.commits),
        )

    def after_commit(self, commit: Commit) -> AnchorSchedule:
        if commit.kind == ANCHOR:
            return replace(self, anchor_bytes=commit.nbytes, delta_bytes=0, deltas=0, is_overdue=False)
        return replace(self, delta_bytes=self.delta_bytes + commit.nbytes, deltas=self.deltas + 1)

    def restarted(self) -> AnchorSchedule:
        """The schedule after an anchor upload has started: counts from zero."""
        return replace(self, delta_bytes=0, deltas=0)

    def after_shortcut(self, shortcut: Shortcut, path: str) -> AnchorSchedule:
        """The anchor is in the bucket. Versions published during its upload count towards the next one."""
        return replace(self, anchor_bytes=shortcut.nbytes, newest=path, is_overdue=False)

    def is_due(self, weights_bytes: int) -> bool:
        if self.is_overdue:
            return True
        if self.every is not None:
            return self.deltas >= self.every
        return self.delta_bytes > (self.anchor_bytes or _ANCHOR_SHARE * weights_bytes) / 2
