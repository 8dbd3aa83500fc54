"""Wrong versions of catching up and of the follower: plans, fetches, positions, heartbeats, patches for engines."""

from __future__ import annotations

from mutants.mutant import mutant

_PLAN, _FETCH, _RESTORE = "catchup/plan.py", "catchup/fetch.py", "catchup/restore.py"
_POSITION, _DISCOVERY, _UPDATER = "follower/run_position.py", "follower/discovery.py", "follower/replica_updater.py"
_READER = "chain/reader.py"
_TESTS = "catchup follower hostile"

CATCHUP_MUTANTS = [
    mutant(
        "origin not proven by back",
        "a way from an anchor is proven by `back` to belong to the chain of commit 0",
        _TESTS,
        (_PLAN, "        await chain.read_linked(0, await chain.prove(best.origin, 0))\n", ""),
    ),
    mutant(
        "pushed commit not confirmed",
        "a pushed commit counts only if the bucket has exactly this commit",
        _TESTS,
        (_READER, "if await self._get(commit_path(pushed.record.version)) != pushed.data:", "if False:"),
    ),
    mutant(
        "pushed commit not judged",
        "a pushed commit must be signed by a trusted key before its data is fetched",
        _TESTS,
        (
            _READER,
            "                if self.authority is not None:\n                    await self.authority.check(commit)\n",
            "",
        ),
    ),
    mutant(
        "files of an unconfirmed push stay lost",
        "a push that the bucket does not have says nothing about its files",
        _TESTS,
        (_UPDATER, "            if not is_confirmed:\n", "            if False:\n"),
    ),
    mutant(
        "origin not checked against its parent",
        "the commit of the anchor follows the one before it",
        _TESTS,
        (_PLAN, "        await chain.read_parent(best.origin)\n", ""),
    ),
    mutant(
        "held commit not compared",
        "a way from the version held begins with the commit that is held",
        _TESTS,
        (_PLAN, "if commit.sha256 != at.sha256:", "if False:"),
    ),
    mutant(
        "state of a shortcut unchecked",
        "a shortcut counts only if its `after` is that of the commit",
        _TESTS + " upkeep",
        (_PLAN, "for shortcut in shortcuts if shortcut.after == commit.after]", "for shortcut in shortcuts]"),
    ),
    mutant(
        "lost anchor planned again",
        "a plan avoids files that are lost",
        _TESTS,
        (_PLAN, "if shortcut is not None and not _lost_of(shortcut, lost) and", "if shortcut is not None and"),
        (
            _PLAN,
            "return next((start for start in starts if not _lost_of(start, lost)), None)",
            "return next(iter(starts), None)",
        ),
    ),
    mutant(
        "lost delta planned again",
        "a plan does not walk over a lost delta",
        _TESTS,
        (_PLAN, "or version == 0 or _lost_of(commit.record, lost):", "or version == 0:"),
    ),
    mutant(
        "SHA-256 unchecked",
        "every file has the SHA-256 that its record names",
        _TESTS,
        (_FETCH, "if whole.hexdigest() != file.sha256:", "if False:"),
    ),
    mutant(
        "kind of a file unchecked",
        "the files of a delta are deltas, those of an anchor anchors",
        _TESTS,
        (_FETCH, "if kind is not None and deltas[-1].kind != kind:", "if False:"),
    ),
    mutant(
        "side file unchecked",
        "side files have the size and SHA-256 that run.json names",
        _TESTS,
        (_FETCH, "if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:", "if False:"),
    ),
    mutant(
        "lost file forgotten",
        "a file that is lost is remembered, and planned around",
        _TESTS,
        (_FETCH, "            self.lost.update((file.path, problem) for file in files)\n", ""),
    ),
    mutant(
        "no way around lost data",
        "after a lost file, another way is tried",
        _TESTS,
        ("catchup/detour.py", "if len(fetcher.lost) == known:", "if True:"),
    ),
    mutant(
        "lost file never tried again",
        "lost files are tried again later",
        _TESTS,
        ("follower/damage_backoff.py", "        self._lost.clear()\n        self._lost.update(kept)\n", ""),
    ),
    mutant(
        "state of an anchor unchecked",
        "weights from an anchor have the state `after`",
        _TESTS,
        (
            _RESTORE,
            '    if state.hex != after:\n        raise CorruptDelta(\n            f"{deltas[0].where}: leads',
            '    if False:\n        raise CorruptDelta(\n            f"{deltas[0].where}: leads',
        ),
    ),
    mutant(
        "state of a restored version unchecked",
        "every version on the way has the state `after`",
        _TESTS,
        (_RESTORE, "    if state.hex != after:\n        where = ", "    if False:\n        where = "),
    ),
    mutant(
        "state of an applied version unchecked",
        "a version is applied only if it leads to its state `after`",
        _TESTS + " delta replica",
        (
            "delta/absolute.py",
            'for wanted in {after, *(delta.after for delta in deltas)} - {"", reached.hex}:',
            "for wanted in ():",
        ),
    ),
    mutant(
        "commit of the replica not compared",
        "a follower stays if the bucket has another commit for its version",
        _TESTS,
        (_POSITION, "        if commit.sha256 != held.commit:\n", "        if False:\n"),
    ),
    mutant(
        "tensors of the run not compared",
        "the tensors of a run never change",
        _TESTS,
        (_POSITION, "if schema_of_weights(self._replica.weights) != dict(run.schema):", "if False:"),
    ),
    mutant(
        "rollback unnoticed while idle",
        "a follower notices that its version is gone, even without new ones",
        _TESTS,
        (_POSITION, "if self.commit is None or now - self._rechecked < _RECHECK:", "if True:"),
    ),
    mutant(
        "history unchecked",
        "a rebuilt version follows from the version that was reached before",
        _TESTS,
        (_POSITION, "if path.start is None or reached is None:", "if True:"),
    ),
    mutant(
        "history checked only at the same version",
        "a version that was reached is proven by `back`, at any distance",
        _TESTS,
        (_POSITION, "await chain.prove(target, version) != reached.sha256:", "False:"),
    ),
    mutant(
        "goes back to an older version",
        "a follower never goes back",
        _TESTS,
        (_POSITION, "if version > target.record.version or ", "if "),
        (
            _POSITION,
            "return version >= max(self.seen.held, self._reached.record.version if self._reached else -1)",
            "return True",
        ),
        (_POSITION, "            return version > self.commit.record.version\n", "            return True\n"),
    ),
    mutant(
        "lost replica goes on",
        "a replica that lost its version is read again",
        _TESTS,
        (_DISCOVERY, "if self._position.is_outdated:", "if False:"),
    ),
    mutant(
        "patches kept after a rebuild",
        "after a rebuild engines load all weights",
        _TESTS,
        (_UPDATER, "                self._patches.drop()\n", ""),
    ),
    mutant(
        "patch not kept for engines",
        "engines get the patch of every version",
        _TESTS,
        (_UPDATER, "            await self._patches.add(patch)\n", ""),
    ),
    mutant(
        "position moves before the replica",
        "a version is reached once the replica holds it",
        _TESTS,
        (
            _UPDATER,
            "        async with self.using:\n            with self._fetcher",
            "        self._position.advance(commit)\n        async with self.using:\n            with self._fetcher",
        ),
    ),
    mutant(
        "lease dropped at a restart",
        "a restarted follower keeps its lease until its version is found",
        _TESTS,
        ("follower/heartbeat.py", " and not position.is_sought", ""),
    ),
    mutant(
        "heartbeat claims the newest version",
        "a heartbeat names the version that is held",
        _TESTS,
        (
            "follower/heartbeat.py",
            "version=position.version if position.version is not None else -1,",
            "version=position.head,",
        ),
    ),
    mutant(
        "merged patch misses the oldest",
        "an update has all changes since the last one",
        _TESTS + " delta",
        (
            "delta/absolute.py",
            "for patch in patches if name in patch.entries]",
            "for patch in patches[1:] if name in patch.entries]",
        ),
    ),
]
