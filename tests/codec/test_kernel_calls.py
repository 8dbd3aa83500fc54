"""Calls of the C kernel: wrong arguments are rejected, buffers are released, and nothing leaks."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable

import pytest

from weightwire.codec import _kernel

LENT = bytearray(100)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _kernel.encode_block(b"12", b"123", 1, 0, 0, 0, 2, 1, 0),  # different lengths
        lambda: _kernel.encode_block(b"", b"", 1, 0, 0, 0, 1, 1, 0),  # nothing
        lambda: _kernel.encode_block(None, bytes((1 << 22) + 1), 1, 0, 0, 0, (1 << 22) + 1, 1, 0),  # too many units
        lambda: _kernel.encode_block(None, b"123456", 3, 0, 0, 0, 2, 3, 0),  # no such width
        lambda: _kernel.encode_block(None, b"12345678", 4, 8, 22, 0, 2, 4, 0),  # bits that do not add up
        lambda: _kernel.encode_block(None, b"1234", 2, 0, 0, 0, 2, 8, 0),  # half a word
        lambda: _kernel.encode_block(None, b"1234", 2, 0, 0, 0, 2, 4, 0),  # a word that is neither 8 bytes nor a unit
        lambda: _kernel.encode_block(b"1234", b"1235", 1, 0, 0, 3, 4, 1, 0),  # lines that do not fill the block
        lambda: _kernel.encode_block(b"1234", b"1235", 1, 0, 0, -2, 4, 1, 0),
        lambda: _kernel.encode_block(b"1234", b"1235", 1, 0, 0, 0, 3, 1, 0),  # segments that do not fill the block
        lambda: _kernel.encode_block(b"1234", b"1235", 1, 0, 0, 0, 0, 1, 0),
        lambda: _kernel.encode_block(b"1234", b"1235", 1, 0, 0, 0, -4, 1, 0),
        lambda: _kernel.encode_block(b"1234", b"1235", 1, 0, 0, 4, 2, 1, 0),  # a line of two segments
        lambda: _kernel.encode_block(bytes(16), bytes(16), 1, 0, 0, 0, 4, 8, 0),  # a word of two segments
        lambda: _kernel.patch_block(b"\3", bytearray(4), True, 1, 0, 0, 0, 3, 1, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(4), True, 1, 0, 0, 4, 2, 1, 0),
        lambda: _kernel.swap_block(bytearray(4), None, bytearray(4), 1, 0, 1, 0),
        lambda: _kernel.digest_change(bytes(4), None, bytes(4), 1, 3, 1, 0),
        lambda: _kernel.digest(bytes(4), 1, 3, 1, 0),
        lambda: _kernel.digest(bytes(4), 1, 0, 1, 0),
        lambda: _kernel.decode_block(b"", None, 1, 1, 0, 0, 0),
        lambda: _kernel.decode_block(b"\3", None, 0, 1, 0, 0, 0),
        lambda: _kernel.decode_block(b"\3", None, -1, 1, 0, 0, 0),
        lambda: _kernel.decode_block(b"\1", b"123", 4, 1, 0, 0, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(4), True, 1, 0, 0, 3, 4, 1, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(), True, 1, 0, 0, 0, 1, 1, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(3), True, 2, 0, 0, 0, 1, 2, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(4), True, 0, 0, 0, 0, 4, 1, 0),
        lambda: _kernel.patch_block(b"\3", bytearray(4), True, 2, 0, 0, 0, 2, 8, 0),
        lambda: _kernel.patch_block(b"\3", b"read", True, 1, 0, 0, 0, 4, 1, 0),
        lambda: _kernel.patch_block(b"", bytearray(4), True, 1, 0, 0, 0, 4, 1, 0),
        lambda: _kernel.swap_block(bytearray(4), b"\4\0\0\0", bytearray(1), 1, 4, 1, 0),  # outside
        lambda: _kernel.swap_block(bytearray(4), b"\0\0\0\0", bytearray(2), 1, 4, 1, 0),  # one position, two values
        lambda: _kernel.swap_block(bytearray(4), None, bytearray(3), 1, 4, 1, 0),
        lambda: _kernel.swap_block(b"read", None, bytearray(4), 1, 4, 1, 0),  # read-only
        lambda: _kernel.swap_block(bytearray(4), b"\0\0\0\0", bytearray(3), 2, 2, 2, 0),  # half a unit
        lambda: _kernel.digest_change(bytes(4), b"\4\0\0\0", bytes(1), 1, 4, 1, 0),  # outside
        lambda: _kernel.digest_change(bytes(4), b"\0\0\0\0", bytes(2), 1, 4, 1, 0),  # one position, two values
        lambda: _kernel.digest_change(bytes(4), b"\1\0\0\0\0\0\0\0", bytes(2), 1, 4, 1, 0),  # not in order
        lambda: _kernel.digest_change(bytes(4), b"\1\0\0\0\1\0\0\0", bytes(2), 1, 4, 1, 0),  # the same twice
        lambda: _kernel.digest_change(bytes(4), None, bytes(3), 1, 4, 1, 0),
        lambda: _kernel.digest_change(bytes(4), None, bytes(4), 1, 4, 8, 0),  # half a word
        lambda: _kernel.replace_block(bytearray(4), bytes(5), 1, 4),  # different lengths
        lambda: _kernel.replace_block(bytearray(4), bytes(3), 1, 4),
        lambda: _kernel.replace_block(bytearray(5), bytes(5), 2, 2),  # half a unit
        lambda: _kernel.replace_block(bytearray(6), bytes(6), 3, 2),  # no such width
        lambda: _kernel.replace_block(bytearray(6), bytes(6), 0, 4),
        lambda: _kernel.replace_block(b"read", bytes(4), 1, 4),  # read-only
        lambda: _kernel.replace_block(
            bytearray((1 << 22) + 1), bytes((1 << 22) + 1), 1, (1 << 22) + 1
        ),  # too many units
        lambda: _kernel.replace_block(LENT, LENT, 1, 100),  # itself
        lambda: _kernel.replace_block(memoryview(LENT)[:50], memoryview(LENT)[49:99], 1, 50),
        lambda: _kernel.replace_block(memoryview(LENT)[49:99], memoryview(LENT)[:50], 1, 50),
        lambda: _kernel.replace_block(bytearray(4), bytes(4), 1, 3),
        lambda: _kernel.replace_block((bytearray(2), bytearray(2)), (bytes(2), bytes(1)), 1, 2),
        lambda: _kernel.replace_block((LENT,), (LENT,), 1, 100),  # itself
        lambda: _kernel.encode_block((b"12", b"345"), b"12345", 1, 0, 0, 0, 2, 1, 0),
        lambda: _kernel.encode_block((b"12",), b"1234", 1, 0, 0, 0, 2, 1, 0),
        lambda: _kernel.encode_block((), (), 1, 0, 0, 0, 2, 1, 0),
        lambda: _kernel.encode_block(("12", b"12"), b"1234", 1, 0, 0, 0, 2, 1, 0),  # text
        lambda: _kernel.decode_block(b"\1", (b"12", b"3"), 3, 1, 0, 0, 0),
        lambda: _kernel.decode_block(b"\1", (), 3, 1, 0, 0, 0),
        lambda: _kernel.patch_block(b"\3", (bytearray(2), b"12"), True, 1, 0, 0, 0, 2, 1, 0),  # read-only
        lambda: _kernel.digest((b"12", b"3"), 1, 2, 1, 0),
        lambda: _kernel.digest(b"123", 2, 1, 2, 0),
        lambda: _kernel.digest(b"123", 3, 1, 3, 0),
    ],
)
def test_a_call_with_arguments_that_do_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, BufferError)):
        call()


def test_buffers_are_released() -> None:
    """A bytearray with an exported buffer cannot be resized."""
    old, new = bytearray(range(100)), bytearray(range(1, 101))
    data = bytearray(_kernel.encode_block(old, new, 1, 0, 0, 0, 100, 1, 0)[0])
    positions, values = _kernel.decode_block(data, old, 100, 1, 0, 0, 0)
    with pytest.raises(ValueError, match="unknown encoding"):
        _kernel.decode_block(bytearray(b"\xff"), old, 100, 1, 0, 0, 0)
    with pytest.raises(TypeError):
        _kernel.decode_block(data, old, 99, 1, 0, 0, 0)
    _kernel.digest_change(old, positions, values, 1, 100, 1, 0)
    with pytest.raises(TypeError):
        _kernel.digest_change(old, positions, values[:-1], 1, 100, 1, 0)
    _kernel.swap_block(old, positions, values, 1, 100, 1, 0)
    _kernel.swap_block(old, positions, values, 1, 100, 1, 0)
    _kernel.patch_block(data, old, False, 1, 0, 0, 0, 100, 1, 0)
    with pytest.raises(ValueError, match="unknown encoding"):
        _kernel.patch_block(b"\xff", old, False, 1, 0, 0, 0, 100, 1, 0)
    _kernel.digest(old, 1, 100, 1, 0)
    _kernel.digest((old, new), 1, 100, 1, 0)
    with pytest.raises(TypeError):
        _kernel.digest((old, new, values[:1]), 1, 100, 1, 0)
    _kernel.replace_block(old, bytearray(100), 1, 100)
    with pytest.raises(TypeError):
        _kernel.replace_block(old, old, 1, 100)
    for lent in (old, new, data, values):
        lent.append(0)


LEAK = """
import resource
import numpy as np
from weightwire.codec import _kernel

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

