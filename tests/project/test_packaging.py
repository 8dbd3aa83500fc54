"""The sdist and the wheels built from a checkout, and versions that are written in two places."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import weightwire

ROOT = Path(__file__).parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]

# Tracked files that are not in the sdist. All others are.
NOT_SHIPPED = {".ci/run", ".gitignore"}

# Files that setuptools adds.
GENERATED = {"PKG-INFO", "setup.cfg"}

# Files that an earlier build or run leaves behind.
BUILD_LIB = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
OLD_KERNEL = f"{BUILD_LIB}/weightwire/codec/_kernel.abi3.so"
LEFTOVERS = [
    OLD_KERNEL,
    "build/lib/weightwire/codec/_kernel.abi3.so",
    "src/weightwire/codec/_kernel.abi3.so",
    "src/weightwire/__pycache__/errors.cpython-311.pyc",
    "tests/__pycache__/conftest.cpython-311.pyc",
    "dist/weightwire-0.0.1.tar.gz",
]


def tracked() -> list[str]:
    """The files of the checkout, including new files that are not committed."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout with the leftovers of an earlier build."""
    copy = tmp_path / "checkout"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    for name in LEFTOVERS:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(b"from an earlier build")
    return copy


def built(kind: str, checkout: Path, **env: str) -> Path:
    """Runs the build backend, as pip does, without a network. Returns the archive."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(checkout.parent)!r}))"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=checkout, env={**os.environ, **env}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return checkout.parent / ended.stdout.split()[-1]


def test_sdist_has_every_tracked_file_and_no_build_output(checkout: Path) -> None:
    pytest.importorskip("setuptools")
    with tarfile.open(built("sdist", checkout)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    shipped = {name for name in names - GENERATED if ".egg-info/" not in name}
    assert shipped == set(tracked()) - NOT_SHIPPED


def check_index_page(metadata: str) -> None:
    """A package index shows README and the project's URLs. Every link must be absolute and name a file that exists."""
    fields, _, page = metadata.partition("\n\n")
    urls = dict(re.findall(r"^Project-URL: (\w+), (\S+)$", fields, re.MULTILINE))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert "Description-Content-Type: text/markdown" in fields
    assert page.startswith("# weightwire\n")
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", page)
    assert links
    for image, link in links:
        found = re.fullmatch(rf"{urls['Source']}/(raw|blob)/main/([^#]+)(#.*)?", link)
        assert found, f"not an absolute link into the project: {link}"
        assert found[1] == ("raw" if image else "blob")
        assert (ROOT / found[2]).is_file(), link


def test_wheel_without_a_compiler_is_pure_python_without_an_old_kernel(checkout: Path) -> None:
    pytest.importorskip("setuptools")
    wheel = built("wheel", checkout, CC="false")
    assert wheel.name == f"weightwire-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        wheel_metadata = archive.read(f"weightwire-{VERSION}.dist-info/WHEEL").decode()
        package_metadata = archive.read(f"weightwire-{VERSION}.dist-info/METADATA").decode()
    assert "Root-Is-Purelib: true" in wheel_metadata
    check_index_page(package_metadata)
    assert not [name for name in names if name.endswith(".so") or ".data/" in name]
    assert {"weightwire/__init__.py", "weightwire/py.typed", "weightwire/examples/wordle/train.py"} <= set(names)


@pytest.mark.slow
def test_wheel_with_a_compiler_has_a_new_kernel_and_a_platform_tag(checkout: Path) -> None:
    pytest.importorskip("setuptools")
    compiler = checkout.parent / "cc-without-optimization"  # which takes most of the time
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    wheel = built("wheel", checkout, CC=str(compiler))
    assert re.fullmatch(rf"weightwire-{VERSION}-cp311-abi3-.*\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        kernels = [name for name in archive.namelist() if name.endswith(".so")]
        assert kernels == ["weightwire/codec/_kernel.abi3.so"]
        archive.extractall(checkout.parent / "installed")
    env = {**os.environ, "PYTHONPATH": str(checkout.parent / "installed")}
    script = [sys.executable, str(ROOT / "tests/project/installed_wheel.py")]
    output = subprocess.check_output(script, env=env, cwd=checkout.parent, text=True)
    assert output.startswith(f"weightwire {VERSION}: the kernel works")


def test_package_and_module_have_the_same_version() -> None:
    assert weightwire.__version__ == VERSION


def test_pre_commit_runs_the_pinned_tools() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    tools = {Path(entry).name: Path(entry).parent for entry in re.findall(r"entry: (\S+)", config)}
    assert tools == {"ruff": Path(".venv/bin"), "mypy": Path(".venv/bin")}
    assert set(tools) <= pinned
    assert re.findall(r"repo: (\S+)", config) == ["local"]


def test_ci_starts_with_the_oldest_supported_python() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    matrices = re.findall(r'python: \["([\d.]+)"', workflow)
    assert matrices
    assert set(matrices) == {oldest}
