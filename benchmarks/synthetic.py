"""Synthetic weights and changes, made in seconds; a recording takes minutes.

They imitate an AdamW step at a learning rate of 1e-6 in bf16: Gaussian weights, the chance to change by exponent as
measured early and late in a run, and updates of the size that these chances imply. Rows, columns and tensors are
independent of each other, unlike in real training. Sizes measured on them are an indication; claims use recordings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bits = dict[str, NDArray[np.uint16]]
Stage = Literal["early", "late"]

SIGMA = 0.02
ROW_SCALE_SIGMA = 0.3
BIAS = 127
ONE = BIAS << 7  # in bf16
CHANCE_FROM_MINUS_9 = (0.016, 0.031, 0.063, 0.127, 0.255, 0.487, 0.718, 0.857, 0.928)

# A weight anywhere in its rounding interval changes with probability E|u| / ulp if the update u is smaller than the
# ulp, which is 2^-16 for an exponent of -9. E|u| of a normal distribution is 0.798 sigma.
UPDATE_SIGMA = 0.016 * 2.0**-16 / 0.798
# From this exponent up, the ulp is more than six sigmas of the update, so every change is one ulp.
ONE_ULP_FROM = -12


Shape = tuple[int, ...]


def layer_shapes(layer: int) -> dict[str, Shape]:
    prefix = f"model.layers.{layer}"
    return {
        f"{prefix}.self_attn.q_proj.weight": (2048, 1024),
        f"{prefix}.self_attn.k_proj.weight": (1024, 1024),
        f"{prefix}.self_attn.v_proj.weight": (1024, 1024),
        f"{prefix}.self_attn.o_proj.weight": (1024, 2048),
        f"{prefix}.mlp.gate_proj.weight": (3072, 1024),
        f"{prefix}.mlp.up_proj.weight": (3072, 1024),
        f"{prefix}.mlp.down_proj.weight": (1024, 3072),
    }


def norm_shapes(layer: int) -> dict[str, Shape]:
    prefix = f"model.layers.{layer}"
    return {
        f"{prefix}.self_attn.q_norm.weight": (128,),
        f"{prefix}.self_attn.k_norm.weight": (128,),
        f"{prefix}.input_layernorm.weight": (1024,),
        f"{prefix}.post_attention_layernorm.weight": (1024,),
    }


def qwen3_shapes() -> dict[str, Shape]:
    """All 310 tensors of Qwen3-0.6B: 596M weights."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (151936, 1024)}
    for layer in range(28):
        shapes |= layer_shapes(layer) | norm_shapes(layer)
    return shapes | {"model.norm.weight": (1024,)}


# Three of Qwen3-0.6B's 28 layers and a twelfth of its vocabulary: 60M weights.
QWEN3_PART: dict[str, Shape] = {
    "model.embed_tokens.weight": (12288, 1024),
    **layer_shapes(0),
    **layer_shapes(1),
    **layer_shapes(2),
}


def synthetic(stage: Stage, shapes: Mapping[str, Shape] = QWEN3_PART, seed: int = 0) -> tuple[Bits, Bits]:
    """The bf16 bits of all weights before and after one step."""
    chance = chance_by_exponent(stage)
    old, new = {}, {}
    for index, (name, shape) in enumerate(shapes.items()):
        rng = np.random.default_rng([seed, index])
        old[name] = gaussian_weights(shape, rng)
        new[name] = one_step_later(old[name], chance, rng)
    return old, new


def synthetic_steps(stage: Stage, count: int, shapes: Mapping[str, Shape], seed: int = 0) -> Iterator[Bits]:
    """The bits of all weights at the start and after each of `count` steps."""
    chance = chance_by_exponent(stage)
    sources = {name: np.random.default_rng([seed, index]) for index, name in enumerate(shapes)}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        begin = pool.map(lambda name: initial_weights(shapes[name], sources[name]), shapes)
        bits = dict(zip(shapes, list(begin), strict=True))
        yield bits
        for _ in range(count):
            later = pool.map(lambda name, old: one_step_later(old, chance, sources[name]), bits, bits.values())
            bits = dict(zip(shapes, list(later), strict=True))
            yield bits


