"""Look: the status of a run, and whether its bucket is intact. Nothing here writes."""

from weightwire.inspection.findings import Verification
from weightwire.inspection.readiness import Readiness, read_readiness
from weightwire.inspection.status import (
    ReplicaStatus,
    RunHistory,
    RunStatus,
    VersionStatus,
    read_history,
    read_keys,
    read_status,
)
from weightwire.inspection.verify import verify_run

__all__ = [
    "Readiness",
    "ReplicaStatus",
    "RunHistory",
    "RunStatus",
    "Verification",
    "VersionStatus",
    "read_history",
    "read_keys",
    "read_readiness",
    "read_status",
    "verify_run",
]
