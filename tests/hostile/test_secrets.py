"""Canaries are planted as secrets, and must not appear in any output, error, event, page, metric, log or object."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.commands import Running, weightwire
from support.records import chain_of
from weightwire import Event, Follower, Publisher, WeightwireError, open_bucket
from weightwire.bucket import object_store
from weightwire.errors import public_url, without_secrets
from weightwire.publisher.notifier import FollowerNotifier
from weightwire.system import Runtime

CANARY = "cAnArY0123456789"
NOWHERE = f"http://someone:{CANARY}@127.0.0.1:1"
VARIABLES = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}-secret-key",
    "AWS_SESSION_TOKEN": f"{CANARY}-session",
    "AWS_ENDPOINT_URL": NOWHERE,
    "AWS_REGION": "us-east-1",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_STORAGE_ACCOUNT_KEY": "Y0FuQXJZMDEyMzQ1Njc4OQ==",  # a canary in base64
    "AZURE_STORAGE_ENDPOINT": NOWHERE,
    "AZURE_STORAGE_SAS_TOKEN": f"sv=1&sig={CANARY}",
    "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({"private_key": CANARY}),
    "HF_TOKEN": f"hf_{CANARY}",
    "HF_ENDPOINT": NOWHERE,
    "WEIGHTWIRE_TOKEN": f"{CANARY}-token",
}


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(object_store._RETRIES, "max_retries", 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"w": np.arange(64, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    assert weightwire("publish", model, tmp_path / "run").code == 0
    return tmp_path / "run"


@pytest.fixture
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "token"
    path.write_text(f"{CANARY}-in-a-file")
    return path


def has_secret(text: str) -> bool:
    return CANARY.lower() in text.lower() or "Y0FuQXJZ" in text


@pytest.fixture(autouse=True)
def _nothing_leaks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """After each test: no file below its directory, and no log line, holds a secret."""
    with caplog.at_level(logging.DEBUG):
        yield
    assert not [line for line in caplog.messages if has_secret(line)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if has_secret(path.read_bytes().decode("latin-1"))]
    assert not [path for path in files if has_secret(str(path.relative_to(tmp_path)))]


BAD_URLS = [
    f"s3://someone:{CANARY}@bucket/run",
    f"s3://bucket/run?sig={CANARY}",
    f"gs://{CANARY}@bucket/run",
    f"az://container/run?{CANARY}#{CANARY}",
    f"hf://buckets/owner/name?token={CANARY}",
    f"https://someone:{CANARY}@127.0.0.1/run?key={CANARY}",
    f"ftp://someone:{CANARY}@127.0.0.1/run",
    f"file://someone:{CANARY}@host/run",
]
UNREACHABLE = ["s3://bucket/run", "az://container/run", "gs://bucket/run", "hf://buckets/owner/name/run"]
COMMANDS = {
    "status": ["status", "URL"],
    "log": ["log", "URL", "--json"],
    "verify": ["verify", "URL"],
    "gc": ["gc", "URL"],
    "doctor": ["doctor", "URL", "--json"],
    "page": ["page", "URL", "--export", "OUT.html"],
    "follow": ["follow", "URL", "--into", "OUT", "--once", "--json"],
    "restore": ["restore", "URL", "-o", "OUT"],
    "publish": ["publish", "MODEL", "URL", "--json"],
    "serve": ["serve", "MODEL", "--follow", "URL", "--port", "0"],
}


def words_of(name: str, url: str, model: Path) -> list[str]:
    places = {"URL": url, "OUT": str(model.parent / "out"), "OUT.html": str(model.parent / "o.html")}
    return [places.get(word, str(model) if word == "MODEL" else word) for word in COMMANDS[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_command_does_not_repeat_the_secrets_of_a_url(name: str, model: Path) -> None:
    for url in BAD_URLS:
        ran = weightwire(*words_of(name, url, model))
        assert ran.code != 0, url
        assert not has_secret(ran.out + ran.err), url


@pytest.mark.parametrize("url", UNREACHABLE)
@pytest.mark.parametrize("user", [False, True])
def test_unreachable_store_does_not_show_secrets(
    url: str, user: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not user:
        hasty = SimpleNamespace(sleep=lambda seconds: None)  # between retries
        monkeypatch.setattr("huggingface_hub.utils._http.time", hasty)
        for name in ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT", "HF_ENDPOINT"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("status", "publish"):
        ran = weightwire(*words_of(name, url, model))
        assert ran.code != 0
        assert not has_secret(ran.out + ran.err), (name, ran)


def test_commands_that_succeed_show_and_store_no_secret(run: Path, model: Path, tmp_path: Path) -> None:
    commands: list[list[str | Path]] = [
        ["publish", model, run, "--json"],
        ["status", run, "--json"],
        ["log", run, "--json"],
        ["verify", run],
        ["doctor", run, "--json"],
        ["follow", run, "--into", tmp_path / "replica", "--once", "--json"],
        ["page", run, "--export", tmp_path / "page.html"],
        ["restore", run, "-o", tmp_path / "restored"],
    ]
    for words in commands:
        ran = weightwire(*words)
        assert ran.code == 0, ran
        assert not has_secret(ran.out + ran.err), words


def test_private_key_is_not_shown_or_stored(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not if its text has no frame, or was passed in place of the public key."""
    keys = tmp_path.with_name(f"{tmp_path.name}-keys")
    keys.mkdir()
    assert weightwire("keygen", keys / "trainer").code == 0
    pem, run = (keys / "trainer").read_text(), tmp_path / "signed"
    secret, trusted = pem.splitlines()[1], (keys / "trainer.pub").read_text().strip()
    monkeypatch.setenv("WEIGHTWIRE_KEY", pem)
    commands: list[tuple[bool, list[str | Path]]] = [
        (True, ["publish", model, run, "--json"]),
        (True, ["status", run, "--json", "--trust", trusted]),
        (True, ["keys", run, "--trust", trusted]),
        (True, ["verify", run, "--trust", trusted]),
        (True, ["doctor", run, "--json"]),
        (True, ["follow", run, "--into", tmp_path / "replica", "--once", "--json", "--trust", trusted]),
        (False, ["status", run, "--trust", pem]),
        (False, ["keys", run, "--add", secret]),
        (False, ["publish", model, run, "--key", secret]),
    ]
    for is_fine, words in commands:
        ran = weightwire(*words)
        assert (ran.code == 0) == is_fine, ran
        assert secret not in ran.out + ran.err, words
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if secret in path.read_bytes().decode("latin-1")]


