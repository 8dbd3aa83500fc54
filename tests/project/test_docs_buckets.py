"""Runs the commands of docs/buckets.md, and checks its permissions against the code.

`tests/faults/test_role_keys.py` and `test_stolen_keys.py` check that they are enough for each role, and not too much.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.commands import bits_of, weightwire
from support.doc_models import save_checkpoints
from support.doc_pages import blocks, commands, filled, run_commands
from support.fake_hub import FakeHub
from support.stores import SeaweedFS
from weightwire.chain.permissions import AccessRole, Verb, access_of


def test_s3_example_works(tmp_path: Path, seaweedfs: SeaweedFS) -> None:
    publish, doctor = blocks("docs/buckets.md", "S3")
    save_checkpoints(tmp_path)
    url = seaweedfs.url("docs-buckets")
    said = run_commands(filled(publish, bucket=url), tmp_path, seaweedfs.env)
    assert "no problems found" in said
    assert "0 alive of 1, 1 stopped" in said
    assert "can follow and publish" in run_commands(filled(doctor, bucket=url), tmp_path, seaweedfs.env)


@pytest.mark.slow
def test_hugging_face_example_works(tmp_path: Path) -> None:
    """The real client, against a fake Hub. Its storage is for one process, so `follow` runs only once."""
    [block] = blocks("docs/buckets.md", "hf:// URLs")
    export, publish, follow = commands(block)
    assert export.startswith("export HF_TOKEN=")
    save_checkpoints(tmp_path)
    (tmp_path / "hub").mkdir()
    with FakeHub(tmp_path / "hub").running() as hub:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": hub.token, "HF_HOME": str(tmp_path / "home")}
        run_commands(f"{publish}\n{follow} --once", tmp_path, variables)
    assert bits_of(tmp_path / "replica/current") == bits_of(tmp_path / "checkpoint-100")


# --- permissions ------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/buckets.md"


def printed(*args: str) -> dict[str, Any]:
    ran = weightwire("policy", *args)
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_policy_commands_print_a_policy_for_each_role(tmp_path: Path) -> None:
    [block] = blocks("docs/buckets.md", "Permissions")
    run_commands(block, tmp_path, {})
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert found.keys() == {"publisher", "gpu-0", "gc", "reader"}
    assert found["publisher"] == printed("publisher", "s3://bucket/run")


def test_policy_of_the_page_is_what_the_command_prints() -> None:
    [block] = blocks("docs/buckets.md", "A follower's key", "json")
    assert json.loads(block) == printed("follower", "s3://bucket/run", "--name", "gpu-0")


def test_table_of_the_page_is_the_table_of_the_code() -> None:
    rows = re.findall(r"^\| `([\w./]+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    shown = {path: [cell.strip() for cell in cells.split("|")] for path, cells in rows if cells.count("|") == 3}
    expected = {path: ["", "", "", ""] for path in shown}
    for column, role in enumerate(AccessRole):
        for one in access_of(role, ["*"]):
            expected[one.path.removesuffix("*.json")][column] = ", ".join(one.verbs)
    assert shown == expected


def test_bucket_policy_of_the_page_covers_all_objects_that_are_only_created() -> None:
    [block] = blocks("docs/buckets.md", "A policy for the bucket", "json")
    [statement] = json.loads(block)["Statement"]
    created = {one.path for role in AccessRole for one in access_of(role) if Verb.CREATE in one.verbs}
    places = {place.removeprefix("arn:aws:s3:::bucket/run/").removesuffix("*") for place in statement["Resource"]}
    assert places == created