old = np.arange(50_000, dtype="<u2")
new = old + (np.arange(50_000) % 3 == 0).astype("<u2")
blocks = []
for base, line in ((old, 0), (old, 1000), (None, 0)):
    good = _kernel.encode_block(base, new, 2, 8, 7, line, 50_000, 8, 0)[0]
    # Wrong in its tag, its words, its bits, and in its length.
    bad = [bytes([good[0] ^ 4]) + good[1:], good[:-1], good + b"\\0", good[:9] + good[10:], good[:40] + b"\\xff" * 99]
    blocks += [(base, line, good)] + [(base, line, one) for one in bad]

def round():
    refused = 0
    for base, line, data in blocks:
        try:
            positions, values = _kernel.decode_block(data, base, 50_000, 2, 8, 7, line)
            _kernel.digest_change(old, positions, values, 2, 50_000, 8, 0)
            _kernel.swap_block(old.copy(), positions, values, 2, 50_000, 8, 0)
            _kernel.patch_block(data, old.copy(), base is None, 2, 8, 7, line, 50_000, 8, 0)
        except ValueError:
            refused += 1
        _kernel.encode_block(base, new, 2, 8, 7, line, 50_000, 8, 0)
        for source in (new, old ^ 1, old):
            _kernel.replace_block(old.copy(), source, 2, 50_000)
    return refused

