"""Whether a commit comes from a key that the reader trusts.

A run names its keys in run.json. A fence may replace them for all later commits. A commit is trusted if one of the keys
in force signed it, and the reader trusts that key, or trusts the fence that introduced it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from weightwire.chain.keys import PublicKey
from weightwire.chain.record_paths import commit_path
from weightwire.chain.records import Commit, Run, Sealed, Shortcut, SignOfLife
from weightwire.errors import Untrusted

__all__ = ["Authority", "KeySet", "Trust"]

_MOST_CHANGES = 1000  # of the keys of one run


@dataclass(frozen=True)
class Trust:
    """The public keys that a reader trusts, in hex."""

    keys: frozenset[str]


@dataclass(frozen=True)
class KeySet:
    """The keys in force. `is_trusted`: a trusted commit introduced them.

    `changes` are the versions and hashes of the fences that led to them.
    """

    keys: frozenset[str]
    is_trusted: bool
    changes: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Authority:
    """Checks signatures. `read` returns a commit of the run by its version, unchecked."""

    run: Run
    trust: Trust
    where: Callable[[str], str]
    read: Callable[[int], Awaitable[Sealed[Commit] | None]]
    _trusted: dict[int, KeySet] = field(default_factory=dict)  # by the version that introduced them

    async def check(self, commit: Sealed[Commit]) -> None:
        """Raises Untrusted unless the commit is signed by a key that is in force and trusted."""
        where = self.where(commit_path(commit.record.version))
        self._check(commit, await self._keys(commit.record.keys_from), where)

    async def check_beside(
        self, record: Sealed[Shortcut] | Sealed[SignOfLife], newest: Commit | None, where: str
    ) -> None:
        """The same for a record beside the chain, by the keys in force after the newest commit.

        The data of a shortcut is bound to the chain only by the state digest, for which an attacker can craft weights.
        """
        self._check(record, await self._keys(newest.next_keys_from if newest else None), where)

    async def change_before(self, commit: Commit) -> tuple[int, str] | None:
        """The version and hash of the fence that named the keys in force after a commit; None if run.json did."""
        return next(reversed((await self._keys(commit.next_keys_from)).changes), None)

    async def check_keys_since(self, commit: Commit, change: tuple[int, str] | None) -> None:
        """Raises Untrusted if the keys of a later commit do not come from those that this fence named.

        A proof by `back` may skip the fence, and the bucket may show another one in its place. Without this check, a
        key that it revoked could go on signing.
        """
        if change is not None and change not in (await self._keys(commit.keys_from)).changes:
            raise Untrusted(
                f"{self.where(commit_path(commit.version))}: ignores the keys that version {change[0]} named",
                hint=_HINT_FORGED,
            )

    async def keys_after(self, head: Commit | None) -> frozenset[str]:
        """The keys that may sign the commit after `head`."""
        return (await self._keys(head.next_keys_from if head else None)).keys

    async def check_may_sign(self, key: PublicKey, head: Commit | None) -> None:
        """Raises Untrusted if the commit after `head` must not be signed by this key."""
        if key.hex not in await self.keys_after(head):
            raise Untrusted(
                f"{self.where('')[:-1]}: {key.short} is not a key of this run, or was revoked",
                hint="publish with a key that `weightwire status URL` lists, or start a new run",
            )

    def _check(self, sealed: Sealed[Commit] | Sealed[Shortcut] | Sealed[SignOfLife], keys: KeySet, where: str) -> None:
        signature = sealed.signature
        if signature is None:
            raise Untrusted(f"{where}: is not signed", hint=_HINT_FORGED)
        key = PublicKey(signature.key)
        if key.hex not in keys.keys:
            raise Untrusted(f"{where}: is signed by {key.short}, which is not a key of this run", hint=_HINT_FORGED)
        if not keys.is_trusted and key.hex not in self.trust.keys:
            raise Untrusted(
                f"{where}: is signed by {key.short}, which you do not trust",
                hint=f"if this is the publisher's key, pass --trust {key}",
            )
        if not sealed.is_authentic:
            raise Untrusted(f"{where}: its signature is wrong", hint=_HINT_FORGED)

    async def _keys(self, version: int | None) -> KeySet:
        """The keys that the fence of this version introduced, or those of run.json."""
        # Each change names the one before it, so walk back to a known one, then judge them in order.
        changes: list[Sealed[Commit]] = []
        while version is not None and version not in self._trusted:
            commit = await self.read(version)
            if commit is None or not commit.record.keys or len(changes) == _MOST_CHANGES:
                raise Untrusted(f"{self.where(commit_path(version))}: does not name any keys", hint=_HINT_FORGED)
            changes.append(commit)
            version = commit.record.keys_from
        keys = KeySet(frozenset(self.run.keys), is_trusted=False) if version is None else self._trusted[version]
        for commit in reversed(changes):
            keys = self._changed(keys, commit)
        return keys

    def _changed(self, before: KeySet, commit: Sealed[Commit]) -> KeySet:
        """The keys after a commit. They are trusted if the commit is. A revoked key cannot bring itself back."""
        version = commit.record.version
        after, changes = frozenset(commit.record.keys), (*before.changes, (version, commit.sha256))
        try:
            self._check(commit, before, self.where(commit_path(version)))
        except Untrusted:
            if before.is_trusted:
                raise
            return KeySet(after, False, changes)  # not kept: the bucket may have shown a forged commit
        self._trusted[version] = KeySet(after, True, changes)
        return self._trusted[version]


_HINT_FORGED = "it may be an attack: do not use this run until you know where this object comes from"
