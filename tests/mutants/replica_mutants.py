"""Wrong versions of the replica: a sync left out, an order swapped, a check skipped."""

from __future__ import annotations

from mutants.mutant import mutant

_WORKDIR, _REPLICA, _FILES = "replica/workdir.py", "replica/replica.py", "system/durable_files.py"
_REFRESH, _STORE, _WRITER = "replica/current_refresh.py", "replica/checkpoint_store.py", "weights/checkpoint_writer.py"
_TESTS = "replica system/test_durable_files.py"

REPLICA_MUTANTS = [
    mutant(
        "weights before the journal",
        "a journal record is on disk before its changes go to the model",
        _TESTS,
        (
            _WORKDIR,
            "        try:\n            patch.write(record)\n",
            "        try:\n            write_absolute(self._weights, patch, threads=self._threads)\n"
            "            patch.write(record)\n",
        ),
        (
            _WORKDIR,
            "        for at in np.flatnonzero(wrong)[:1].tolist():\n",
            "        for at in ():\n",
        ),
    ),
    mutant(
        "journal record not synced",
        "a journal record is synced before its changes go to the model",
        _TESTS + " weights/test_checkpoint_writer.py",
        (_WRITER, "                os.fsync(file.fileno())\n", ""),
    ),
    mutant(
        "name of a journal record not synced",
        "the name of a journal record is synced, too",
        _TESTS + " weights/test_checkpoint_writer.py",
        (
            _WRITER,
            "            _sync([target.parent])\n        finally:\n            release_staging",
            "        finally:\n            release_staging",
        ),
    ),
    mutant(
        "model not flushed",
        "the model is on disk before the journal is emptied",
        _TESTS,
        (_WORKDIR, "durable_files.flush(self.memory, self.path / MODEL_FILE)", "pass"),
    ),
    mutant(
        "state written before the model",
        "the model is on disk before state.json says so",
        _TESTS,
        (
            _WORKDIR,
            "            saved.flush()\n",
            "            durable_files.write_file(self.path / _STATE, _describe(saved.position, saved.state))\n"
            "            saved.flush()\n",
        ),
    ),
    mutant(
        "journal emptied before the state",
        "state.json is on disk before the journal is emptied",
        _TESTS,
        (
            _WORKDIR,
            "        durable_files.write_file(self.path / _STATE, _describe(saved.position, saved.state))\n"
            "        for record in saved.records:\n            durable_files.remove(record)\n",
            "        for record in saved.records:\n            durable_files.remove(record)\n"
            "        durable_files.write_file(self.path / _STATE, _describe(saved.position, saved.state))\n"
            "        for record in saved.records:\n",
        ),
    ),
    mutant(
        "journal emptied of later versions",
        "records of versions after the one that was written to disk stay in the journal",
        _TESTS,
        (
            _WORKDIR,
            "        for record in saved.records:\n            durable_files.remove(record)\n",
            "        for record in tuple(self.journal):\n            durable_files.remove(record)\n",
        ),
    ),
    mutant(
        "an older version written over a newer sync",
        "state.json never goes back",
        _TESTS,
        (_WORKDIR, "        if saved.position.version < self.synced:\n            return\n", ""),
    ),
    mutant(
        "renewed checkpoint not verified",
        "a `current` that is made from the last one is verified",
        _TESTS,
        (_REFRESH, "if name := different(digest(weights, threads=_THREADS), self.saved.state):", "if name := '':"),
    ),
    mutant(
        "renewed checkpoint not synced",
        "a `current` that is made from the last one is on disk before the link",
        _TESTS,
        (_REFRESH, "        durable_files.flush(memory, model)\n", ""),
        (_REFRESH, "        durable_files.sync_tree(self.made)\n", ""),
    ),
    mutant(
        "renewed checkpoint of another history",
        "a `current` is renewed only from one that the journal leads on from",
        _TESTS,
        (_STORE, " or about.version < work.synced:", ":"),
    ),
    mutant(
        "replayed backwards",
        "journal records are replayed in order",
        _TESTS,
        (
            _WORKDIR,
            "sorted((self.path / _JOURNAL).iterdir())",
            "sorted((self.path / _JOURNAL).iterdir(), reverse=True)",
        ),
    ),
    mutant(
        "weights not verified at the start",
        "opening a replica verifies all weights",
        _TESTS,
        (_WORKDIR, "        work._replay()\n        work.verify()\n", "        work._replay()\n"),
    ),
    mutant(
        "journal not replayed",
        "opening a replica replays its journal",
        _TESTS,
        (_WORKDIR, "        work._replay()\n        work.verify()\n", "        work.verify()\n"),
    ),
    mutant(
        "file not synced before its rename",
        "a file that was replaced is complete after a power cut",
        _TESTS,
        (_FILES, "            _write(fd, data)\n            os.fsync(fd)\n", "            _write(fd, data)\n"),
    ),
    mutant(
        "rename of a file not synced",
        "when write_file returns, the new file is on disk",
        _TESTS,
        (
            _FILES,
            "            os.unlink(partial)\n        raise\n    _sync(path.parent)\n",
            "            os.unlink(partial)\n        raise\n",
        ),
    ),
    mutant(
        "new directory not synced",
        "when make_directory returns, the directory is on disk",
        _TESTS,
        (_FILES, "        os.mkdir(path)\n        _sync(path.parent)\n", "        os.mkdir(path)\n"),
    ),
    mutant(
        "link not synced",
        "when point returns, the new target is on disk",
        _TESTS,
        (_FILES, "    os.replace(partial, link)\n    _sync(link.parent)\n", "    os.replace(partial, link)\n"),
    ),
    mutant(
        "link not replaced at once",
        "a link always has a target",
        _TESTS,
        (_FILES, "    os.replace(partial, link)\n", "    remove(link)\n    os.replace(partial, link)\n"),
    ),
    mutant(
        "lock not synced",
        "a replica is recognized as one after a power cut",
        _TESTS,
        (
            _REPLICA,
            "        if mark != _MARK:\n            durable_files.sync_directory(directory)",
            "        if False:\n            pass",
        ),
    ),
    mutant(
        "rebuilt weights not synced",
        "rebuilt weights are on disk before they replace the old ones",
        _TESTS + " weights/test_checkpoint_writer.py",
        (_WRITER, '            _sync([*self._staging.rglob("*"), self._staging])\n', ""),
        (_WRITER, "                data.flush()\n", "                pass\n"),
    ),
    mutant(
        "name of a rebuilt directory not synced",
        "a rebuilt directory is on disk before the link names it",
        _TESTS + " weights/test_checkpoint_writer.py",
        (
            _WRITER,
            "            os.replace(self._staging, self._target)\n            _sync([self._target.parent])\n",
            "            os.replace(self._staging, self._target)\n",
        ),
    ),
    mutant(
        "checkpoint not synced",
        "a checkpoint is on disk before `current` names it",
        _TESTS,
        (_STORE, "            durable_files.sync_tree(made)\n", ""),
    ),
    mutant(
        "current names an incomplete checkpoint",
        "`current` names only complete checkpoints",
        _TESTS,
        (
            _STORE,
            "may have dropped what was copied\n            self._current.point(made)\n",
            "may have dropped what was copied\n",
        ),
        (
            _STORE,
            "            shares_blocks = durable_files.clone_file(",
            "            self._current.point(made)\n            shares_blocks = durable_files.clone_file(",
        ),
    ),
    mutant(
        "handed-out checkpoint removed",
        "a checkpoint stays until the next one is handed out",
        _TESTS,
        (
            _STORE,
            "self._current.tidy({*self._lent, *filter(None, (self._handed_out, self._making))})",
            "self._current.tidy()",
        ),
    ),
    mutant(
        "old checkpoint passed as current",
        "`current` is made again for every version that is asked for",
        _TESTS,
        (
            _STORE,
            "return about is not None and replace(about, shares_blocks=None) == _describe(work)",
            "return about is not None",
        ),
    ),
    mutant(
        "failed flush ignored",
        "after a failed flush the memory is not trusted",
        _TESTS,
        (
            _WORKDIR,
            '                self._lose(f"its changes could not be written to disk ({problem.strerror})", problem)\n',
            "                return\n",
        ),
    ),
    mutant(
        "failed flush noticed late",
        "nothing is copied from a memory whose flush has failed in another thread",
        _TESTS,
        (
            _WORKDIR,
            '                self._lose(f"its changes could not be written to disk ({problem.strerror})", problem)\n',
            '                raise ReplicaError(f"{self.path}: not written") from problem\n',
        ),
    ),
    mutant(
        "copy of dropped pages",
        "a flush that fails during a copy spoils the copy",
        _TESTS,
        (_STORE, "            work.check()  # a flush that failed meanwhile may have dropped what was copied\n", ""),
    ),
]
