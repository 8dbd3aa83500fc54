"""Look: the status of a run, and proof that its bucket is whole. Nothing here ever writes."""

from weightwire.inspection.findings import Verification
from weightwire.inspection.status import ReplicaStatus, RunStatus, VersionStatus, read_history, read_status
from weightwire.inspection.verify import verify_run

__all__ = ["ReplicaStatus", "RunStatus", "Verification", "VersionStatus", "read_history", "read_status", "verify_run"]
