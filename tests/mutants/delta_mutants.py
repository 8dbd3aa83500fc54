"""Wrong versions of the delta file: its index, its stacks, and what a reader compares."""

from __future__ import annotations

from mutants.mutant import mutant

_STATE = "delta/state.py"
_FILE, _INDEX, _SUMS = "delta/file.py", "delta/index.py", "delta/member_sums.py"
_DECODER, _STACK = "delta/decoder.py", "delta/encoded_stack.py"
_GOLDEN, _MALFORMED, _HOSTILE = "delta/test_golden.py", "delta/test_malformed_files.py", "hostile/test_hostile.py"

DELTA_MUTANTS = [
    mutant(
        "block hash unchecked",
        "a block has the hash that the index names",
        f"{_HOSTILE} {_MALFORMED}",
        (_FILE, "if block_hash(data) != stack.hashes[index]:", "if False:"),
    ),
    mutant(
        "member counted under its neighbor",
        "each member of a stack has its own number of changes",
        "delta/test_patcher_stacks.py delta",
        (_SUMS, "[place] += changed", "[place] += np.roll(changed, 1)"),
    ),
    mutant(
        "digest added to its neighbor",
        "each member of a stack has its own digest",
        "delta/test_patcher_stacks.py delta",
        (_SUMS, "[place] += added", "[place] += np.roll(added, 1, axis=0)"),
    ),
    mutant(
        "only the first member compared with the base",
        "the base has every member of a stack, with its dtype and shape",
        "delta/test_patcher_stacks.py delta",
        (_DECODER, "not all(held.get(name) == wanted for name in stack.names)", "held.get(stack.first.name) != wanted"),
    ),
    mutant(
        "only the first member of a fresh stack compared",
        "in place, every member of a fresh stack replaces a tensor of its kind",
        "delta/test_patcher_stacks.py delta",
        (
            "delta/patcher.py",
            "if not all(held.get(name) == (*stack.kind, stack.first.rows) for name in stack.names)",
            "if held.get(stack.first.name) != (*stack.kind, stack.first.rows)",
        ),
    ),
    mutant(
        "state compared without dtypes and shapes",
        "states of tensors of another dtype or shape differ",
        "delta/test_state.py delta",
        (_STATE, "self.kinds == other.kinds", "self.kinds.keys() == other.kinds.keys()"),
    ),
    mutant(
        "digests kept in the order given",
        "the digests of a state are those of the names given with them",
        "delta/test_state.py delta",
        (_STATE, "every[self._roster.places(names)] = digests", "every[: len(digests)] = digests"),
    ),
    mutant(
        "index columns exchanged",
        "the columns of the index have one order, also for files of earlier releases",
        _GOLDEN,
        (
            _INDEX,
            "_uvarints(shared) + _uvarints([len(one) for one in rest])",
            "_uvarints([len(one) for one in rest]) + _uvarints(shared)",
        ),
        (_INDEX, "shared, rest = columns.numbers(count)", "rest, shared = columns.numbers(count)"),
    ),
    mutant(
        "shared prefix too short",
        "a name shares as many bytes as it can with the name before it",
        _GOLDEN,
        (
            _INDEX,
            "return next(k for k in range(most) if one[k] != other[k])",
            "return max(0, next(k for k in range(most) if one[k] != other[k]) - 1)",
        ),
    ),
    mutant(
        "shared prefix too long",
        "a name begins with a part of the name before it",
        _HOSTILE,
        (_INDEX, "if k > len(last):", "if k > len(last) + 1:"),
    ),
    mutant(
        "digest of an entry not compared",
        "an entry leads to the digest that the index names",
        f"{_MALFORMED} {_HOSTILE}",
        (_SUMS, "self._different((known + self.added(stack) != columns.digests).any(1))", "()"),
    ),
    mutant(
        "number of changes not compared",
        "an entry changes as many weights as the index names",
        f"{_MALFORMED} {_HOSTILE}",
        (_SUMS, "self._different(changed.astype(np.uint64) != columns.changed)", "()"),
    ),
    mutant(
        "first member read for every member",
        "a member that is read alone has its own changes",
        "delta/test_patcher_stacks.py delta",
        (_DECODER, "job.members.index(entry) * entry.layout.count", "0 * entry.layout.count"),
    ),
    mutant(
        "block of the next members",
        "a block covers the members that the index lists for it",
        "delta/test_patcher_stacks.py delta",
        (
            _STACK,
            "slice(block * self.per, (block + 1) * self.per)",
            "slice(-(block + 1) * self.per, -block * self.per or None)",
        ),
    ),
    mutant(
        "names without a limit",
        "names that share prefixes have a largest size together",
        _HOSTILE,
        (_INDEX, "if sum(shared) + sum(rest) > _MOST_NAMES:", "if False:"),
    ),
    mutant(
        "tensors without a limit of blocks",
        "a tensor has a largest number of blocks",
        _HOSTILE,
        (_INDEX, "if claim.blocks > _MOST_BLOCKS:", "if False:"),
    ),
    mutant(
        "blocks without a limit",
        "an index has a largest number of blocks",
        _HOSTILE,
        (_INDEX, "if sum(one.blocks for one in claims) > _MOST_BLOCKS:", "if False:"),
    ),
    mutant(
        "entries without a limit",
        "an index has a largest number of entries",
        _HOSTILE,
        (_INDEX, "if len(members) < count or sum(members) > _MOST_ENTRIES:", "if False:"),
    ),
    mutant(
        "columns without a limit",
        "the columns of an index have a largest size",
        _HOSTILE,
        (_INDEX, "reader.decompress(packed, _MOST_COLUMNS)", "reader.decompress(packed)"),
    ),
    mutant(
        "tensor named twice",
        "an index names a tensor once",
        f"{_HOSTILE} {_MALFORMED}",
        (_INDEX, "if len({*names}) != len(names):", "if False:"),
    ),
    mutant(
        "bytes behind the index accepted",
        "an index has no further bytes",
        _MALFORMED,
        (_INDEX, "    whole.finish()\n", ""),
    ),
    mutant(
        "head hash unchecked",
        "a file that is read by range has the head that its commit names",
        "catchup/test_remote_file.py",
        ("catchup/remote_file.py", "if hashlib.sha256(head).hexdigest() != file.head.sha256:", "if False:"),
    ),
    mutant(
        "head size unchecked",
        "the head that a commit names ends where the blocks begin",
        "catchup/test_remote_file.py",
        ("catchup/remote_file.py", "if len(delta.head) != len(head):", "if False:"),
    ),
    mutant(
        "head hash not verified",
        "verify compares the hash of a head with the commit",
        "catchup/test_data_file_check.py",
        (
            "catchup/data_file_check.py",
            "if file.head is not None and hashlib.sha256(beginning[: file.head.size]).hexdigest() != file.head.sha256:",
            "if False:",
        ),
    ),
]