for _ in range(10):
    refused = round()
before = resident()
for _ in range(40):
    round()
print(refused, resident() - before)
"""


def test_memory_does_not_grow() -> None:
    """Good and bad blocks, in a separate process. A leak of one buffer per round would be 4 MB."""
    gc.collect()
    output = subprocess.run([sys.executable, "-c", LEAK], capture_output=True, text=True, check=True).stdout
    refused, grown = map(int, output.split())
    assert refused >= 9
    assert grown < 2_000_000


TRIM = """
import re
import numpy as np
from weightwire.codec import _kernel

def anonymous():
    with open("/proc/self/status") as file:
        return 1024 * int(re.search("RssAnon: *([0-9]+)", file.read().replace(chr(9), " "))[1])

units = np.random.default_rng(1).integers(0, 1 << 16, 1 << 22, np.uint16)
size = len(_kernel.encode_block(None, units, 2, 8, 7, 0, len(units), 8, 0)[0])
before = anonymous()
_kernel.trim()
_kernel.trim()
freed = before - anonymous()
print(freed, size == len(_kernel.encode_block(None, units, 2, 8, 7, 0, len(units), 8, 0)[0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_trim_gives_scratch_memory_back() -> None:
    output = subprocess.run([sys.executable, "-c", TRIM], capture_output=True, text=True, check=True).stdout
    freed, works = output.split()
    assert int(freed) >= 8 << 20  # the byte planes of a block
    assert works == "True"


OUT_OF_MEMORY = """
import numpy as np
import _testcapi as memory
from weightwire.codec import _kernel

old = np.zeros(64, "<u8")
new = old.copy()
new[[5, 40]] = 160, 108
data = _kernel.encode_block(old, new, 8, 0, 0, 0, 64, 8, 0)[0]
failed, kept = 0, [tuple([i] * 3) for i in range(9000)]  # so that a tuple comes from memory, not from a free list
for first in range(30):
    target = old.copy()
    memory.set_nomemory(first, first + 1)
    try:
        _kernel.patch_block(data, target, False, 8, 0, 0, 0, 64, 8, 0)
    except MemoryError:
        failed += 1
    else:
        target = old
    finally:
        memory.remove_mem_hooks()
    assert not target.any(), first
print(failed, len(kept))
"""


def test_a_patch_that_runs_out_of_memory_leaves_its_target_unchanged() -> None:
    """At every allocation of Python, also after all changes were written: then they are undone.

    In a process of its own: an allocation of another thread may fail, too.
    """
    pytest.importorskip("_testcapi")
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0
