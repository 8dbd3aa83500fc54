"""The rules of the chain: only a commit that follows its parent is accepted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.records import a_run, chain_of, file_of, grow, sha, state, token
from weightwire.chain.records import Commit, Sealed, back_versions, seal
from weightwire.chain.rules import check_first, check_follows, hop
from weightwire.errors import BrokenChain, ForeignRun

Fields = dict[str, Any]


class TestFirstCommit:
    def test_first_commit_is_a_fence_that_names_run_json(self) -> None:
        check_first(chain_of(1)[0].record, seal(a_run()).sha256, "")

    def test_first_commit_of_another_run_json_is_refused(self) -> None:
        with pytest.raises(BrokenChain, match=r"does not belong to this run\.json"):
            check_first(chain_of(1)[0].record, sha("x"), "")

    @pytest.mark.parametrize(
        "fields",
        [
            {"before": state(0), "after": state(0)},
            {"kind": "base", "after": state(0)},
            {"kind": "anchor", "after": state(0), "files": (file_of("anchor", 0),)},
            {"version": 1},
        ],
        ids=str,
    )
    def test_any_other_first_commit_is_refused(self, fields: Fields) -> None:
        record = msgspec.structs.replace(chain_of(1)[0].record, **fields)
        with pytest.raises(BrokenChain, match="not the first commit"):
            check_first(record, record.parent, "")


class TestNextCommit:
    def follows(self, commits: list[Sealed[Commit]], **fields: Any) -> None:
        """Checks the last of these commits, with some fields replaced, against its parent."""
        check_follows(commits[-2], msgspec.structs.replace(commits[-1].record, **fields), "memory://b/c")

    def test_a_valid_chain_is_accepted(self) -> None:
        commits = chain_of(9)
        grow(commits, "fence")
        grow(commits, "anchor")
        grow(commits, "delta", files=(), after=commits[-1].record.after)
        grow(commits, "fence")
        for version in range(1, len(commits)):
            self.follows(commits[: version + 1])

    def test_commit_with_another_number_is_refused(self) -> None:
        with pytest.raises(BrokenChain, match="claims to be version 1"):
            self.follows(chain_of(4), version=1, back=(), files=(), after=state(2))

    def test_commit_of_another_run_is_refused(self) -> None:
        with pytest.raises(ForeignRun):
            self.follows(chain_of(4), run=token("other"))

    def test_commit_with_another_parent_is_refused(self) -> None:
        for parent in (sha("x"), "", chain_of(4)[1].sha256):
            with pytest.raises(BrokenChain, match="its parent hash differs"):
                self.follows(chain_of(4), parent=parent)

    def test_commit_from_another_state_is_refused(self) -> None:
        with pytest.raises(BrokenChain, match="does not start from the state"):
            self.follows(chain_of(4), before=state(1))

    def test_commit_of_an_older_epoch_is_refused(self) -> None:
        commits = chain_of(3)
        grow(commits, "fence", epoch=5)
        grow(commits)
        with pytest.raises(BrokenChain, match="was fenced off"):
            self.follows(commits, epoch=4, files=(file_of("delta", 4, epoch=4),))

    def test_new_epoch_without_a_fence_is_refused(self) -> None:
        with pytest.raises(BrokenChain, match="must begin with a fence"):
            self.follows(chain_of(4), epoch=2, files=(file_of("delta", 3, epoch=2),))

    def test_fence_without_a_new_epoch_is_refused(self) -> None:
        commits = chain_of(4)
        grow(commits, "fence")
        with pytest.raises(BrokenChain, match="must begin with a fence"):
            self.follows(commits, epoch=1)

    def test_epochs_may_have_gaps(self) -> None:
        """A publisher may claim an epoch and die before its fence."""
        commits = chain_of(4)
        grow(commits, "fence", epoch=7)
        self.follows(commits)

    def test_commit_with_another_back_hash_is_refused(self) -> None:
        with pytest.raises(BrokenChain, match="another hash for the commit two versions before it"):
            self.follows(chain_of(6), back=(sha("x"), chain_of(6)[1].sha256))

    def test_base_after_the_first_version_is_refused(self) -> None:
        with pytest.raises(BrokenChain, match="does not start from the state"):
            self.follows(chain_of(4), kind="base", files=(), before="")


class TestBackHashes:
    @pytest.mark.parametrize(
        ("version", "versions"),
        [(0, []), (1, []), (2, [0]), (3, [1]), (4, [2, 0]), (7, [5, 3]), (8, [6, 4, 0]), (9, [7, 5, 1])],
    )
    def test_back_versions_are_two_four_and_eight_versions_before(self, version: int, versions: list[int]) -> None:
        assert back_versions(version) == versions

    @pytest.mark.parametrize(("target", "reached"), [(19, 19), (18, 18), (17, 18), (16, 16), (13, 16), (0, 4)])
    def test_a_hop_goes_as_far_as_possible(self, target: int, reached: int) -> None:
        commits = chain_of(21)
        assert hop(commits[20].record, target) == (reached, commits[reached].sha256)

    def test_hops_reach_any_version_in_few_steps(self) -> None:
        commits = chain_of(300)
        for target in range(299):
            version, steps = 299, 0
            while version > target:
                version, sha256 = hop(commits[version].record, target)
                assert sha256 == commits[version].sha256
                steps += 1
            assert version == target
            assert steps <= 9
