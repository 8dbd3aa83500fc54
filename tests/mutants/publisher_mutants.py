"""Wrong versions of the publisher: its takeover, its copies, the order of its uploads."""

from __future__ import annotations

from mutants.mutant import mutant

_VERSION, _SINGLE, _TAKEOVER = "publisher/encoded_version.py", "publisher/single_process.py", "publisher/takeover.py"
_TESTS = "publisher faults/test_lost_replies.py"

PUBLISHER_MUTANTS = [
    mutant(
        "commit before its data",
        "the data of a version is in the bucket before its commit",
        _TESTS,
        (
            _VERSION,
            "        await context.uploader.retry(lambda: context.uploader.put(file, encoded.data), "
            "lambda: taken.copies.waiting)\n",
            '        context.background.start(context.uploader.put(file, encoded.data), "data")\n',
        ),
    ),
    mutant(
        "failed upload taken for a success",
        "a version is committed only if its upload succeeded",
        _TESTS,
        (
            "publisher/upload.py",
            "self._runtime.clock() - began > self._retry_seconds:\n                    raise\n",
            "self._runtime.clock() - began > self._retry_seconds:\n                    return None\n",
        ),
    ),
    mutant(
        "copy of a dropped version kept",
        "the diff is against what was published last",
        _TESTS,
        (_VERSION, "                await context.runtime.run_in_thread(advance.undo)\n", "                pass\n"),
    ),
    mutant(
        "undo restores nothing",
        "an update that failed is undone in the copy",
        _TESTS,
        ("publisher/copy_advance.py", "        to_the_end(lambda stop: _undo(self._steps))\n", ""),
    ),
    mutant(
        "delta not compared with the weights",
        "a delta leads to the weights that were captured",
        _TESTS,
        ("publisher/copy_advance.py", "        if rest.values:\n", "        if False:\n"),
    ),
    mutant(
        "digests not compared",
        "the digest of a block is that of what it decodes to",
        _TESTS,
        ("publisher/copy_advance.py", "        if not np.array_equal(added, block.digests):\n", "        if False:\n"),
    ),
    mutant(
        "live weights encoded in place",
        "what the encoder reads twice cannot change in between",
        _TESTS,
        (
            "publisher/copy_advance.py",
            "    units = scratch.units(batch)\n",
            "    if batch.pieces[0].stack.is_single and len(batch.pieces) == 1:\n"
            "        return batch.pieces[0].stack.units(latest, batch.pieces[0].index)\n"
            "    units = scratch.units(batch)\n",
        ),
    ),
    mutant(
        "state before the fence kept",
        "if another publisher committed before the fence, the state is rebuilt",
        _TESTS,
        (_TAKEOVER, "if head is not None and after != found.after:", "if False:"),
    ),
    mutant(
        "state of the last version not kept",
        "the next diff starts from the state of the last commit",
        _TESTS,
        (_SINGLE, "        self._session = replace(session, state=encoded.after)\n", ""),
    ),
    mutant(
        "first data under the wrong version",
        "data is uploaded again if another publisher was first",
        _TESTS,
        (
            _SINGLE,
            "            uploaded = await upload_version(context, taken, encoded, writer.epoch)\n        return",
            "        return",
        ),
    ),
    mutant(
        "shortcut before its data",
        "the data of a shortcut is in the bucket before its record",
        _TESTS,
        (
            "publisher/anchors.py",
            "                await uploader.put(file, made.data)\n            except",
            '                self._context.background.start(uploader.put(file, made.data), "data")\n            except',
        ),
    ),
    mutant(
        "shortcut of a failed upload",
        "a shortcut is recorded only if its data was uploaded",
        _TESTS,
        (
            "publisher/anchors.py",
            "                self._warn(commit.version, problem)\n                return None\n        return file",
            "                self._warn(commit.version, problem)\n        return file",
        ),
    ),
    mutant(
        "side files not uploaded",
        "side files are in the bucket before run.json names them",
        _TESTS,
        (_TAKEOVER, "            await self._bucket.put(uploaded[-1].path, data)\n", ""),
    ),
    mutant(
        "run started before its data",
        "run.json is created after the first data is uploaded",
        _TESTS,
        (
            _SINGLE,
            "            uploaded = await upload_version(self._context, taken, encoded, FIRST_EPOCH)\n"
            "            return await self._context.background",
            "            files = await self._context.uploader.name(encoded.kind, 1, FIRST_EPOCH, encoded.data)\n"
            "            uploaded = (files,), {}\n            return await self._context.background",
        ),
    ),
    mutant(
        "acknowledged before the commit",
        "a version is acknowledged once its commit exists",
        _TESTS,
        (
            _SINGLE,
            "            await writer.send(commit)\n",
            "            publication.succeed(commit.record)\n            await writer.send(commit)\n",
        ),
    ),
]
