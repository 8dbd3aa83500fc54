"""Encode: turns the old and new bits of one block into bytes, and back.

The C kernel does the work. If it was not built, NumPy (`numpy_kernel`) gives the same bytes.
"""

from weightwire.codec.bit_stream import read_uvarint, uvarint
from weightwire.codec.block_codec import (
    BlockUnits,
    Digest,
    Digests,
    EncodedBlock,
    Patch,
    apply,
    decode,
    digest,
    digest_change,
    digest_of,
    encode,
    encoding,
    has_kernel,
    replace,
    swap,
    swap_units,
    trim,
    vector_bits,
)
from weightwire.codec.block_layout import BLOCK, Layout
from weightwire.codec.coo_encoding import BlockChanges, decode_coo, encode_coo, read_coo
from weightwire.codec.full_encoding import BYTES_PER_BYTE

__all__ = [
    "BLOCK",
    "BYTES_PER_BYTE",
    "BlockChanges",
    "BlockUnits",
    "Digest",
    "Digests",
    "EncodedBlock",
    "Layout",
    "Patch",
    "apply",
    "decode",
    "decode_coo",
    "digest",
    "digest_change",
    "digest_of",
    "encode",
    "encode_coo",
    "encoding",
    "has_kernel",
    "read_coo",
    "read_uvarint",
    "replace",
    "swap",
    "swap_units",
    "trim",
    "uvarint",
    "vector_bits",
]
