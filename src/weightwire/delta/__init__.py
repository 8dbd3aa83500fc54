"""Pack: makes, reads, applies and verifies delta files, which hold many encoded tensors."""

from weightwire.delta.absolute import DecodedBlocks, make_absolute, merge_absolute, write_absolute
from weightwire.delta.decoder import BlockJob, changes, coo_changes, decode_job, jobs_of
from weightwire.delta.encoded_stack import EncodedStack, Entry
from weightwire.delta.file import FORMAT, Delta, check_format, head_size
from weightwire.delta.maker import anchor, diff, diff_of_blocks
from weightwire.delta.patcher import apply_in_place, patch, patch_checkpoint
from weightwire.delta.state import State, TensorState, add_digests, digest, subtract_digests
from weightwire.delta.tensor_stacks import TensorKind, TensorStack, kind_of, kinds_in, stacks_of

__all__ = [
    "FORMAT",
    "BlockJob",
    "DecodedBlocks",
    "Delta",
    "EncodedStack",
    "Entry",
    "State",
    "TensorKind",
    "TensorStack",
    "TensorState",
    "add_digests",
    "anchor",
    "apply_in_place",
    "changes",
    "check_format",
    "coo_changes",
    "decode_job",
    "diff",
    "diff_of_blocks",
    "digest",
    "head_size",
    "jobs_of",
    "kind_of",
    "kinds_in",
    "make_absolute",
    "merge_absolute",
    "patch",
    "patch_checkpoint",
    "stacks_of",
    "subtract_digests",
    "write_absolute",
]