@pytest.mark.parametrize(
    "engine",
    [
        f"vllm=http://someone:{CANARY}@127.0.0.1:1/v1?key={CANARY}#{CANARY}",
        f"vllm=http://someone:a/{CANARY}@127.0.0.1:1",
        f"vllm=someone:{CANARY}@127.0.0.1:1",
        f"vllm=127.0.0.1:1?key={CANARY}",
        f"http://someone:{CANARY}@127.0.0.1:1",
        f"vllm=http://someone:{CANARY}@:x/",
    ],
)
def test_engine_url_does_not_show_secrets(engine: str, run: Path, tmp_path: Path) -> None:
    commands: list[list[str | Path]] = [
        ["follow", run, "--into", tmp_path / "replica", "--once", "--json", "--engine", engine],
        ["doctor", run, "--engine", engine],
    ]
    for words in commands:
        ran = weightwire(*words)
        assert ran.code != 0
        assert not has_secret(ran.out + ran.err), ran


def test_trouble_with_an_engine_shows_no_secret_in_heartbeats_and_metrics(run: Path, tmp_path: Path) -> None:
    engine = f"vllm=http://someone:{CANARY}@127.0.0.1:1/?key={CANARY}"
    with Running("follow", run, "--into", tmp_path / "replica", "--engine", engine, "--listen", "0", "--json") as going:
        address = going.wait_for("listening on").split()[-1]
        going.wait_for("cannot be reached")
        for path in ("/status", "/metrics"):
            request = urllib.request.Request(
                address + path, headers={"Authorization": f"Bearer {VARIABLES['WEIGHTWIRE_TOKEN']}"}
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert not has_secret(reply.read().decode() + str(reply.headers))
        ran = going.stop()
    assert not has_secret(ran.out + ran.err)
    [beat] = (run / "replicas").iterdir()
    assert "cannot be reached" in json.loads(beat.read_bytes())["trouble"]


@pytest.mark.parametrize(
    "url",
    [
        f"http://someone:{CANARY}@127.0.0.1:1/wake?token={CANARY}",
        f"http://someone:{CANARY}@:x/wake",
        f"http://someone:a/{CANARY}@127.0.0.1:1/",
        f"someone:{CANARY}@127.0.0.1:1",
        f"http://127.0.0.1:{CANARY}/",
        f"http://127.0.0.1:1/ {CANARY}@\n",
    ],
)
def test_notify_url_does_not_show_secrets(url: str) -> None:
    events: list[Event] = []
    asyncio.run(FollowerNotifier((url,), Runtime(), events.append).notify(chain_of(1)[0]))
    [event] = events
    assert "could not be woken" in event.message
    if "127.0.0.1:1/ " not in url and not url.endswith(f":{CANARY}/"):  # these are neither a password nor a query
        assert not has_secret(event.message)


def test_source_of_a_base_is_stored_without_secrets(model: Path, tmp_path: Path) -> None:
    source = f"https://someone:{CANARY}@hub.example/org/model?token={CANARY}"
    ran = weightwire("publish", model, tmp_path / "run", "--base", model, "--source", source)
    assert ran.code == 0
    assert not has_secret(ran.out + ran.err)
    commits = "".join(path.read_text() for path in (tmp_path / "run" / "commits").iterdir())
    assert "https://hub.example/org/model" in commits


def test_page_and_follow_show_no_token(run: Path, token_file: Path, tmp_path: Path) -> None:
    commands: list[list[str | Path]] = [
        ["page", run, "--port", "0", "--no-open", "--token-file", token_file],
        ["follow", run, "--into", tmp_path / "replica", "--listen", "0", "--token-file", token_file],
    ]
    for words in commands:
        with Running(*words) as going:
            going.wait_for("password" if words[0] == "page" else "listening on")
            command = Path(f"/proc/{going.process.pid}/cmdline")
            if command.exists():
                assert not has_secret(command.read_text())
            ran = going.stop()
        assert not has_secret(ran.out + ran.err)


@pytest.mark.parametrize("url", [*BAD_URLS, "s3://bucket/run", "az://container/run", "hf://buckets/owner/name"])
def test_python_errors_and_events_show_no_secret(url: str, model: Path, tmp_path: Path) -> None:
    events: list[Event] = []

    def publish() -> None:
        with Publisher(url, on_event=events.append) as publisher:
            publisher.publish(model).wait()

    def follow() -> None:
        with Follower(url, into=tmp_path / "replica", on_event=events.append) as follower:
            follower.once()

    for work in (publish, follow):
        with pytest.raises(WeightwireError) as caught:
            work()
        problem = caught.value
        assert not has_secret(f"{problem} {problem!r} {problem.args} {problem.hint}")
    assert not [event for event in events if has_secret(repr(event))]


def test_representation_of_a_bucket_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert not has_secret(repr(open_bucket("s3://bucket/run")) + repr(vars(open_bucket("s3://bucket/run"))))


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("http://a:b@host:80/path?q=1#f", "http://host:80/path"),
        ("https://host/org/model@rev", "https://host/org/model@rev"),
        ("http://a:b/c@host/path", "http://host/path"),
        ("http://[::1]:80/x", "http://[::1]:80/x"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("a:b@host:80", "host:80"),
        ("/data/me@home/model", "/data/me@home/model"),
        ("relative/a:b@c", "relative/a:b@c"),
        ("", ""),
    ],
)
def test_public_url_has_no_user_and_no_query(url: str, public: str) -> None:
    assert public_url(url) == public


def test_urls_in_texts_lose_their_secrets() -> None:
    text = f'error for url (http://a:{CANARY}@host:1/b?sig={CANARY}): "https://h/x?y={CANARY}" <s3://{CANARY}@b/c> a?b'
    assert without_secrets(text) == 'error for url (http://host:1/b): "https://h/x" <s3://b/c> a?b'
