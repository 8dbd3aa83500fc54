"""The bucket contract as a stranger uses it: on a store of their own, which it lets pass or finds out."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from weightwire.testing import BucketContract

# A store that keeps the contract, since a directory does.
GOOD = """
from weightwire.bucket.directory import DirectoryBucket

class MyBucket(DirectoryBucket):
    pass
"""

# The ways in which stores really differ from what is promised.
BROKEN = {
    "overwrites what is there": """
    async def create(self, path, data):
        await self.put(path, data)
""",
    "lists in no order": """
    async def list(self, prefix):
        return list(await super().list(prefix))[::-1]
""",
    "knows nothing of missing objects": """
    async def get(self, path):
        return await super().get(path) if await self.find(path) else b""
""",
    "fills only a part of the buffer": """
    async def read_into(self, path, buffer, start=0):
        await super().read_into(path, buffer[: len(buffer) // 2], start)
""",
}


def example() -> str:
    """The code in the docstring of the contract."""
    text = inspect.getdoc(BucketContract) or ""
    lines = text[text.index("    import pytest") :].splitlines()
    return textwrap.dedent("\n".join(line for line in lines if not line or line.startswith("    ")))


def check(folder: Path, store: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the example on a store, in a folder that knows nothing of these tests."""
    (folder / "mystore.py").write_text(store)
    (folder / "test_mine.py").write_text(example())
    return pytest_in(folder, "--rootdir", ".", *options, "test_mine.py")


def pytest_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", *options]
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # without the plugins that happen to be installed here
    return subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False)


def test_a_store_that_keeps_the_contract_passes(tmp_path: Path) -> None:
    ran = check(tmp_path, GOOD)
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout


@pytest.mark.parametrize("how", BROKEN)
def test_a_store_that_breaks_the_contract_fails(tmp_path: Path, how: str) -> None:
    ran = check(tmp_path, GOOD.replace("    pass\n", BROKEN[how]), "-k", "not large and not 30000000 and not times")
    assert ran.returncode == 1, ran.stdout
    assert " passed" in ran.stdout


def test_failed_asserts_are_explained(tmp_path: Path) -> None:
    ran = check(tmp_path, GOOD.replace("    pass\n", BROKEN["lists in no order"]), "-k", "test_lists_by_folder")
    assert "E       AssertionError: assert ['" in ran.stdout


def test_an_opener_that_was_forgotten_is_said(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from weightwire.testing import BucketContract\n\nclass TestMine(BucketContract):\n    pass\n"
    )
    ran = pytest_in(tmp_path, "-k", "deletes")
    assert "override the fixture `opener`" in ran.stdout


def test_without_pytest_it_says_what_it_needs() -> None:
    code = "import sys; sys.modules['pytest'] = None; import weightwire.testing"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "weightwire.testing needs pytest: pip install pytest" in ran.stderr
