"""Turns an object store's errors into one-line errors, for S3, GCS and Azure.

The client's errors are pages of debug output with addresses that may be signed. Only the store's code and message, the
status and the host name are kept.
"""

from __future__ import annotations

import re
from typing import Literal

from weightwire.errors import AlreadyExists, BucketError, NoBucket, NotFound, PermissionDenied, Truncated, Unavailable

__all__ = ["StoreRequest", "explain", "explain_settings"]

StoreRequest = Literal["get", "list", "put", "delete"]

# What a key needs for each kind of request. Azure has roles for a whole container instead.
_PERMISSIONS: dict[str, dict[StoreRequest, str]] = {
    "s3": {"get": "s3:GetObject", "list": "s3:ListBucket", "put": "s3:PutObject", "delete": "s3:DeleteObject"},
    "gs": {
        "get": "storage.objects.get",
        "list": "storage.objects.list",
        "put": "storage.objects.create",
        "delete": "storage.objects.delete",
    },
}

_CREDENTIALS = {
    "s3": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_ENDPOINT_URL and the permissions",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS, and that the account has permission to read and write objects",
    "az": "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_POLICY = "run `weightwire policy ROLE URL` to see what the key of each role needs; "
_NO_LISTING = "; without s3:ListBucket, S3 also answers this for a missing object"
_NO_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pip install boto3 to use AWS_PROFILE and ~/.aws",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

_LACKING = "use a store with conditional writes (If-None-Match): this one lacks a feature that weightwire needs"
_DELETE = "delete this object with the tools of the store: nothing under this URL can be listed while it exists"
_WAIT = "check the network and the endpoint, or try again later"

# The key is known, but does not allow the request. An answer without a code is one to a HEAD request.
_LACKS_PERMISSION = {"", "AccessDenied"}
# Codes whose status alone would be misleading.
_DENIED = {
    "AccessDenied",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_PASSING = {
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServerBusy",
    "SlowDown",
    "Throttling",
}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_ELSEWHERE = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}

_CODE = re.compile(r"<Code>([A-Za-z]{1,80})</Code>|\(code: ([A-Za-z]{1,80})\)")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,200})")
_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z -]{1,40})?)")
_HOST = re.compile(r"Error performing [A-Z]+ \w+://(?:[^/\s@]*@)?([^/\s?@]+)")
_CAUSE = re.compile(r'(?:message|error): "([^"\n]{1,200})"')
_ADDRESS = re.compile(r"\w+://\S+")
_INVALID_NAME = re.compile(r'object with invalid path: .*?[Pp]ath ("[^"\n]{1,200}")')
# The addresses where clouds hand out credentials to their machines.
_METADATA = re.compile(r"169\.254\.\d+\.\d+|metadata\.google\.internal|fd00:ec2::254")


def explain(problem: Exception, kind: str, where: str, request: StoreRequest) -> BucketError:
    """The error to raise for an obstore error, by its class, its code and its status."""
    text = str(problem)
    code = next((found[1] or found[2] for found in _CODE.finditer(text)), "")
    status = found[1] if (found := _STATUS.search(text)) else ""
    what = f"{where}: {_reason(text, code, status)}"
    if type(problem).__name__ in ("AlreadyExistsError", "PreconditionError"):
        return AlreadyExists.at(where)
    if code in _NO_BUCKET:
        return NoBucket(what, hint="create the bucket, or check its name and AWS_ENDPOINT_URL")
    if isinstance(problem, FileNotFoundError) or status.startswith("404"):
        return NotFound.at(where)
    if status.startswith("501") or isinstance(problem, NotImplementedError):
        return BucketError(what, hint=_LACKING)
    if found := _INVALID_NAME.search(text):
        return BucketError(f"{where}: {found[1]} is not a valid object path", hint=_DELETE)
    if code in _PASSING or status.startswith(("429", "5")):
        return Unavailable(what, hint=_WAIT)
    if _METADATA.search(text):
        return PermissionDenied(f"{where}: no credentials found", hint=_NO_CREDENTIALS.get(kind))
    if _is_denied(problem, code, status):
        return _explain_denied(what, kind, code, status, request)
    return _explain_rest(what, text, code, status)


def explain_settings(problem: Exception, kind: str, where: str) -> BucketError:
    """The same for wrong settings, found before the first request. Retrying would not help."""
    return BucketError(f"{where}: {_reason(str(problem), '', '')}", hint=_CREDENTIALS[kind])


def _explain_denied(what: str, kind: str, code: str, status: str, request: StoreRequest) -> PermissionDenied:
    if code == "RequestTimeTooSkewed":
        return PermissionDenied(what, hint="set the clock of this machine: it is wrong")
    hint = _CREDENTIALS.get(kind, "")
    if code not in _LACKS_PERMISSION or status.startswith("401"):
        return PermissionDenied(what, hint=hint)
    if kind == "s3":
        hint = _POLICY + hint + _NO_LISTING
    permission = _PERMISSIONS.get(kind, {}).get(request)
    return PermissionDenied(f"{what} (needs {permission})" if permission else what, hint=hint)


def _explain_rest(what: str, text: str, code: str, status: str) -> BucketError:
    if code in _ELSEWHERE or "incorrectly configured region" in text:
        return BucketError(what, hint="set AWS_REGION to the region of the bucket")
    if status.startswith("416") or "Invalid range" in text:
        return Truncated(what, hint="run `weightwire verify URL` to see what is damaged")
    if status.startswith("4") and status[:3] not in ("408", "409", "412", "425"):
        return BucketError(what, hint="the store rejected the request: check the URL and its endpoint")
    return Unavailable(what, hint=_WAIT)


def _is_denied(problem: Exception, code: str, status: str) -> bool:
    name = type(problem).__name__
    return name in ("PermissionDeniedError", "UnauthenticatedError") or status[:3] in ("401", "403") or code in _DENIED


def _reason(text: str, code: str, status: str) -> str:
    """The store's own words if it answered, else what went wrong on the way."""
    host = f" ({found[1]})" if (found := _HOST.search(text)) else ""
    if code:
        message = found[1].strip(" .") if (found := _MESSAGE.search(text)) else ""
        return f"{code}, {message}" if message else code
    if status:
        return f"{status}{host}"
    if "kind: Timeout" in text or "operation timed out" in text:
        return f"timed out{host}"
    cause = _CAUSE.findall(text)
    if cause:
        return f"{cause[-1]}{host}"
    first = text.partition("\n")[0]
    return _ADDRESS.sub("an address", first.rpartition(" - ")[2])[:200] + host
