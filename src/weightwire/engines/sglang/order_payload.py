"""An order as SGLang's `serialized_named_tensors`: a pickled list of one name and one uint8 tensor, in base64.

The pickle is written by hand, because a follower needs no torch. SGLang unpickles only what it knows to be harmless;
`torch.ByteTensor` of a list of numbers is. Torch's own pickles would pass open files, which HTTP cannot.
"""

from __future__ import annotations

import base64
import json
import pickle
import struct
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from weightwire.engines.orders import Order

__all__ = ["pack_order", "unpack_order"]

_NAME = "weightwire"


def pack_order(order: Order) -> str:
    """The payload for one worker."""
    name, data = _NAME.encode(), json.dumps(asdict(order)).encode()
    numbers = b"".join(pickle.BININT1 + bytes([one]) for one in data)
    tensor = b"ctorch\nByteTensor\n" + pickle.EMPTY_LIST + pickle.MARK + numbers + pickle.APPENDS
    tensor += pickle.TUPLE1 + pickle.REDUCE
    pair = pickle.BINUNICODE + struct.pack("<I", len(name)) + name + tensor + pickle.TUPLE2
    return base64.b64encode(pickle.PROTO + b"\x02" + pickle.EMPTY_LIST + pair + pickle.APPEND + pickle.STOP).decode()


def unpack_order(named_tensors: Iterable[tuple[str, Any]]) -> Order:
    """Reads an order from the tensors that SGLang passes to a loader, on whatever device. Raises a ValueError."""
    found = dict(named_tensors)
    if set(found) != {_NAME}:
        raise ValueError(f"not an order of weightwire: {', '.join(sorted(found)) or 'no tensor'}")
    try:
        return Order(**json.loads(bytes(found[_NAME].cpu().numpy())))
    except TypeError as problem:
        raise ValueError(f"an order of another version of weightwire ({problem})") from problem
