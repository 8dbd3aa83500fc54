"""What the guides show is run, what they quote is looked up, and the rights that they give are all that is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.commands import Ran, Training, bits_of, weightwire
from support.stores import SeaweedFS, running, use

ROOT = Path(__file__).parent.parent.parent
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
PAGES = [*GUIDES, *sorted((ROOT / "deploy").rglob("README.md"))]
S3 = (ROOT / "docs/guides/s3.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def run(script: str, directory: Path, variables: Mapping[str, str] | None = None) -> str:
    """As a user would, in a shell that stops at the first error."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", script]
    env = {**os.environ, "PATH": path, "RCLONE_CONFIG": "/dev/null", **(variables or {})}
    ran = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, f"{script}\n{ran.stdout}{ran.stderr}"
    return ran.stdout + ran.stderr


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A directory in which a training has left three of them."""
    training = Training(tmp_path)
    for step in (100, 200, 300):
        training.save(f"checkpoint-{step}")
    return tmp_path


# --- commands ----------------------------------------------------------------------------------------------------


def test_s3(checkpoints: Path, seaweedfs: SeaweedFS) -> None:
    first, second = blocks(S3, "sh")
    url = seaweedfs.url("guide")
    said = run(first.replace("s3://bucket/run", url), checkpoints, seaweedfs.env)
    assert "everything is as it should be" in said
    assert "0 alive of 1, 1 stopped" in said
    assert "nothing to delete" in run(second.replace("s3://bucket/run", url), checkpoints, seaweedfs.env)


@pytest.mark.slow
def test_vllm(checkpoints: Path) -> None:
    text = (ROOT / "docs/guides/vllm.md").read_text()
    [block] = blocks(text, "sh")
    run("weightwire publish checkpoint-100 run\n" + block, checkpoints)
    assert bits_of(checkpoints / "model") == bits_of(checkpoints / "checkpoint-100")
    assert not (checkpoints / "model").is_symlink()
    for code in blocks(text, "python"):
        exec(code, {})


@pytest.mark.slow
def test_regions(checkpoints: Path) -> None:
    """A mirror is followed; one that is behind, or has commits without their data, is only late."""
    [block] = blocks((ROOT / "docs/guides/regions.md").read_text(), "sh")
    copy = block.partition("\n}\n")[0] + "\n}\n"
    run("weightwire publish checkpoint-100 run\n" + block, checkpoints)
    assert bits_of(checkpoints / "replica/current") == bits_of(checkpoints / "checkpoint-100")
    run("weightwire publish checkpoint-200 run\ncp -r run/commits mirror/", checkpoints)
    late = run("! weightwire follow mirror --into replica --once", checkpoints)
    assert "is not there, and no anchor leads past it" in late
    assert bits_of(checkpoints / "replica/current") == bits_of(checkpoints / "checkpoint-100")
    run(copy + "copy run mirror\nweightwire follow mirror --into replica --once", checkpoints)
    assert bits_of(checkpoints / "replica/current") == bits_of(checkpoints / "checkpoint-200")
    assert {path.name for path in (checkpoints / "mirror/replicas").iterdir()}
    assert not (checkpoints / "run/replicas").exists()


# --- rights ------------------------------------------------------------------------------------------------------


def policies() -> dict[str, Any]:
    """Of the guide, by the role that each is for."""
    found = [json.loads(block) for block in blocks(S3, "json")]
    return dict(zip(("follower", "publisher", "gc", "everyone"), found, strict=True))


def rights(policy: dict[str, Any]) -> list[str]:
    """A policy as SeaweedFS says it; there whoever may write may also delete."""
    words = {"GetObject": "Read", "PutObject": "Write", "DeleteObject": "Write", "ListBucket": "List"}
    found = []
    for statement in policy["Statement"]:
        actions, places = (_listed(statement[name]) for name in ("Action", "Resource"))
        for action in actions:
            word = words.get(action.removeprefix("s3:"))
            found += [f"{word}:{place.removeprefix('arn:aws:s3:::')}" for place in places if word]
    return found


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


class Roles(SeaweedFS):
    """One with the bucket of the guide, and a key for each role."""

    bucket = "bucket"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        config = json.loads((root / "s3.json").read_text())
        for role in ("follower", "publisher", "gc"):
            keys = {"accessKey": f"{role}-key", "secretKey": f"{role}-secret"}
            config["identities"].append({"name": role, "credentials": [keys], "actions": rights(policies()[role])})
        (root / "s3.json").write_text(json.dumps(config))


@pytest.mark.slow
def test_least_rights(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkpoints / "server").mkdir()
    server = Roles(checkpoints / "server")
    url = "s3://bucket/run"

    def as_role(role: str, *command: str | Path) -> Ran:
        use(monkeypatch, server.env_of(role))
        return weightwire(*command)

    with running(server):
        for step in (100, 200, 300):
            ran = as_role("publisher", "publish", checkpoints / f"checkpoint-{step}", url, "--anchor-every", "1")
            assert ran.code == 0, ran.err
        ran = as_role("follower", "follow", url, "--into", checkpoints / "replica", "--once")
        assert ran.code == 0, ran.err
        assert "may not write" not in ran.err
        assert bits_of(checkpoints / "replica/current") == bits_of(checkpoints / "checkpoint-300")
        assert "0 alive of 1, 1 stopped" in as_role("follower", "status", url).out
        ran = as_role("gc", "gc", url, "--keep-anchors", "1", "--window", "0", "--grace", "0")
        assert re.match(r"deleted \d+ objects", ran.err), ran.err
        assert "everything is as it should be" in as_role("follower", "verify", url).err
        for role in ("follower", "gc"):
            as_role(role, "publish", checkpoints / "checkpoint-100", url).check_failed("AccessDenied")


def test_nobody_may_delete_commits() -> None:
    for role in ("follower", "publisher", "gc"):
        for statement in policies()[role]["Statement"]:
            if "s3:DeleteObject" in _listed(statement["Action"]):
                assert all(re.search(r"/run/[a-z]+/\*$", place) for place in _listed(statement["Resource"]))
                assert not [place for place in _listed(statement["Resource"]) if "commits" in place]


# --- words -------------------------------------------------------------------------------------------------------

# What systems and stores say, and not weightwire.
OTHERS = {"Connection refused", "No space left on device", "503"}
SOURCES = [*(ROOT / "src").rglob("*.py"), *(ROOT / "deploy").rglob("*.py")]


def test_messages_are_real() -> None:
    """Each that `trouble.md` explains is in the code: all of its words that are not names or numbers."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    code = re.sub(r"\"\n\s*f?\"", "", code)
    quoted = [
        message
        for paragraph in (ROOT / "docs/guides/trouble.md").read_text().split("\n\n")
        if paragraph.startswith("**`")
        for message in re.findall(r"`([^`]+)`", " ".join(paragraph.split()).partition(" · ")[0])
    ]
    assert len(quoted) > 50
    for message in quoted:
        for words in re.split(r"\.\.\.|\b[ABN]\b|HOST|\bF32 \[\d\]|\d+|[()']|is not there, and|/weight_info", message):
            if message not in OTHERS and words.strip(" ,;:") not in OTHERS:
                assert words.strip() in code, message


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve()
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert heading in [re.sub(r"[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in headings], target
