"""What a URL opens, and what is said of those that open nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weightwire.bucket.directory import DirectoryBucket
from weightwire.bucket.registry import open_bucket
from weightwire.errors import BucketError


def opened(url: str | Path) -> str:
    return open_bucket(url).url


@pytest.fixture(autouse=True)
def _no_cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_bucket_is_itself(tmp_path: Path) -> None:
    bucket = open_bucket(tmp_path)
    assert open_bucket(bucket) is bucket


# Directories


def test_a_path_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert opened(tmp_path) == opened(str(tmp_path)) == opened(f"{tmp_path}/") == tmp_path.as_uri()
    assert opened("run") == opened("./run") == opened("~/run") == (tmp_path / "run").as_uri()
    assert opened("a:b") == (tmp_path / "a:b").as_uri()
    assert not list(tmp_path.iterdir())


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    odd = tmp_path / "a b%?#ü"

    assert opened(odd.as_uri()) == opened(odd) == odd.as_uri()
    assert opened(f"file://localhost{tmp_path}") == opened(f"FILE://{tmp_path}") == tmp_path.as_uri()


@pytest.mark.parametrize("url", ["file://host/path", "file://path", "file://", "file:///a?b", "file:///a%00b"])
def test_a_file_url_needs_an_absolute_path(url: str) -> None:
    with pytest.raises(BucketError, match="file:// URL") as caught:
        open_bucket(url)
    assert caught.value.hint == "write file:///path, or the path alone"


# Buckets


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://my.bucket-1/a/b c/", "s3://my.bucket-1/a/b c"),
        ("S3://bucket/run@1:2", "s3://bucket/run@1:2"),
        ("gs://bucket/run", "gs://bucket/run"),
        ("az://container/run", "az://container/run"),
        ("memory://name", "memory://name"),
        ("memory://name/run", "memory://name/run"),
        ("hf://buckets/owner/name", "hf://buckets/owner/name"),
        ("hf://buckets/owner/name/some/run/", "hf://buckets/owner/name/some/run"),
    ],
)
def test_a_url_is_a_bucket_and_a_prefix(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")

    assert opened(url) == name
    assert open_bucket(url).strict is not url.startswith("hf")
    assert open_bucket(url).poll_interval == (2.0 if url.startswith("hf") else 0.2)


def test_memory_of_the_same_name_is_the_same() -> None:
    assert open_bucket("memory://urls/a") is not open_bucket("memory://urls/a")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("", "'' is no bucket"),
        ("a\0b", "is no bucket"),
        ("ftp://host/path", "ftp:// is no bucket that weightwire knows"),
        ("https://host/path", "https:// is no bucket that weightwire knows"),
        ("s3://", "s3:// names no bucket"),
        ("s3:///key", "s3:// names no bucket"),
        ("s3://buc ket/key", "s3://buc ket names no bucket"),
        ("s3://bucket/a//b", "cannot be the path of an object"),
        ("s3://bucket/../b", "cannot be the path of an object"),
        ("hf://owner/name", "must name a bucket"),
        ("hf://buckets/owner", "must name a bucket"),
        ("az://container", "in which storage account?"),
    ],
)
def test_what_is_no_bucket_is_refused(url: str, what: str) -> None:
    with pytest.raises(BucketError, match=r".") as caught:
        open_bucket(url)
    assert what in caught.value.message
    assert caught.value.hint


def test_a_url_that_went_through_pathlib_is_not_taken_for_a_directory() -> None:
    with pytest.raises(BucketError, match="pass a str"):
        open_bucket(Path("s3://bucket/run"))


@pytest.mark.parametrize("kind", ["s3", "gs", "az", "hf", "memory", "ftp"])
@pytest.mark.parametrize(
    "rest",
    ["key:SECRET@bucket/run", "key:SEC/RET@bucket", "bucket?SECRET", "bucket/run?sig=SECRET", "bucket/run#SECRET"],
)
def test_secrets_in_a_url_are_refused_and_not_repeated(kind: str, rest: str) -> None:
    with pytest.raises(BucketError, match="without users, passwords") as caught:
        open_bucket(f"{kind}://{rest}")
    assert "SEC" not in str(caught.value)
    assert "RET" not in str(caught.value)


# Settings


@pytest.mark.parametrize("endpoint", ["", "localhost:8333", "http://", "ftp://host", "http://user:SECRET@host"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)

    with pytest.raises(BucketError, match="AWS_ENDPOINT_URL") as caught:
        open_bucket("s3://bucket")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "variables", "what"),
    [
        ("s3://bucket", {"AWS_ACCESS_KEY_ID": "key"}, "s3://bucket: Generic S3 error: Missing SecretAccessKey"),
        ("gs://bucket", {"GOOGLE_APPLICATION_CREDENTIALS": "/no/such/file"}, "gs://bucket: "),
        ("az://it", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "T0PSECRET?"}, "az://it: "),
    ],
)
def test_settings_that_cannot_be_are_refused(
    url: str, variables: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(BucketError) as caught:
        open_bucket(url)
    assert type(caught.value) is BucketError
    assert caught.value.message.startswith(what)
    assert "T0P" not in str(caught.value)
    assert caught.value.hint
    assert next(iter(variables)) in caught.value.hint


def test_a_profile_needs_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setitem(sys.modules, "boto3", None)

    with pytest.raises(BucketError, match="pip install boto3"):
        open_bucket("s3://bucket")


@pytest.mark.parametrize("missing", ["huggingface_hub", "hf_xet"])
def test_the_hub_needs_its_client(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(BucketError, match=r"pip install 'weightwire\[hf\]'"):
        open_bucket("hf://buckets/owner/name")


def test_a_directory_needs_none_of_the_clients(tmp_path: Path) -> None:
    code = (
        "import sys; from weightwire.bucket import open_bucket; open_bucket(sys.argv[1]);"
        "print(*{name.split('.')[0] for name in sys.modules} & {'obstore', 'huggingface_hub', 'hf_xet', 'httpx'})"
    )
    assert isinstance(open_bucket(tmp_path), DirectoryBucket)

    output = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], text=True)

    assert not output.split()
