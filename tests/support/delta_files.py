"""The delta between two small sets of weights, for tests of files."""

from __future__ import annotations

import numpy as np

import weightwire
from support.patch_checks import U16, Arrays
from support.samples import base, change
from weightwire import Delta


def old_weights() -> Arrays:
    return {
        "a": base(U16, 6400).reshape(100, 64),
        "gone": np.zeros(3, np.uint8),
        "ünï": base(U16, 12, seed=3).reshape(3, 4),
    }


def new_weights() -> Arrays:
    old = old_weights()
    return {
        "a": change(old["a"].reshape(-1), U16, "few").reshape(100, 64),
        "fresh": np.arange(5, dtype=np.float32),
        "ünï": old["ünï"] + np.uint16(1),
    }


def make_delta() -> Delta:
    return weightwire.diff(old_weights(), new_weights())
