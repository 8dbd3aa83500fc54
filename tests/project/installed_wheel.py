"""Checks an installed wheel: it has the kernel, and a delta turns one set of weights into another bit for bit.

cibuildwheel runs this for every released wheel (see pyproject.toml). It needs only weightwire and NumPy.
"""

import numpy as np

import weightwire
import weightwire.codec._kernel

before = {"weight": np.arange(1000, dtype=np.float32)}
after = {"weight": before["weight"].copy()}
after["weight"][::100] += 1
delta = weightwire.diff(before, after)
weightwire.patch(before, delta)
if weightwire.digest(before) != weightwire.digest(after):
    raise SystemExit("error: the patched weights differ from the weights that the delta was made for")
print(f"weightwire {weightwire.__version__}: the kernel works, and a patched checkpoint is bit-exact")
