"""Wrong versions of the chain: its rules, its reader and its writer."""

from __future__ import annotations

from mutants.mutant import mutant

_RULES, _READER, _WRITER = "chain/rules.py", "chain/reader.py", "chain/writer.py"
_TESTS = "chain catchup follower"

CHAIN_MUTANTS = [
    mutant(
        "parent hash unchecked",
        "`parent` is the hash of the commit before",
        _TESTS,
        (_RULES, "(commit.parent == parent.sha256, ", "(True, "),
    ),
    mutant(
        "state before unchecked",
        "`before` equals the `after` of the commit before",
        _TESTS,
        (_RULES, "(commit.before == before.after, ", "(True, "),
    ),
    mutant(
        "older epoch accepted",
        "`epoch` never gets smaller",
        _TESTS,
        (_RULES, "(commit.epoch >= before.epoch, ", "(True, "),
    ),
    mutant(
        "new epoch without a fence",
        "`epoch` is larger exactly if the kind is `fence`",
        _TESTS,
        (_RULES, "((commit.epoch > before.epoch) == (commit.kind == FENCE), ", "(True, "),
    ),
    mutant(
        "back hash unchecked",
        "`back[0]` equals the `parent` of the commit before",
        _TESTS,
        (_RULES, "not commit.back or before.parent == commit.back[0],", "True,"),
    ),
    mutant(
        "run of a record unchecked",
        "`run` is the same in all records",
        _TESTS,
        (_RULES, "if record.run != run:", "if False:"),
    ),
    mutant(
        "first commit unchecked",
        "commit 0 is a fence without a state",
        _TESTS,
        (
            _RULES,
            "if commit.version or commit.kind != FENCE or commit.after or commit.keys_from is not None:",
            "if False:",
        ),
    ),
    mutant(
        "version of a commit unchecked",
        "`version` is the one of its place",
        _TESTS,
        (_RULES, "(commit.version == before.version + 1, ", "(True, "),
        (_READER, "if commit.record.version != version:", "if False:"),
    ),
    mutant(
        "proof takes another back hash",
        "a proven commit has the hash that a later one names",
        _TESTS,
        (_RULES, "commit.back[k - 1]", "commit.back[k - 2]"),
    ),
    mutant(
        "hash of a linked commit unchecked",
        "each commit on the way has the hash that the next one names",
        _TESTS,
        (_READER, "if commit.sha256 != sha256:", "if False:"),
    ),
    mutant(
        "cached commit not compared",
        "a commit that was read ahead is checked when it is needed",
        _TESTS,
        (
            _READER,
            "if version in self._known and self._known[version].sha256 == sha256:",
            "if version in self._known:",
        ),
    ),
    mutant(
        "parent on the way unchecked",
        "every commit of a way is checked against the one before it",
        _TESTS,
        (
            _READER,
            "        self.check_follows(parent, commit)\n        return parent\n",
            "        return parent\n",
        ),
    ),
    mutant(
        "next commit unchecked",
        "every new commit is checked against the one before it",
        _TESTS,
        (
            _READER,
            "                    self.check_follows(parent, commit)\n                except",
            "                    pass\n                except",
        ),
    ),
    mutant(
        "refused commit is not reported",
        "a follower reports a commit that it refuses",
        _TESTS,
        (
            _READER,
            "                    if accepted:  # these are valid; the next poll stops at the bad one\n",
            "                    if True:\n",
        ),
    ),
    mutant(
        "HEAD.json trusted",
        "HEAD.json is a hint: its version counts only if its commit exists",
        _TESTS,
        (_READER, " and await self.exists(hint.version):", ":"),
    ),
    mutant(
        "newest version found too early",
        "the newest version is the last that exists",
        _TESTS,
        (_READER, "while high - low > 1:", "while high - low > 2:"),
    ),
    mutant(
        "back hashes from another commit",
        "a writer proves each hash before it names it",
        _TESTS,
        (_READER, "(await self.read_linked(version, sha256)).record.back[k]", "head.record.parent"),
    ),
    mutant(
        "every conflict is a success",
        "after a refused create the writer reads back whose bytes are there",
        _TESTS + " publisher",
        (
            _WRITER,
            "        except AlreadyExists:\n            exists = True  #",
            "        except AlreadyExists:\n            return data  #",
        ),
    ),
    mutant(
        "absence is a conflict",
        "a create that seems to fail may still arrive: the same bytes are sent again",
        _TESTS + " publisher",
        (
            _WRITER,
            "        except NotFound as problem:\n            if exists:",
            '        except NotFound as problem:\n            return b"{}"\n            if exists:',
        ),
    ),
    mutant(
        "sent commit given up",
        "a publisher never gives up a commit that it sent",
        _TESTS + " publisher faults/test_lost_replies.py",
        (
            _WRITER,
            "data = await create_until_taken(self.bucket, path, commit.data, self._runtime, self._warn)",
            "data = await create_until_taken(self.bucket, path, commit.data, self._runtime, self._warn, tries=1)",
        ),
    ),
    mutant(
        "fence of another publisher ignored",
        "a publisher whose place is taken is fenced off",
        _TESTS + " publisher",
        (_WRITER, "        if data != commit.data:\n", "        if False:\n"),
    ),
    mutant(
        "no fence at a takeover",
        "a new publisher begins with a fence",
        _TESTS + " publisher",
        (
            _WRITER,
            "        while True:\n            self._check_not_replaced(self.head)\n",
            "        while self.head is None:\n            self._check_not_replaced(self.head)\n",
        ),
    ),
    mutant(
        "epoch of another publisher taken",
        "an epoch belongs to the publisher whose record is stored",
        _TESTS + " publisher",
        (_WRITER, ".record.write_id == mine.write_id:", ".record.run == mine.run:"),
    ),
    mutant(
        "epoch not claimed",
        "a publisher claims its epoch before it writes",
        _TESTS + " publisher",
        (
            _WRITER,
            "data = await create_until_taken(self.bucket, path, seal(mine).data, self._runtime, self._warn, tries=5)",
            "data = seal(mine).data",
        ),
    ),
    mutant(
        "newer publisher overlooked",
        "a publisher that finds its epoch or a larger one in the chain stops",
        _TESTS + " publisher",
        (_WRITER, "if head is not None and head.record.epoch >= self.epoch:", "if False:"),
    ),
    mutant(
        "own run instead of the stored one",
        "the run.json that is stored counts",
        _TESTS + " publisher",
        (_WRITER, '    return unseal(data, Run, f"{bucket.url}/{RUN}").record\n', "    return run\n"),
    ),
]
