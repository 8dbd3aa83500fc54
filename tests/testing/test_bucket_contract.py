"""The bucket contract, run by a third party on its own store: a good store passes, a broken one fails."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from weightwire.testing import BucketContract

# A correct store: a directory.
GOOD = """
from weightwire.bucket.directory import DirectoryBucket

class MyBucket(DirectoryBucket):
    pass
"""

# Ways in which real stores break the contract.
BROKEN = {
    "create overwrites": """
    async def create(self, path, data):
        await self.put(path, data)
""",
    "lists unsorted": """
    async def list(self, prefix):
        return list(await super().list(prefix))[::-1]
""",
    "returns empty bytes for missing objects": """
    async def get(self, path, limit=1 << 26):
        return await super().get(path, limit) if await self.find(path) else b""
""",
    "fills half of the buffer": """
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
    """Runs the example on a store, in a folder outside these tests."""
    (folder / "mystore.py").write_text(store)
    (folder / "test_mine.py").write_text(example())
    return pytest_in(folder, "--rootdir", ".", *options, "test_mine.py")


def pytest_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", *options]
    plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # without the plugins installed here
    return subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False)


def test_correct_store_passes(tmp_path: Path) -> None:
    ran = check(tmp_path, GOOD)
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout


@pytest.mark.parametrize("how", BROKEN)
def test_broken_store_fails(tmp_path: Path, how: str) -> None:
    ran = check(
        tmp_path, GOOD.replace("    pass\n", BROKEN[how]), "-k", "not large and not 30000000 and not modified_time"
    )
    assert ran.returncode == 1, ran.stdout
    assert " passed" in ran.stdout


def test_failed_asserts_are_explained(tmp_path: Path) -> None:
    ran = check(tmp_path, GOOD.replace("    pass\n", BROKEN["lists unsorted"]), "-k", "test_list_is_recursive")
    assert "E       AssertionError: assert ['" in ran.stdout


def test_missing_opener_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from weightwire.testing import BucketContract\n\nclass TestMine(BucketContract):\n    pass\n"
    )
    ran = pytest_in(tmp_path, "-k", "delete_can_be_repeated")
    assert "override the fixture `opener`" in ran.stdout


def test_import_without_pytest_names_the_missing_package() -> None:
    code = "import sys; sys.modules['pytest'] = None; import weightwire.testing"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "weightwire.testing needs pytest: pip install pytest" in ran.stderr
