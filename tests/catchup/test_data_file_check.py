"""A data file is checked against its record: its bytes, and the head that the commit names."""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
import numpy as np

from support.failing_bucket import in_memory
from weightwire import diff
from weightwire.catchup.data_file_check import FileClaim, check_data_file
from weightwire.chain.record_paths import data_path
from weightwire.chain.records import DataFile, FileHead
from weightwire.system import Runtime

MADE = diff({"x": np.zeros(9, np.float32)}, {"x": np.ones(9, np.float32)})
DATA = MADE.to_bytes()
SHA256 = hashlib.sha256(DATA).hexdigest()
HEAD = FileHead(len(MADE.head), hashlib.sha256(MADE.head).hexdigest())
FILE = DataFile(data_path("delta", 2, 1, 0, SHA256), len(DATA), SHA256, 0, HEAD)


def checked(file: DataFile) -> str | None:
    async def check() -> str | None:
        bucket = in_memory()
        await bucket.inner.put(file.path, DATA)
        return await check_data_file(bucket, Runtime(), file, FileClaim("commit 2", "delta", MADE.before, MADE.after))

    return asyncio.run(check())


def test_a_file_that_is_what_its_commit_names_is_intact() -> None:
    assert checked(FILE) is None


def test_another_head_than_the_commit_names_is_found() -> None:
    """The bytes of the file are right, so only readers of ranges would be misled."""
    other = msgspec.structs.replace(FILE, head=FileHead(HEAD.size, "0" * 64))
    assert checked(other) == "corrupt: the hash of its head does not match the record"


def test_a_head_of_another_size_is_found() -> None:
    other = msgspec.structs.replace(FILE, head=FileHead(HEAD.size - 1, HEAD.sha256))
    assert checked(other) == "corrupt: the hash of its head does not match the record"
