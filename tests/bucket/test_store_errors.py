"""Replies of real stores, and the error that each becomes."""

from __future__ import annotations

import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from weightwire.bucket.store_errors import StoreRequest, explain
from weightwire.errors import AlreadyExists, BucketError, NoBucket, NotFound, PermissionDenied, Truncated, Unavailable

WHERE = "s3://bucket/run/a"


def answer(status: str, code: str = "", message: str = "", more: str = "") -> str:
    """An obstore error that wraps the reply of an S3 server."""
    body = (
        f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>' if code else ""
    )
    return (
        "Generic S3 error: Error performing GET https://user:SECRET@s3.example.com/bucket/run/a?sig=SECRET in 1.2ms - "
        f"Server returned non-2xx status code: {status}: {body}\n\nDebug source:\nGeneric {{ uri: "
        f'https://s3.example.com/bucket/run/a?sig=SECRET, status: {status[:3]}, body: Some("{body}") }}'
    )


def lost(kind: str, cause: str) -> str:
    return (
        "Generic S3 error: Error performing PUT https://s3.example.com/bucket/a?sig=SECRET in 5s, after 3 retries - "
        f"HTTP error: error sending request\n\nDebug source:\nHttp {{ kind: {kind}, url: "
        f'"https://s3.example.com/?sig=SECRET", source: {cause} }}'
    )


CASES = [
    # S3
    (PermissionDeniedError, answer("403 Forbidden", "AccessDenied", "Access Denied"), PermissionDenied, "AccessDenied"),
    (PermissionDeniedError, answer("403 Forbidden"), PermissionDenied, "403 Forbidden (s3.example.com)"),
    (UnauthenticatedError, answer("401 Unauthorized"), PermissionDenied, "401 Unauthorized"),
    (GenericError, answer("403 Forbidden", "AccessDenied", "Access Denied"), PermissionDenied, "AccessDenied"),
    (
        GenericError,
        answer("400 Bad Request", "ExpiredToken", "The token has expired."),
        PermissionDenied,
        "has expired",
    ),
    (
        GenericError,
        answer("400 Bad Request", "InvalidToken", "Malformed."),
        PermissionDenied,
        "InvalidToken, Malformed",
    ),
    (
        PermissionDeniedError,
        answer("403 Forbidden", "SignatureDoesNotMatch", "No match.", "<StringToSign>SECRET</StringToSign>"),
        PermissionDenied,
        "SignatureDoesNotMatch, No match",
    ),
    (GenericError, "Generic S3 error: DeleteObjects failed: no (code: AccessDenied)", PermissionDenied, "AccessDenied"),
    (FileNotFoundError, answer("404 Not Found", "NoSuchKey", "No such key"), NotFound, "not found"),
    (FileNotFoundError, answer("404 Not Found"), NotFound, "not found"),
    (FileNotFoundError, answer("404 Not Found", "NoSuchBucket", "No such bucket"), NoBucket, "NoSuchBucket"),
    (GenericError, answer("404 Not Found", "NoSuchBucket", "No such bucket"), NoBucket, "create the bucket"),
    (AlreadyExistsError, answer("412 Precondition Failed"), AlreadyExists, "exists"),
    (PreconditionError, answer("412 Precondition Failed"), AlreadyExists, "exists"),
    (GenericError, answer("503 Slow Down", "SlowDown", "Reduce your request rate."), Unavailable, "SlowDown, Reduce"),
    (PermissionDeniedError, answer("403 Forbidden", "SlowDown", "Less."), Unavailable, "SlowDown"),
    (GenericError, answer("500 Internal Server Error", "InternalError", "Oh"), Unavailable, "InternalError"),
    (GenericError, answer("502 Bad Gateway"), Unavailable, "502 Bad Gateway (s3.example.com)"),
    (GenericError, answer("429 Too Many Requests"), Unavailable, "429"),
    (GenericError, answer("400 Bad Request", "RequestTimeout", "Too slow."), Unavailable, "RequestTimeout"),
    (GenericError, answer("409 Conflict", "OperationAborted", "Again."), Unavailable, "OperationAborted"),
    (GenericError, answer("501 Not Implemented", "NotImplemented", "A header"), BucketError, "If-None-Match"),
    (NotImplementedError, "Operation `put` not yet implemented by `HTTP`.", BucketError, "If-None-Match"),
    (GenericError, answer("416 Range Not Satisfiable", "InvalidRange", "No"), Truncated, "weightwire verify"),
    (GenericError, answer("400 Bad Request", "KeyTooLongError", "Too long"), BucketError, "KeyTooLongError"),
    (GenericError, answer("301 Moved Permanently", "PermanentRedirect", "There"), BucketError, "set AWS_REGION"),
    (
        GenericError,
        "Generic S3 error: Received redirect, this normally indicates an incorrectly configured region",
        BucketError,
        "set AWS_REGION",
    ),
    (PermissionDeniedError, answer("403 Forbidden", "RequestTimeTooSkewed", "Late"), PermissionDenied, "the clock"),
    # Network
    (
        GenericError,
        lost("Connect", 'Os { message: "Connection refused" }'),
        Unavailable,
        "Connection refused",
    ),
    (GenericError, lost("Timeout", "TimedOut"), Unavailable, "timed out (s3.example.com)"),
    (GenericError, lost("Connect", 'Custom { error: "failed to lookup address" }'), Unavailable, "failed to lookup"),
    (
        GenericError,
        lost("Request", "hyper::Error(IncompleteMessage)"),
        Unavailable,
        "HTTP error: error sending request",
    ),
    (GenericError, "Generic S3 error: at https://s3.example.com/?sig=SECRET", Unavailable, "at an address"),
    (GenericError, "", Unavailable, WHERE),
    # Cloud metadata servers
    (
        GenericError,
        lost("Connect", "TimedOut").replace("s3.example.com/bucket", "169.254.169.254/latest"),
        PermissionDenied,
        "no credentials found",
    ),
    (
        GenericError,
        answer("503 Service Unavailable").replace("s3.example.com/bucket", "169.254.169.254/latest"),
        Unavailable,
        "503",
    ),
    # Azure
    (
        PermissionDeniedError,
        answer("403 Forbidden", "AuthenticationFailed", "Failed.\nRequestId:1", "<Detail>sig=SECRET</Detail>"),
        PermissionDenied,
        "AuthenticationFailed, Failed",
    ),
    (FileNotFoundError, answer("404 Not Found", "ContainerNotFound", "No"), NoBucket, "create the bucket"),
    (GenericError, answer("503 Busy", "ServerBusy", "Busy"), Unavailable, "ServerBusy"),
]