def synthetic_dense(shapes: Mapping[str, Shape] = QWEN3_PART, seed: int = 0) -> tuple[Bits, Bits]:
    """The bits before and after one step at 1000 times the learning rate: most weights change."""
    old, new = {}, {}
    for index, (name, shape) in enumerate(shapes.items()):
        rng = np.random.default_rng([seed, index])
        old[name] = gaussian_weights(shape, rng)
        masters = anywhere_in_rounding_interval(old[name].reshape(-1), rng).reshape(shape)
        new[name] = round_to_bf16(masters + np.float32(1000 * UPDATE_SIGMA) * rng.standard_normal(shape, np.float32))
    return old, new


def chance_by_exponent(stage: Stage) -> NDArray[np.float32]:
    """The chance to change for each of the 256 biased exponents."""
    exponents = np.arange(256) - BIAS
    low = -9 - len(CHANCE_FROM_MINUS_9) + 1
    # Per exponent above the measured range the chance to change halves; below it the chance to stay halves.
    chance = np.where(
        exponents > -9,
        CHANCE_FROM_MINUS_9[0] * 2.0 ** np.minimum(-9 - exponents, 0) if stage == "late" else 0.0,
        1 - (1 - CHANCE_FROM_MINUS_9[-1]) * 2.0 ** np.minimum(exponents - low, 0),
    )
    chance[BIAS + low : BIAS - 9 + 1] = CHANCE_FROM_MINUS_9[::-1]
    return chance.astype(np.float32)


def initial_weights(shape: Shape, rng: np.random.Generator) -> NDArray[np.uint16]:
    """Ones for a norm, random values for other tensors."""
    return np.full(shape, ONE, np.uint16) if len(shape) == 1 else gaussian_weights(shape, rng)


def gaussian_weights(shape: Shape, rng: np.random.Generator) -> NDArray[np.uint16]:
    row_scale = SIGMA * np.exp(ROW_SCALE_SIGMA * rng.standard_normal((shape[0], 1), np.float32))
    return round_to_bf16(rng.standard_normal(shape, np.float32) * row_scale)


def one_step_later(
    old: NDArray[np.uint16], chance: NDArray[np.float32], rng: np.random.Generator
) -> NDArray[np.uint16]:
    flat = old.reshape(-1)
    at = np.flatnonzero(rng.random(flat.size, np.float32) < chance[biased_exponent(flat)])
    new = flat.copy()
    new[at] = changed(flat[at], rng)
    return new.reshape(old.shape)


def changed(old: Array, rng: np.random.Generator) -> NDArray[np.uint16]:
    """Moves every weight by an update that changes its bf16 value.

    Updates are drawn until they do. For large exponents that would take long, but the result is always one ulp.
    """
    new: NDArray[np.uint16] = old + rng.choice(np.array([1, 0xFFFF], np.uint16), old.size)
    pending = np.flatnonzero(biased_exponent(old) < BIAS + ONE_ULP_FROM)
    while pending.size:
        masters = anywhere_in_rounding_interval(old[pending], rng)
        updates = np.float32(UPDATE_SIGMA) * rng.standard_normal(pending.size, np.float32)
        new[pending] = round_to_bf16(masters + updates)
        pending = pending[new[pending] == old[pending]]
    return new


def biased_exponent(bits: Array) -> Array:
    return (bits >> 7) & 0xFF


def anywhere_in_rounding_interval(bits: Array, rng: np.random.Generator) -> NDArray[np.float32]:
    """Random masters that round to these bits: less than half a bf16 ulp away, and only upwards from zero."""
    offset = rng.integers(-0x7FFF, 0x8000, bits.size, np.int32)
    offset = np.where(bits & 0x7FFF, offset, np.abs(offset))
    return ((bits.astype(np.uint32) << 16) + offset.view(np.uint32)).view(np.float32)


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds to nearest, ties to even, as torch does. Values must be finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
