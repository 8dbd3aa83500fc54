"""Wrong versions of upkeep: leases, grace, window, anchors to keep, orphans."""

from __future__ import annotations

from mutants.mutant import mutant

_GC, _RETENTION = "upkeep/gc.py", "upkeep/retention.py"
_TESTS = "upkeep"

UPKEEP_MUTANTS = [
    mutant(
        "leases ignored",
        "nothing is deleted that a follower with a lease needs",
        _TESTS,
        (_RETENTION, "if lease.version >= 0 and lease.is_alive(now)", "if False"),
    ),
    mutant(
        "lease keeps one version too few",
        "a lease at version v keeps everything from v+1 on",
        _TESTS,
        (_RETENTION, "Limit(lease.version + 1, ", "Limit(lease.version + 2, "),
    ),
    mutant(
        "lease ends at half its time",
        "a lease lasts so many seconds after the heartbeat was written",
        _TESTS + " chain",
        ("chain/records.py", "return modified + self.lifetime\n", "return modified + self.lifetime / 2\n"),
    ),
    mutant(
        "grace ignored",
        "data is deleted only after the grace period of its gc record",
        _TESTS,
        (_RETENTION, "for record in records if now - record.since >= grace)", "for record in records)"),
    ),
    mutant(
        "deleted without an announcement",
        "a gc record announces every deletion",
        _TESTS,
        (_GC, "gone = min(bound, settled(records, view.now, retention.grace))", "gone = bound"),
    ),
    mutant(
        "old announcement taken for today's limit",
        "data is deleted below the announced version and below today's limit",
        _TESTS,
        (
            _GC,
            "gone = min(bound, settled(records, view.now, retention.grace))",
            "gone = settled(records, view.now, retention.grace)",
        ),
    ),
    mutant(
        "window ignored",
        "data for versions younger than the window stays",
        _TESTS,
        (_RETENTION, "    if young is not None:\n        # The data", "    if False:\n        # The data"),
    ),
    mutant(
        "way to the window deleted",
        "the anchor that leads to the first young version stays",
        _TESTS,
        (_RETENTION, "start = max((version for version in anchors if version <= young), default=0)", "start = young"),
    ),
    mutant(
        "one anchor too few",
        "so many anchors stay as asked for",
        _TESTS,
        (_RETENTION, "return sorted(anchors)[-retention.anchors :]", "return sorted(anchors)[-1:]"),
    ),
    mutant(
        "loosest limit",
        "the smallest limit counts",
        _TESTS,
        (
            _RETENTION,
            "return sorted([*found, *more], key=lambda limit: limit.version)",
            "return sorted([*found, *more], key=lambda limit: -limit.version)",
        ),
    ),
    mutant(
        "incomplete anchor counts",
        "an anchor counts only if all its files are there",
        _TESTS,
        (_RETENTION, "return any(is_there(anchor.files, sizes) for anchor in", "return any(True for anchor in"),
    ),
    mutant(
        "anchor that leads nowhere counts",
        "an anchor counts only if all data from there to the newest version is there",
        _TESTS,
        (_GC, "            reachable = reachable and is_there(commit.files, sizes)\n", ""),
    ),
    mutant(
        "orphan deleted at once",
        "an orphan is deleted after the grace period",
        _TESTS,
        (_RETENTION, "if one.path not in named and now - one.modified >= patience:", "if one.path not in named:"),
    ),
    mutant(
        "anchor on its way deleted",
        "an unnamed anchor is deleted after a day: its shortcut may be on the way",
        _TESTS,
        (_RETENTION, "        return max(self.grace, DAY)\n", "        return self.grace\n"),
    ),
    mutant(
        "named data taken for orphans",
        "data that a shortcut names is not an orphan",
        _TESTS,
        (
            _RETENTION,
            "for files in (commit.files, *(one.files for one in shortcuts)) for file in files}",
            "for file in commit.files}",
        ),
        (_RETENTION, "        return max(self.grace, DAY)\n", "        return self.grace\n"),
    ),
    mutant(
        "hole in the chain ignored",
        "nothing is deleted if a commit is missing while later ones exist",
        _TESTS,
        (
            _GC,
            "    if (version := _first_hole(found)) is not None:\n        raise missing_commit(",
            "    if False:\n        raise missing_commit(",
        ),
        (
            _GC,
            "        if commit is None:\n            raise missing_commit(chain.where(commit_path(version)), "
            '"; nothing was deleted")\n        found[version]',
            "        if commit is None:\n            return\n        found[version]",
        ),
        (
            _GC,
            "            commit, shortcuts = commits[version], view",
            "            if version not in commits:\n                continue\n"
            "            commit, shortcuts = commits[version], view",
        ),
    ),
    mutant(
        "unreadable heartbeat ignored",
        "nothing is deleted if a heartbeat of the last day cannot be read",
        _TESTS,
        (
            _GC,
            "            if view.now - one.modified < DAY:\n                raise  # this replica may need any data\n",
            "",
        ),
    ),
    mutant(
        "clock of the machine",
        "everything is judged by the store's clock",
        _TESTS,
        (_GC, "    return found.modified if found else None\n", "    return runtime.time()\n"),
    ),
    mutant(
        "data before its shortcuts",
        "a shortcut is deleted before its data",
        _TESTS,
        (
            _GC,
            "        [one for _, one in _of_versions(view.shortcut_objects, 0, gone)],  "
            "# before the data that they lead to\n"
            "        [one for _, one in _of_versions(view.data, 0, gone)],\n",
            "        [one for _, one in _of_versions(view.data, 0, gone)],\n"
            "        [one for _, one in _of_versions(view.shortcut_objects, 0, gone)],\n",
        ),
    ),
    mutant(
        "base or nothing counts as an anchor",
        "nothing is deleted while no anchor counts",
        _TESTS,
        (
            _RETENTION,
            '        return [Limit(0, "no anchor leads to the newest version")]\n',
            '        return [Limit(max(commits, default=0), "no anchor leads to the newest version")]\n',
        ),
    ),
    mutant(
        "damaged anchor not kept",
        "damaged anchors stay until there are enough intact ones",
        _TESTS,
        (_GC, "if not versions or len(anchors) >= retention.anchors:", "if True:"),
    ),
    mutant(
        "keys not read again",
        "anchors of a key that was revoked during a sweep justify no deletion",
        _TESTS,
        (_GC, "if not plan.needs_anchors or keys == await _keys_in_force(chain):", "if True:"),
    ),
]
