"""The rules of the chain: only what follows from the version before is accepted as the next."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.records import chain_of, file_of, grow, sha, state, token
from weightwire.chain.records import Commit, Sealed, back_versions
from weightwire.chain.rules import check_first, check_follows, hop
from weightwire.errors import BrokenChain, ForeignRun

Fields = dict[str, Any]


class TestTheFirst:
    def test_is_a_fence_without_a_past(self) -> None:
        check_first(chain_of(1)[0].record, "")

    @pytest.mark.parametrize(
        "fields",
        [
            {"parent": sha("x")},
            {"before": state(0), "after": state(0)},
            {"kind": "base", "after": state(0)},
            {"kind": "anchor", "after": state(0), "files": (file_of("anchor", 0),)},
            {"version": 1},
        ],
        ids=str,
    )
    def test_is_nothing_else(self, fields: Fields) -> None:
        record = msgspec.structs.replace(chain_of(1)[0].record, **fields)
        with pytest.raises(BrokenChain, match="no beginning"):
            check_first(record, "")


class TestTheNext:
    def follows(self, commits: list[Sealed[Commit]], **fields: Any) -> None:
        """Whether the last of these, with some fields replaced, is the next after the one before it."""
        check_follows(commits[-2], msgspec.structs.replace(commits[-1].record, **fields), "memory://b/c")

    def test_a_chain_by_the_rules(self) -> None:
        commits = chain_of(9)
        grow(commits, "fence")
        grow(commits, "anchor")
        grow(commits, "delta", files=(), after=commits[-1].record.after)
        grow(commits, "fence")
        for version in range(1, len(commits)):
            self.follows(commits[: version + 1])

    def test_another_number(self) -> None:
        with pytest.raises(BrokenChain, match="says it is version 1"):
            self.follows(chain_of(4), version=1, back=(), files=(), after=state(2))

    def test_another_run(self) -> None:
        with pytest.raises(ForeignRun):
            self.follows(chain_of(4), run=token("other"))

    def test_another_parent(self) -> None:
        for parent in (sha("x"), "", chain_of(4)[1].sha256):
            with pytest.raises(BrokenChain, match="its parent hash is another"):
                self.follows(chain_of(4), parent=parent)

    def test_another_state_before(self) -> None:
        with pytest.raises(BrokenChain, match="starts from another state"):
            self.follows(chain_of(4), before=state(1))

    def test_an_older_epoch(self) -> None:
        commits = chain_of(3)
        grow(commits, "fence", epoch=5)
        grow(commits)
        with pytest.raises(BrokenChain, match="had been replaced"):
            self.follows(commits, epoch=4)

    def test_a_new_epoch_without_a_fence(self) -> None:
        with pytest.raises(BrokenChain, match="must begin with a fence"):
            self.follows(chain_of(4), epoch=2)

    def test_a_fence_without_a_new_epoch(self) -> None:
        commits = chain_of(4)
        grow(commits, "fence")
        with pytest.raises(BrokenChain, match="must begin with a fence"):
            self.follows(commits, epoch=1)

    def test_epochs_may_leave_some_out(self) -> None:
        """A publisher that claimed one and died before its fence."""
        commits = chain_of(4)
        grow(commits, "fence", epoch=7)
        self.follows(commits)

    def test_another_commit_two_versions_back(self) -> None:
        with pytest.raises(BrokenChain, match="two versions back"):
            self.follows(chain_of(6), back=(sha("x"), chain_of(6)[1].sha256))

    def test_a_base_cannot_come_later(self) -> None:
        with pytest.raises(BrokenChain, match="starts from another state"):
            self.follows(chain_of(4), kind="base", files=(), before="")


class TestBack:
    @pytest.mark.parametrize(
        ("version", "versions"),
        [(0, []), (1, []), (2, [0]), (3, [1]), (4, [2, 0]), (7, [5, 3]), (8, [6, 4, 0]), (9, [7, 5, 1])],
    )
    def test_two_four_eight_versions_before(self, version: int, versions: list[int]) -> None:
        assert back_versions(version) == versions

    @pytest.mark.parametrize(("target", "reached"), [(19, 19), (18, 18), (17, 18), (16, 16), (13, 16), (0, 4)])
    def test_a_hop_goes_as_far_as_it_can_and_not_too_far(self, target: int, reached: int) -> None:
        commits = chain_of(21)
        assert hop(commits[20].record, target) == (reached, commits[reached].sha256)

    def test_hops_get_anywhere_in_few_steps(self) -> None:
        commits = chain_of(300)
        for target in range(299):
            version, steps = 299, 0
            while version > target:
                version, sha256 = hop(commits[version].record, target)
                assert sha256 == commits[version].sha256
                steps += 1
            assert version == target
            assert steps <= 9
