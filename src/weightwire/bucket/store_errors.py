"""What an object store's refusal means, in one line.

The client's own errors are pages of debug output, with addresses that may be signed: of these only the store's code
and message, the status and the name of the host are passed on. Knows the words of S3, GCS and Azure.
"""

from __future__ import annotations

import re

from weightwire.errors import AlreadyExists, BucketError, NoBucket, NotFound, PermissionDenied, Truncated, Unavailable

__all__ = ["explain", "explain_settings"]

_CREDENTIALS = {
    "s3": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_ENDPOINT_URL, and what they allow",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS, and that the account may read and write objects there",
    "az": "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_NO_LISTING = "; S3 answers the same for an object that is not there if the key lacks s3:ListBucket"
_NO_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pip install boto3 to use AWS_PROFILE and ~/.aws",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}

_LACKING = "this store lacks what weightwire needs, such as If-None-Match: use another one"
_WAIT = "check the network and the endpoint, or wait: this may pass"

# Codes that come with a status which alone would say something else.
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
# Where clouds hand out credentials to machines of their own.
_METADATA = re.compile(r"169\.254\.\d+\.\d+|metadata\.google\.internal|fd00:ec2::254")


def explain(problem: Exception, kind: str, where: str) -> BucketError:
    """The error to raise for one of obstore's, by its class, its code, and its status where it has no class."""
    text = str(problem)
    code = next((found[1] or found[2] for found in _CODE.finditer(text)), "")
    status = found[1] if (found := _STATUS.search(text)) else ""
    what = f"{where}: {_reason(text, code, status)}"
    if type(problem).__name__ in ("AlreadyExistsError", "PreconditionError"):
        return AlreadyExists(f"{where}: exists", hint="read it: it may be one's own, if the answer got lost")
    if code in _NO_BUCKET:
        return NoBucket(what, hint="create the bucket first, and check its name and AWS_ENDPOINT_URL")
    if isinstance(problem, FileNotFoundError) or status.startswith("404"):
        return NotFound(f"{where}: is not there", hint="check the URL, or wait for it")
    if status.startswith("501") or isinstance(problem, NotImplementedError):
        return BucketError(what, hint=_LACKING)
    if code in _PASSING or status.startswith(("429", "5")):
        return Unavailable(what, hint=_WAIT)
    if _METADATA.search(text):
        return PermissionDenied(f"{where}: there are no credentials", hint=_NO_CREDENTIALS.get(kind))
    if _is_denied(problem, code, status):
        if code == "RequestTimeTooSkewed":
            return PermissionDenied(what, hint="the clock of this machine is wrong: set it")
        return PermissionDenied(what, hint=_CREDENTIALS.get(kind, "") + (_NO_LISTING if kind == "s3" else ""))
    return _explain_rest(what, text, code, status)


def explain_settings(problem: Exception, kind: str, where: str) -> BucketError:
    """The same for what is wrong before anything was asked of the store: to wait would not help."""
    return BucketError(f"{where}: {_reason(str(problem), '', '')}", hint=_CREDENTIALS[kind])


def _explain_rest(what: str, text: str, code: str, status: str) -> BucketError:
    if code in _ELSEWHERE or "incorrectly configured region" in text:
        return BucketError(what, hint="set AWS_REGION to the region of the bucket")
    if status.startswith("416") or "Invalid range" in text:
        return Truncated(what, hint="the object is shorter than expected: it is not the one it should be")
    if status.startswith("4") and status[:3] not in ("408", "409", "412", "425"):
        return BucketError(what, hint="the store does not take such a request: check the URL and its endpoint")
    return Unavailable(what, hint=_WAIT)


def _is_denied(problem: Exception, code: str, status: str) -> bool:
    name = type(problem).__name__
    return name in ("PermissionDeniedError", "UnauthenticatedError") or status[:3] in ("401", "403") or code in _DENIED


def _reason(text: str, code: str, status: str) -> str:
    """The store's own words if it has said something, else what went wrong on the way there."""
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