@pytest.mark.parametrize(("kind", "text", "error", "what"), CASES)
def test_reply_becomes_a_typed_error(kind: type[Exception], text: str, error: type[BucketError], what: str) -> None:
    found = explain(kind(text), "s3", WHERE, "get")

    assert type(found) is error
    assert found.message.startswith(f"{WHERE}: ")
    assert what in str(found)
    assert found.hint
    assert len(str(found).splitlines()) == 2
    assert "SECRET" not in str(found).replace("AWS_SECRET", "")


@pytest.mark.parametrize(
    ("kind", "variable"),
    [
        ("s3", "AWS_SECRET_ACCESS_KEY"),
        ("gs", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_hint_names_the_variables_of_the_cloud(kind: str, variable: str) -> None:
    for text in (answer("403 Forbidden"), lost("Connect", "169.254.169.254")):
        found = explain(PermissionDeniedError(text), kind, f"{kind}://bucket/a", "get")

        assert found.hint
        assert variable in found.hint
        assert ("s3:ListBucket" in found.hint) == (kind == "s3" and "403" in text)


@pytest.mark.parametrize(
    ("request_kind", "permission"),
    [("get", "s3:GetObject"), ("list", "s3:ListBucket"), ("put", "s3:PutObject"), ("delete", "s3:DeleteObject")],
)
@pytest.mark.parametrize("text", [answer("403 Forbidden", "AccessDenied", "Access Denied"), answer("403 Forbidden")])
def test_denied_request_names_the_missing_permission_and_the_policy_command(
    request_kind: StoreRequest, permission: str, text: str
) -> None:
    found = explain(PermissionDeniedError(text), "s3", WHERE, request_kind)

    assert found.message.endswith(f"(needs {permission})")
    assert found.hint
    assert found.hint.startswith("run `weightwire policy ROLE URL`")


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_wrong_key_does_not_look_like_a_missing_permission(code: str) -> None:
    found = explain(PermissionDeniedError(answer("403 Forbidden", code, "No.")), "s3", WHERE, "put")

    assert isinstance(found, PermissionDenied)
    assert "needs" not in found.message
    assert found.hint
    assert "policy" not in found.hint
