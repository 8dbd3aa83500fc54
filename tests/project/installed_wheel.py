"""Checks an installed wheel: the kernel is in it, and a delta brings one checkpoint to the bits of another.

cibuildwheel runs this for every wheel that is released (see pyproject.toml); it needs weightwire and NumPy only.
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
    raise SystemExit("error: the patched weights differ from those that the delta was made of")
print(f"weightwire {weightwire.__version__}: the kernel is there, and a patch gives the same bits")
