"""What commands on files write with `--json`, one type per command. See `json_output` for the rules of names."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from weightwire.cli.shared.json_output import (
    After,
    Before,
    BytesPerChange,
    Changed,
    JsonOutput,
    Seconds,
    WeightCount,
    WeightsBytes,
)

__all__ = ["DiffOutput", "EncodingOutput", "PatchOutput", "ShowOutput", "TensorOutput"]


class _DeltaOutput(JsonOutput, frozen=True, kw_only=True):
    delta: Annotated[str, Meta(description="path of the delta")]
    before: Before
    after: After
    changed: Changed
    weights: WeightCount
    bytes: Annotated[int, Meta(description="size of the delta")]
    bytes_per_change: BytesPerChange


class DiffOutput(_DeltaOutput, frozen=True, kw_only=True):
    weights_bytes: WeightsBytes
    tensors_changed: Annotated[int, Meta(description="tensors of which some weights changed")]
    tensors_new: Annotated[int, Meta(description="tensors that the old checkpoint does not have, or in another shape")]
    tensors_removed: Annotated[int, Meta(description="tensors that the new checkpoint does not have")]
    seconds: Seconds


class PatchOutput(JsonOutput, frozen=True, kw_only=True):
    base: Annotated[str, Meta(description="path of the checkpoint that was patched")]
    delta: Annotated[str, Meta(description="path of the delta")]
    checkpoint: Annotated[str, Meta(description="path of the result")]
    before: Before
    after: After
    changed: Changed
    weights_bytes: WeightsBytes
    seconds: Seconds


class EncodingOutput(JsonOutput, frozen=True, kw_only=True):
    blocks: Annotated[int, Meta(description="number of blocks")]
    bytes: Annotated[int, Meta(description="their size")]


class TensorOutput(JsonOutput, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="name of the tensor")]
    dtype: Annotated[str, Meta(description="dtype as in safetensors files, such as `BF16`")]
    shape: Annotated[list[int], Meta(description="shape of the whole tensor")]
    rows: Annotated[list[int] | None, Meta(description="first and end row of a shard; null if it is whole")]
    new: Annotated[bool, Meta(description="it holds all weights of the tensor")]
    encodings: Annotated[list[str], Meta(description="the most frequent first")]
    changed: Annotated[int | None, Meta(description="weights that changed; null if `new`")]
    weights: WeightCount
    bytes: Annotated[int | None, Meta(description="encoded size; null if it is in a stack")]
    stack: Annotated[str | None, Meta(description="first tensor of its stack, if it is encoded with others")]
    bits_per_change: Annotated[float | None, Meta(description="8 x `bytes` / `changed`; null if one is 0 or null")]
    digest: Annotated[
        str | None, Meta(description="digest of the covered rows afterwards, in hexadecimal; null if the file has none")
    ]


class ShowOutput(_DeltaOutput, frozen=True, kw_only=True):
    format: Annotated[str, Meta(description="name and version of the file format")]
    kind: Annotated[str, Meta(pattern="^(delta|anchor)$", description="`delta` or `anchor`")]
    header_bytes: Annotated[int, Meta(description="size of the header")]
    encodings: Annotated[dict[str, EncodingOutput], Meta(description="totals by encoding")]
    removed: Annotated[list[str], Meta(description="names of removed tensors")]
    tensors: Annotated[list[TensorOutput], Meta(description="every tensor in the file")]
