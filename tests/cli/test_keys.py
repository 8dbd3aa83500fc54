"""`weightwire keys`: the list, with and without trusted keys, and changes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands import Command
from support.followers import Trainer
from weightwire.bucket import open_bucket
from weightwire.chain.keys import PrivateKey, read_private_key


@pytest.fixture
def run_url(tmp_path: Path, run: Command) -> str:
    """A signed run, whose private key is in the file `key`."""
    run("keygen", str(tmp_path / "key"))
    trainer = Trainer(open_bucket(str(tmp_path / "run")), key=read_private_key(tmp_path / "key"))
    trainer.publish(2)
    trainer.close()
    return str(tmp_path / "run")


def test_list_says_whether_signatures_were_checked(run: Command, run_url: str, tmp_path: Path) -> None:
    ran = run("keys", run_url)
    assert ran.code == 0
    assert ran.out.strip() == (tmp_path / "key.pub").read_text().split()[0]
    assert "were not checked: pass --trust KEY" in ran.err
    ran = run("keys", run_url, "--trust", str(tmp_path / "key.pub"))
    assert (ran.code, ran.err) == (0, "")


def test_list_of_a_stranger_is_refused(run: Command, run_url: str) -> None:
    ran = run("keys", run_url, "--trust", str(PrivateKey.generate().public))
    assert ran.code == 1
    assert "WW-UNTRUSTED" in ran.err
    assert not ran.out


def test_known_key_changes_nothing(run: Command, run_url: str, tmp_path: Path) -> None:
    key, public = str(tmp_path / "key"), str(tmp_path / "key.pub")
    ran = run("keys", run_url, "--add", public, "--key", key)
    assert ran.code == 0
    assert "has these keys already: nothing was changed" in ran.err
    run("keygen", str(tmp_path / "other"))
    ran = run("keys", run_url, "--add", str(tmp_path / "other.pub"), "--key", key)
    assert "version 3 of" in ran.err
    assert "not checked" not in ran.err
    assert len(ran.out.split()) == 2


def test_verify_says_whether_signatures_were_checked(run: Command, run_url: str, tmp_path: Path) -> None:
    def signatures(*options: str) -> object:
        return json.loads(run("verify", run_url, "--json", *options).out)["signatures"]

    assert signatures() == "unchecked"
    assert signatures("--trust", str(tmp_path / "key.pub")) == "checked"
