"""The bucket that each URL opens, and the errors for invalid URLs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weightwire.bucket.directory import DirectoryBucket
from weightwire.bucket.registry import open_bucket
from weightwire.errors import BucketError, MissingDependency


def opened(url: str | Path) -> str:
    return open_bucket(url).url


@pytest.fixture(autouse=True)
def _no_cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_open_bucket_returns_a_bucket_unchanged(tmp_path: Path) -> None:
    bucket = open_bucket(tmp_path)
    assert open_bucket(bucket) is bucket


# Directories


def test_path_opens_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert opened(tmp_path) == opened(str(tmp_path)) == opened(f"{tmp_path}/") == str(tmp_path)
    assert opened("run") == opened("./run") == opened("~/run") == str(tmp_path / "run")
    assert opened("a:b") == str(tmp_path / "a:b")
    assert not list(tmp_path.iterdir())


def test_file_url_opens_a_directory(tmp_path: Path) -> None:
    odd = tmp_path / "a b%?#ü"

    assert opened(odd.as_uri()) == opened(odd) == str(odd)
    assert opened(f"file://localhost{tmp_path}") == opened(f"FILE://{tmp_path}") == str(tmp_path)


@pytest.mark.parametrize("url", ["file://host/path", "file://path", "file://", "file:///a?b", "file:///a%00b"])
def test_file_url_needs_an_absolute_path(url: str) -> None:
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
def test_url_names_bucket_and_prefix(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")

    assert opened(url) == name
    assert open_bucket(url).strict is not url.startswith("hf")
    assert open_bucket(url).poll_interval == (2.0 if url.startswith("hf") else 0.2)


def test_memory_urls_open_new_clients() -> None:
    assert open_bucket("memory://urls/a") is not open_bucket("memory://urls/a")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("", "'' is not a bucket"),
        ("a\0b", "is not a bucket"),
        ("ftp://host/path", "ftp:// is not a supported kind of bucket"),
        ("https://host/path", "https:// is not a supported kind of bucket"),
        ("http://127.0.0.1:9/x", "http:// is not a supported kind of bucket"),
        ("s3://127.0.0.1:9000/bucket/run", "an s3:// URL cannot contain a port"),
        ("gs://bucket:1/run", "a gs:// URL cannot contain a port"),
        ("s3://", "s3:// does not name a bucket"),
        ("s3:///key", "s3:// does not name a bucket"),
        ("s3://buc ket/key", "s3://buc ket does not name a bucket"),
        ("s3://bucket/a//b", "is not a valid object path"),
        ("s3://bucket/../b", "is not a valid object path"),
        ("hf://owner/name", "must name a bucket"),
        ("hf://buckets/owner", "must name a bucket"),
        ("az://container", "the storage account is not set"),
    ],
)
def test_invalid_url_is_rejected(url: str, what: str) -> None:
    with pytest.raises(BucketError, match=r".") as caught:
        open_bucket(url)
    assert what in caught.value.message
    assert caught.value.hint


def test_url_mangled_by_pathlib_is_rejected() -> None:
    with pytest.raises(BucketError, match="pass a str"):
        open_bucket(Path("s3://bucket/run"))


@pytest.mark.parametrize("kind", ["s3", "gs", "az", "hf", "memory"])
@pytest.mark.parametrize(
    "rest",
    [
        "key:SECRET@bucket/run",
        "key:1/SECRET@bucket",
        "key:SEC/RET@bucket",
        "bucket?SECRET",
        "bucket/run?sig=SECRET",
        "bucket/run#SECRET",
    ],
)
def test_secrets_in_a_url_are_rejected_and_not_repeated(kind: str, rest: str) -> None:
    with pytest.raises(BucketError, match="cannot contain a user, a password") as caught:
        open_bucket(f"{kind}://{rest}")
    assert "SEC" not in str(caught.value)
    assert "RET" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9000/bucket", "s3://127.0.0.1:9000/bucket"])
def test_endpoint_in_a_url_is_rejected_with_the_right_setting(url: str) -> None:
    with pytest.raises(BucketError, match="set AWS_ENDPOINT_URL for an S3 endpoint"):
        open_bucket(url)


def test_secrets_in_an_unsupported_url_are_not_repeated() -> None:
    with pytest.raises(BucketError, match="ftp:// is not a supported kind") as caught:
        open_bucket("ftp://key:SECRET@host/path?SECRET")
    assert "SECRET" not in str(caught.value)


# Settings


@pytest.mark.parametrize("endpoint", ["", "localhost:8333", "http://", "ftp://host", "http://user:SECRET@host"])
def test_invalid_endpoint_is_rejected(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_invalid_settings_are_rejected(
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


def test_profile_needs_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setitem(sys.modules, "boto3", None)

    with pytest.raises(BucketError, match="pip install boto3"):
        open_bucket("s3://bucket")


@pytest.mark.parametrize("missing", ["huggingface_hub", "hf_xet"])
def test_hub_needs_its_client(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(MissingDependency, match="install weightwire with the `hf` extra"):
        open_bucket("hf://buckets/owner/name")


def test_directory_imports_no_client(tmp_path: Path) -> None:
    code = (
        "import sys; from weightwire.bucket import open_bucket; open_bucket(sys.argv[1]);"
        "print(*{name.split('.')[0] for name in sys.modules} & {'obstore', 'huggingface_hub', 'hf_xet', 'httpx'})"
    )
    assert isinstance(open_bucket(tmp_path), DirectoryBucket)

    output = subprocess.check_output([sys.executable, "-c", code, str(tmp_path)], text=True)

    assert not output.split()
