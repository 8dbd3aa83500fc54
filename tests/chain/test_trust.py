"""A reader with trusted keys accepts only commits that one of them, or a key that they introduced, has signed."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from support.chains import ChainBucket
from support.records import a_run, grow
from weightwire.chain.keys import PrivateKey
from weightwire.chain.reader import ChainReader
from weightwire.chain.record_paths import ALIVE, RUN
from weightwire.chain.records import Commit, Sealed, SignOfLife, seal, unseal
from weightwire.chain.signature import add_signature
from weightwire.chain.trust import Trust
from weightwire.errors import BrokenChain, Stale, Untrusted, WeightwireError

run = asyncio.run

A, B, C, EVIL = (PrivateKey.generate() for _ in range(4))


class SignedRun:
    """A chain of signed commits. Each `grow` signs with the given key."""

    def __init__(self, *keys: PrivateKey) -> None:
        self.run = seal(a_run(keys=tuple(key.public.hex for key in keys)))
        self.commits: list[Sealed[Commit]] = []

    def grow(self, key: PrivateKey | None, kind: str = "delta", **fields: Any) -> Sealed[Commit]:
        last = self.commits[-1].record if self.commits else None
        given = {"keys_from": last.next_keys_from if last else None}
        if last is None:
            given["parent"] = self.run.sha256  # type: ignore[assignment]
        made = grow(self.commits, kind, **given | fields)
        self.commits[-1] = seal(made.record, key)
        return self.commits[-1]

    def start(self, key: PrivateKey | None, deltas: int = 2) -> SignedRun:
        self.grow(key, "fence")
        self.grow(key, "anchor")
        for _ in range(deltas):
            self.grow(key)
        return self

    def rotate(self, key: PrivateKey, *to: PrivateKey) -> SignedRun:
        self.grow(key, "fence", keys=tuple(one.public.hex for one in to))
        return self

    def reader(self, *trusted: PrivateKey) -> ChainReader:
        bucket = ChainBucket(self.commits)
        bucket.put_now(RUN, self.run.data)
        return ChainReader(bucket, self.run.record, Trust(frozenset(key.public.hex for key in trusted)))


def newest(reader: ChainReader) -> int | None:
    """The newest version that the reader accepts, forward and from the head alike."""
    head = run(reader.read_head())
    forward = run(reader.read_after(None, 64))
    assert head is not None
    assert forward[-1] == head
    return head.record.version


class TestSignatures:
    def test_commits_of_a_trusted_key_are_accepted(self) -> None:
        assert newest(SignedRun(A).start(A).reader(A)) == 3

    def test_a_record_without_trust_reads_the_same(self) -> None:
        signed = SignedRun(A).start(A)
        bucket = ChainBucket(signed.commits)
        bucket.put_now(RUN, signed.run.data)
        assert run(ChainReader(bucket, signed.run.record).read_head()) == signed.commits[-1]

    @pytest.mark.parametrize(
        ("key", "message"),
        [(None, "is not signed"), (EVIL, "which is not a key of this run")],
        ids=["unsigned", "another key"],
    )
    def test_a_last_commit_of_anyone_else_is_refused(self, key: PrivateKey | None, message: str) -> None:
        signed = SignedRun(A).start(A)
        signed.grow(key)
        reader = signed.reader(A)
        with pytest.raises(Untrusted, match=message) as caught:
            run(reader.read_head())
        assert caught.value.hint
        assert [one.record.version for one in run(reader.read_after(None, 64))] == [0, 1, 2, 3]
        with pytest.raises(Untrusted, match=message):
            run(reader.read_after(signed.commits[3]))

    def test_a_key_of_the_run_that_the_reader_does_not_trust_is_refused(self) -> None:
        reader = SignedRun(EVIL).start(EVIL).reader(A)
        with pytest.raises(Untrusted, match="which you do not trust") as caught:
            run(reader.read_head())
        assert str(EVIL.public) in str(caught.value.hint)

    def test_a_signature_of_other_bytes_is_refused(self) -> None:
        signed = SignedRun(A).start(A)
        last = signed.commits[-1]
        other = msgspec.json.encode(msgspec.structs.replace(last.record, step=99))
        signed.commits[-1] = unseal(other + b"\n" + last.data.partition(b"\n")[2], Commit, "")
        with pytest.raises(Untrusted, match="its signature is wrong"):
            run(signed.reader(A).read_head())

    def test_a_signature_of_another_kind_of_record_is_refused(self) -> None:
        signed = SignedRun(A).start(A)
        record = msgspec.json.encode(signed.commits[-1].record)
        signed.commits[-1] = unseal(add_signature("alive", record, A), Commit, "")
        with pytest.raises(Untrusted, match="its signature is wrong"):
            run(signed.reader(A).read_head())

    @pytest.mark.parametrize("line", [b"", b"{}", b'{"key":"ab","signature":"cd"}', b"\xff", b"[]\n[]"])
    def test_a_malformed_signature_is_one_clear_error(self, line: bytes) -> None:
        with pytest.raises(BrokenChain, match="cannot be read"):
            unseal(SignedRun(A).start(A).commits[-1].data.partition(b"\n")[0] + b"\n" + line, Commit, "here")

    def test_a_stripped_signature_breaks_the_chain(self) -> None:
        signed = SignedRun(A).start(A)
        bare = seal(signed.commits[2].record)
        reader = signed.reader(A)
        reader.bucket.rewrite(bare)  # type: ignore[attr-defined]
        with pytest.raises(WeightwireError):
            run(reader.read_parent(signed.commits[3]))

    def test_one_signed_commit_proves_unsigned_ones_before_it(self) -> None:
        """They are named by their hashes, so whoever signed the last one has vouched for them."""
        signed = SignedRun(A).start(None)
        signed.grow(A)
        assert newest(signed.reader(A)) == 4


class TestRotation:
    def test_commits_of_a_new_key_are_accepted_by_readers_of_the_old_one(self) -> None:
        signed = SignedRun(A).start(A).rotate(A, B)
        signed.grow(B)
        assert newest(signed.reader(A)) == 5
        assert newest(signed.reader(B)) == 5

    def test_a_revoked_key_may_not_sign_any_more(self) -> None:
        signed = SignedRun(A).start(A).rotate(A, B)
        signed.grow(A)
        with pytest.raises(Untrusted, match="which is not a key of this run"):
            run(signed.reader(A, B).read_head())

    def test_keys_that_a_stranger_introduces_do_not_count(self) -> None:
        signed = SignedRun(A).start(A).rotate(EVIL, EVIL, A)
        signed.grow(EVIL)
        with pytest.raises(Untrusted, match="which you do not trust"):
            run(signed.reader(A).read_head())

    def test_several_rotations_are_followed(self) -> None:
        signed = SignedRun(A).start(A)
        keys = [A, *(PrivateKey.generate() for _ in range(5))]
        for old, new in pairwise(keys):
            signed.rotate(old, new)
            signed.grow(new)
        assert newest(signed.reader(A)) == 13
        assert newest(signed.reader(keys[3])) == 13
        with pytest.raises(Untrusted):
            run(signed.reader(B).read_head())

    def test_a_commit_cannot_hide_a_rotation(self) -> None:
        signed = SignedRun(A).start(A).rotate(A, B)
        signed.grow(A, keys_from=None)
        reader = signed.reader(A)
        with pytest.raises(BrokenChain, match="names other keys than those in force"):
            run(reader.read_after(signed.commits[-2]))

    def test_a_revoked_key_cannot_bring_itself_back(self) -> None:
        signed = SignedRun(A).start(A).rotate(A, B)
        signed.grow(B)
        signed.rotate(A, A)
        signed.grow(A)
        with pytest.raises(Untrusted, match=r"0006\.json: is signed by .*, which is not a key of this run"):
            run(signed.reader(A).read_head())

    def test_keys_of_a_later_commit_come_from_those_seen_before(self) -> None:
        signed = SignedRun(A).start(A).rotate(A, B).rotate(B, B, C)
        signed.grow(C)
        reader = signed.reader(A)
        assert reader.authority is not None
        fences = [(version, signed.commits[version].sha256) for version in (4, 5)]
        for seen in (None, *fences):
            run(reader.authority.check_keys_since(signed.commits[6].record, seen))
        with pytest.raises(Untrusted, match="ignores the keys that version 4 named"):  # another fence in its place
            run(reader.authority.check_keys_since(signed.commits[6].record, (4, "ab" * 32)))
        skips = signed.grow(A, keys_from=None).record
        with pytest.raises(Untrusted, match="ignores the keys that version 5 named"):
            run(reader.authority.check_keys_since(skips, fences[1]))

    def test_a_forged_rotation_is_forgotten_once_it_is_gone(self) -> None:
        signed = SignedRun(A).start(A).rotate(A, B)
        signed.grow(B)
        reader = signed.reader(A)
        forged = msgspec.structs.replace(signed.commits[4].record, keys=(EVIL.public.hex,))
        reader.bucket.rewrite(seal(forged, EVIL))  # type: ignore[attr-defined]
        with pytest.raises(Untrusted):
            run(reader.read_head())
        reader.bucket.rewrite(signed.commits[4])  # type: ignore[attr-defined]
        assert newest(reader) == 5

    def test_only_a_fence_may_change_the_keys(self) -> None:
        with pytest.raises(ValueError, match="only a fence"):
            SignedRun(A).start(A).grow(A, keys=(B.public.hex,))

    def test_keys_come_from_an_earlier_version(self) -> None:
        with pytest.raises(ValueError, match="from a later version"):
            SignedRun(A).start(A).grow(A, keys_from=4)

    def test_keys_from_a_version_without_keys_are_refused(self) -> None:
        signed = SignedRun(A).start(A)
        signed.grow(A, keys_from=1)
        with pytest.raises(Untrusted, match="does not name any keys"):
            run(signed.reader(A).read_head())


class TestSignOfLife:
    def alive(self, signed: SignedRun, key: PrivateKey | None, **fields: Any) -> bytes:
        last = signed.commits[-1]
        given: dict[str, Any] = {
            "run": last.record.run,
            "epoch": last.record.epoch,
            "version": last.record.version,
            "commit": last.sha256,
            "time": 5.0,
        }
        return seal(SignOfLife(**given | fields), key).data

    def read(self, data: bytes, signed: SignedRun, *trusted: PrivateKey) -> SignOfLife | None:
        reader = signed.reader(*trusted)
        reader.bucket.put_now(ALIVE, data)  # type: ignore[attr-defined]
        return run(reader.read_alive())

    def test_sign_of_life_of_a_trusted_key_is_accepted(self) -> None:
        signed = SignedRun(A).start(A)
        found = self.read(self.alive(signed, A), signed, A)
        assert found is not None
        assert (found.version, found.time) == (3, 5.0)

    @pytest.mark.parametrize("key", [None, EVIL], ids=["unsigned", "another key"])
    def test_sign_of_life_of_anyone_else_is_refused(self, key: PrivateKey | None) -> None:
        signed = SignedRun(A).start(A)
        with pytest.raises(Untrusted):
            self.read(self.alive(signed, key), signed, A)

    def test_sign_of_life_of_a_revoked_key_is_refused(self) -> None:
        signed = SignedRun(A).start(A).rotate(A, B)
        with pytest.raises(Untrusted):
            self.read(self.alive(signed, A), signed, A)
        assert self.read(self.alive(signed, B), signed, A) is not None

    def test_sign_of_life_of_a_revoked_key_at_an_old_version_is_refused(self) -> None:
        signed = SignedRun(A).start(A)
        old = self.alive(signed, A)
        with pytest.raises(Untrusted):
            self.read(old, signed.rotate(A, B), A)

    def test_sign_of_life_of_a_replaced_publisher_is_stale(self) -> None:
        signed = SignedRun(A).start(A)
        old = self.alive(signed, A)
        signed.grow(A, kind="fence")
        with pytest.raises(Stale, match="of a publisher that was replaced"):
            self.read(old, signed, A)

    @pytest.mark.parametrize("fields", [{"version": 9}, {"commit": "ab" * 32}], ids=["version", "commit"])
    def test_sign_of_life_of_a_missing_commit_is_an_error(self, fields: dict[str, Any]) -> None:
        signed = SignedRun(A).start(A)
        with pytest.raises(BrokenChain, match="which its publisher committed"):
            self.read(self.alive(signed, A, **fields), signed, A)

    def test_without_a_sign_of_life_there_is_none(self) -> None:
        assert run(SignedRun(A).start(A).reader(A).read_alive()) is None
