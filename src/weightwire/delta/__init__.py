"""Pack: makes, reads, applies and verifies delta files, which hold many encoded tensors."""

from weightwire.delta.absolute import make_absolute, merge_absolute, write_absolute
from weightwire.delta.decoder import BlockJob, changes, coo_changes, jobs_of, naming
from weightwire.delta.file import FORMAT, Delta, Entry, check_format
from weightwire.delta.maker import BlockDone, anchor, diff, diff_of_blocks
from weightwire.delta.patcher import apply_in_place, patch, patch_checkpoint
from weightwire.delta.state import State, TensorState, add_digests, digest, subtract_digests

__all__ = [
    "FORMAT",
    "BlockDone",
    "BlockJob",
    "Delta",
    "Entry",
    "State",
    "TensorState",
    "add_digests",
    "anchor",
    "apply_in_place",
    "changes",
    "check_format",
    "coo_changes",
    "diff",
    "diff_of_blocks",
    "digest",
    "jobs_of",
    "make_absolute",
    "merge_absolute",
    "naming",
    "patch",
    "patch_checkpoint",
    "subtract_digests",
    "write_absolute",
]
