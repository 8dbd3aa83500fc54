"""Wrong versions of what guards against hostile buckets, stores and replica directories."""

from __future__ import annotations

from mutants.mutant import mutant

_STORE, _READER, _FOLDER = "bucket/object_store.py", "chain/reader.py", "replica/linked_folder.py"
_ATTACKS, _JUNK, _LINKS = "hostile/test_attacks.py", "hostile/test_junk.py", "hostile/test_linked_replica.py"

HOSTILE_MUTANTS = [
    mutant(
        "more bytes than requested accepted",
        "a store that sends more than was requested is an error of the store",
        _ATTACKS,
        (_STORE, "if filled + len(chunk) > len(view):", "if False:"),
    ),
    mutant(
        "repeated pages read on",
        "a listing that repeats itself ends",
        _ATTACKS,
        (_STORE, "if len(found) == known or known > _MOST_LISTED:", "if known > _MOST_LISTED:"),
    ),
    mutant(
        "listing without a limit",
        "a listing has a largest size",
        _ATTACKS,
        (_STORE, "if len(found) == known or known > _MOST_LISTED:", "if len(found) == known:"),
    ),
    mutant(
        "empty pages read on",
        "a listing without objects ends",
        _ATTACKS,
        (_STORE, "async with asyncio.timeout(_BATCH_SECONDS):", "async with asyncio.timeout(None):"),
    ),
    mutant(
        "records without a timeout",
        "a record that arrives byte by byte times out",
        _ATTACKS,
        (_STORE, ', "timeout": timedelta(seconds=20)}', "}"),
    ),
    mutant(
        "data without a timeout",
        "data that arrives byte by byte times out",
        _ATTACKS,
        (_STORE, '    "timeout": timedelta(hours=1),\n', ""),
    ),
    mutant(
        "file named twice",
        "a record names each file once",
        f"{_ATTACKS} chain/test_records.py",
        (
            "chain/records.py",
            '_check(len({file.rank for file in files}) == len(files), "it names two files of one rank")',
            "pass",
        ),
    ),
    mutant(
        "empty listing trusted",
        "verify does not call a run intact because its commits are not listed",
        _ATTACKS,
        ("inspection/chain_walk.py", "            self.head = await self.chain.find_head()\n", "            pass\n"),
    ),
    mutant(
        "all junk epochs read",
        "a reader tries a bounded number of epochs and gc records",
        _JUNK,
        (_READER, "sorted(numbered, reverse=True)[:_MOST_TRIED]", "sorted(numbered, reverse=True)"),
    ),
    mutant(
        "all junk shortcuts read by status",
        "status reads a bounded number of shortcuts",
        _JUNK,
        ("inspection/status.py", "shown[:_MOST_SHORTCUTS]", "shown"),
    ),
    mutant(
        "all junk shortcuts read by the page",
        "the page reads a bounded number of shortcuts",
        _JUNK,
        ("page/run_reader.py", "in shown][:_SHORTCUTS]", "in shown]"),
    ),
    mutant(
        "folder of a replica that is a link",
        "nothing is deleted in a folder outside of the replica",
        _LINKS,
        (_FOLDER, "if self.folder.is_symlink():", "if False:"),
    ),
    mutant(
        "link out of a replica followed",
        "work and current lead into the replica",
        _LINKS,
        (_FOLDER, "return name if is_inside else None", "return name"),
        (
            "replica/replica.py",
            "Workdir.open(self._works.folder / target, self._threads)",
            "Workdir.open(link.resolve())",
        ),
    ),
    mutant(
        "links in the work directory followed",
        "weights are not written through a link",
        _LINKS,
        ("replica/workdir.py", "        _check_links(path)\n", ""),
    ),
    mutant(
        "foreign checkpoint kept as current",
        "current is a checkpoint that the replica has made",
        _LINKS,
        ("replica/checkpoint_store.py", "self._current.link.is_symlink() and self._current.target is None", "False"),
    ),
    mutant(
        "lock that is a link followed",
        "the lock is not created or written through a link",
        _LINKS,
        ("system/durable_files.py", "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW", "os.O_RDWR | os.O_CREAT"),
    ),
    mutant(
        "private key repeated in an error",
        "a private key in place of a path is in no error",
        "chain/test_keys.py",
        ("chain/keys.py", 'if "\\n" in text or _BARE_KEY.fullmatch(text) else text', "if False else text"),
    ),
    mutant(
        "newest version of publish not judged",
        "publish does not take a stranger's version for a publication",
        "cli/publish/test_signed_publish.py",
        (
            "cli/publish/run_publisher.py",
            "ChainReader(bucket, run, signer.trust if signer else None)",
            "ChainReader(bucket, run)",
        ),
    ),
]
