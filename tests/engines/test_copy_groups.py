"""The changes of fused tensors are located together, however many tensors there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.crafted_files import with_block
from support.fused_model import Arrays, changed, holding, save, weights_of
from support.packed_model import Packed, everything, packed_arrays, processed, started
from weightwire import diff
from weightwire.delta import BlockJob
from weightwire.delta.absolute import make_absolute
from weightwire.delta.file import Delta
from weightwire.delta.state import digest
from weightwire.engines.box import Box
from weightwire.engines.live_model import LiveModel
from weightwire.errors import CorruptDelta
from weightwire.weights.source import read_weights


def live_model(bits: Arrays, experts: int, directory: Path) -> tuple[Packed, LiveModel]:
    model = Packed(experts)
    live = LiveModel(model, model.load_weights, relaid=started(bits, model))
    live.reload(save(bits, directory), holding(bits, 1))
    return model, live


def test_the_work_to_stage_a_patch_does_not_grow_with_the_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[int, list[str]] = {2: [], 32: []}
    for experts, several in calls.items():
        bits = packed_arrays(experts=experts)
        _, live = live_model(bits, experts, tmp_path / str(experts))
        after = changed(bits, 2, chance=0.5)
        patch = diff(weights_of(bits), weights_of(after), coo=True)
        fetch, locate = patch.fetch, Box.locate

        def count_reads(begin: int, end: int, several: list[str] = several, fetch: Any = fetch) -> Any:
            several.append("read")
            return fetch(begin, end)

        def count_boxes(box: Box, at: Any, several: list[str] = several, locate: Any = locate) -> Any:
            several.append("locate")
            return locate(box, at)

        with monkeypatch.context() as counting:
            counting.setattr(Box, "locate", count_boxes)
            live.stage(replace(patch, fetch=count_reads), holding(after, 2))
    assert calls[2].count("locate") > 0
    assert calls[2] == calls[32]


def test_a_patch_of_some_experts_leaves_the_others_alone(tmp_path: Path) -> None:
    bits = packed_arrays(experts=5)
    model, live = live_model(bits, 5, tmp_path)
    other = changed(bits, 2, chance=0.4)
    after = {name: other[name] if ".experts.1." in name or ".experts.4." in name else bits[name] for name in bits}
    live.stage(diff(weights_of(bits), weights_of(after), coo=True), holding(after, 2)).swap()
    assert everything(model) == processed(after, experts=5)


def test_an_expert_that_a_patch_holds_as_a_whole_is_written_beside_the_others(tmp_path: Path) -> None:
    bits = packed_arrays()
    model, live = live_model(bits, 3, tmp_path)
    after = changed(bits, 2)
    after["0.experts.1.up"] = ~bits["0.experts.1.up"]
    weights = read_weights(weights_of(bits))
    patch = make_absolute(weights, [diff(weights_of(bits), weights_of(after))], digest(weights))
    assert patch.entries["0.experts.1.up"].fresh
    assert patch.entries["0.experts.2.up"].coo
    live.stage(patch, holding(after, 2)).swap()
    assert everything(model) == processed(after)


def test_a_damaged_expert_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    bits = packed_arrays()
    model, live = live_model(bits, 3, tmp_path)
    after = changed(bits, 2, chance=0.5)
    patch = diff(weights_of(bits), weights_of(after), coo=True)
    job = BlockJob(patch.stack_of["1.experts.2.gate"], 0)
    block = bytearray(patch.block(job.stack, 0))
    positions = np.frombuffer(block, "<u4", 2, 8)
    positions[:] = positions[::-1].copy()
    damaged = with_block(patch, job, bytes(block))
    with pytest.raises(CorruptDelta, match=r"'1\.experts\.2\.gate': its positions are not ascending"):
        live.stage(Delta.from_bytes(damaged), holding(after, 2))
    assert everything(model) == processed(bits)
