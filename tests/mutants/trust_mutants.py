"""Wrong versions of signatures: who may sign, what a follower has seen, and signs of life."""

from __future__ import annotations

from mutants.mutant import mutant

_TRUST, _READER, _WRITER, _RULES = "chain/trust.py", "chain/reader.py", "chain/writer.py", "chain/rules.py"
_SEEN, _FRESH, _TAKEOVER = "follower/seen_head.py", "follower/freshness.py", "publisher/takeover.py"
_TESTS = (
    "chain/test_trust.py follower/test_trust.py follower/test_signed_shortcuts.py follower/test_trust_attacks.py "
    "publisher/test_signing.py"
)

TRUST_MUTANTS = [
    mutant(
        "signature not verified",
        "a commit is accepted only if its signature is right",
        _TESTS,
        (_TRUST, "        if not sealed.is_authentic:\n", "        if False:\n"),
    ),
    mutant(
        "missing signature accepted",
        "a commit without a signature is refused",
        _TESTS,
        (_TRUST, '            raise Untrusted(f"{where}: is not signed", hint=_HINT_FORGED)\n', "            return\n"),
    ),
    mutant(
        "run.json not proven",
        "the first trusted commit proves the run.json whose keys it was judged by",
        _TESTS,
        (_READER, "            await self.read_linked(0, await self.prove(commit, 0))\n", ""),
    ),
    mutant(
        "another fence in place of the seen one",
        "the fence that named the keys is known by its hash",
        _TESTS,
        (_TRUST, "(*before.changes, (version, commit.sha256))", '(*before.changes, (version, ""))'),
    ),
    mutant(
        "stranger's run.json signed",
        "the first signature vouches only for the publisher's own run.json",
        _TESTS,
        (_TAKEOVER, "            await self._check_own(run, self._signer)\n", "            pass\n"),
    ),
    mutant(
        "held version forgotten with the weights",
        "a replica that lost its weights does not go back",
        _TESTS,
        ("follower/run_position.py", "max(self.seen.held, self._reached", "max(-1, self._reached"),
    ),
    mutant(
        "held version not checked",
        "a version that was fetched without trusted keys is checked",
        _TESTS,
        ("follower/run_position.py", "            await self._check_trusted(commit, chain)\n", ""),
    ),
    mutant(
        "replaced publisher shows life",
        "a publisher that was replaced writes no sign of life",
        _TESTS,
        (_WRITER, "                return  # another publisher has taken over\n", "                pass\n"),
    ),
    mutant(
        "sign of life of a replaced publisher accepted",
        "a sign of life comes from the newest publisher",
        _TESTS,
        (_READER, "if newest is not None and alive.record.epoch < newest.record.epoch:", "if False:"),
    ),
    mutant(
        "second form of a signature accepted",
        "nobody can change the hash of a signed record",
        _TESTS,
        ("chain/signature.py", "if msgspec.json.encode(found) != line:", "if False:"),
    ),
    mutant(
        "trust in nobody accepted",
        "to trust no key is an error",
        f"{_TESTS} chain/test_keys.py",
        ("chain/keys.py", "if not texts or not all(texts):", "if False:"),
    ),
    mutant(
        "unsigned shortcut used",
        "a reader with trusted keys uses only signed shortcuts",
        _TESTS,
        (
            "chain/reader.py",
            " or not await self.trusts(sealed):\n            return None\n        return sealed",
            ":\n            return None\n        return sealed",
        ),
    ),
    mutant(
        "shortcut of a revoked key used",
        "a shortcut is signed by a key that is in force now",
        _TESTS,
        (
            _TRUST,
            "self._check(record, await self._keys(newest.next_keys_from if newest else None), where)",
            "self._check(record, await self._keys(None), where)",
        ),
    ),
    mutant(
        "no anchor after a change of keys",
        "the first version of a new key gets an anchor that readers trust",
        f"{_TESTS} publisher/test_anchor_schedule.py",
        (
            "publisher/anchor_schedule.py",
            "is_overdue=any(commit.record.keys for commit in path.commits)",
            "is_overdue=False",
        ),
    ),
    mutant(
        "any key accepted",
        "a commit is signed by a key of the run that the reader trusts",
        _TESTS,
        (_TRUST, "if key.hex not in keys.keys:", "if False:"),
        (_TRUST, "if not keys.is_trusted and key.hex not in self.trust.keys:", "if False:"),
    ),
    mutant(
        "key not in force accepted",
        "a commit is signed by a key in force",
        _TESTS,
        (_TRUST, "if key.hex not in keys.keys:", "if False:"),
    ),
    mutant(
        "keys of run.json trusted",
        "the keys in run.json count only if the reader trusts them",
        _TESTS,
        (_TRUST, "if not keys.is_trusted and key.hex not in self.trust.keys:", "if False:"),
    ),
    mutant(
        "revoked key stays in force",
        "the keys of a fence replace those before it",
        _TESTS,
        (
            _TRUST,
            "after, changes = frozenset(commit.record.keys),",
            "after, changes = before.keys | {*commit.record.keys},",
        ),
    ),
    mutant(
        "keys of an untrusted fence trusted",
        "keys are trusted only if the fence that names them is",
        _TESTS,
        (
            _TRUST,
            "            if before.is_trusted:\n                raise\n"
            "            return KeySet(after, False, changes)",
            "            return KeySet(after, True, changes)",
        ),
    ),
    mutant(
        "revoked key brings itself back",
        "trusted keys are changed only by a trusted fence",
        _TESTS,
        (_TRUST, "            if before.is_trusted:\n                raise\n", ""),
    ),
    mutant(
        "key changes ignored",
        "keys_from names the fence whose keys are in force",
        _TESTS,
        (
            _TRUST,
            "        while version is not None and version not in self._trusted:\n",
            "        version = None\n        while False:\n",
        ),
    ),
    mutant(
        "keys_from unchecked",
        "`keys_from` is that of the commit before, or its version if it named keys",
        _TESTS,
        (_RULES, "(commit.keys_from == before.next_keys_from, ", "(True, "),
    ),
    mutant(
        "keys of the seen version forgotten",
        "the keys of a newer version come from those in force at the version seen",
        _TESTS,
        (_TRUST, "if change is not None and change not in (await", "if False and change not in (await"),
    ),
    mutant(
        "newest commit not authenticated",
        "the newest commit must be trusted",
        _TESTS,
        (
            _READER,
            "        if head is not None and self.authority is not None:\n",
            "        if False and self.authority is not None:\n",
        ),
    ),
    mutant(
        "next commits not authenticated",
        "of the next commits, the last accepted one must be trusted",
        _TESTS,
        (
            _READER,
            "        while last and self.authority is not None:\n",
            "        while False and self.authority is not None:\n",
        ),
    ),
    mutant(
        "commits after the trusted one accepted",
        "only commits up to a trusted one are accepted",
        _TESTS,
        (
            _READER,
            "return [self.remember(commit) for commit in commits[:last]]",
            "return [self.remember(commit) for commit in commits]",
        ),
    ),
    mutant(
        "run.json not bound to version 0",
        "version 0 names the hash of run.json",
        _TESTS + " chain follower",
        (_RULES, "    if commit.parent != run_sha256:\n", "    if False:\n"),
    ),
    mutant(
        "seen version not kept",
        "the newest version seen survives the loss of the weights",
        _TESTS + " follower/test_full_disk.py",
        (_SEEN, "        await self._runtime.run_in_thread(newer.write, self._directory)\n", ""),
    ),
    mutant(
        "older head accepted",
        "a newest version below the one seen is refused",
        _TESTS,
        (_SEEN, "        if newest < self.version:\n", "        if False:\n"),
    ),
    mutant(
        "other history accepted",
        "the history of a newer version contains the version seen",
        _TESTS,
        (_SEEN, "            if known != seen.commit:\n", "            if False:\n"),
    ),
    mutant(
        "other run accepted",
        "another run under the same URL is refused",
        _TESTS,
        (_SEEN, "if known is not None and known != run.run:", "if False:"),
    ),
    mutant(
        "keys of the first use not pinned",
        "first-use trusts the keys that the run had first",
        _TESTS,
        (_SEEN, "pinned = self._seen.pinned if self._seen else run.keys\n", "pinned = run.keys\n"),
    ),
    mutant(
        "commits not signed",
        "a publisher with a key signs every commit",
        _TESTS,
        (
            _WRITER,
            "            ),\n            self._key,\n        )\n",
            "            ),\n            None,\n        )\n",
        ),
    ),
    mutant(
        "signature without the kind of record",
        "a signature covers the kind of record",
        _TESTS,
        ("chain/signature.py", 'b"weightwire/1 " + kind.encode() + b"\\n" + record', "record"),
    ),
    mutant(
        "keys_from not carried on",
        "every commit names the fence whose keys are in force",
        _TESTS,
        (_WRITER, "keys_from=head.record.next_keys_from if head else None,", "keys_from=None,"),
    ),
    mutant(
        "stranger's history continued",
        "a publisher continues only a version that it trusts",
        _TESTS,
        (_WRITER, "ChainReader(bucket, run, signer.trust if signer else None)", "ChainReader(bucket, run, None)"),
        (
            _TAKEOVER,
            "ChainReader(self._bucket, run, self._signer.trust if self._signer else None)",
            "ChainReader(self._bucket, run, None)",
        ),
    ),
    mutant(
        "stranger's fence continued",
        "a version that takes the place of the fence must be trusted",
        _TESTS + " chain/test_writer.py",
        (
            _WRITER,
            "            if self.chain.authority is not None:\n"
            "                await self.chain.authority.check(taken)\n",
            "",
        ),
    ),
    mutant(
        "revoked key publishes",
        "a publisher refuses a run whose keys do not include its own",
        _TESTS,
        (_WRITER, "        if self.chain.authority is not None and self._key is not None:\n", "        if False:\n"),
    ),
    mutant(
        "publisher without a key continues a signed run",
        "a publisher without a key refuses a signed run",
        _TESTS,
        (_WRITER, "if run.keys and signer is None:", "if False:"),
    ),
    mutant(
        "revoked key kept by the change",
        "a change of keys leaves out the revoked ones",
        _TESTS + " cli",
        ("upkeep/key_change.py", "after = sorted((before | add) - revoke)", "after = sorted(before | add)"),
    ),
    mutant(
        "sign of life not signed",
        "a publisher signs its signs of life",
        _TESTS,
        (_WRITER, "seal(alive, self._key).data", "seal(alive).data"),
    ),
    mutant(
        "forged sign of life accepted",
        "a sign of life is signed like a commit",
        _TESTS,
        (
            _READER,
            "await authority.check_beside(alive, newest.record if newest else None, self.where(ALIVE))",
            "pass",
        ),
    ),
    mutant(
        "silence ignored",
        "new versions are refused while the sign of life is too old",
        _TESTS,
        (_FRESH, "return self._max_age is not None and abs(", "return False and abs("),
    ),
    mutant(
        "sign of life from the future accepted",
        "a sign of life differs from the clock by no more than the age, in either direction",
        _TESTS,
        (_FRESH, "abs(self._runtime.time() - alive.time)", "(self._runtime.time() - alive.time)"),
    ),
    mutant(
        "missing sign of life accepted",
        "new versions are refused without a sign of life",
        _TESTS,
        (
            _FRESH,
            "            if alive is None:\n                raise Stale",
            "            if alive is None:\n                return\n                raise Stale",
        ),
    ),
    mutant(
        "hidden version unnoticed",
        "a version that the publisher has committed must be shown",
        _TESTS,
        (_FRESH, "if self._alive is not None and self._alive.version > head:", "if False:"),
    ),
    mutant(
        "rolled-back run continued",
        "a publisher refuses a run that lacks the version which its sign of life names",
        "publisher/test_signing.py upkeep/test_key_change.py",
        (_WRITER, "await self.chain.check_not_rolled_back()", "pass"),
        ("publisher/takeover.py", "await chain.check_not_rolled_back()", "pass"),
    ),
    mutant(
        "refused publisher claims an epoch",
        "a publisher checks that it may sign before it claims an epoch",
        "publisher/test_signing.py upkeep/test_key_change.py",
        (_WRITER, "await self._check_may_sign(before)", "pass"),
    ),
    mutant(
        "no sign of life without list permission",
        "a publisher shows life also where the store answers 403 for the missing next version",
        "publisher/test_signing.py",
        (
            _WRITER,
            "if await self.chain.exists(self.next_version):",
            "if await self.bucket.find(commit_path(self.next_version)) is not None:",
        ),
    ),
]
