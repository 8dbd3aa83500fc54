"""A running model's weights: a patch is swapped in completely or not at all."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from support.fused_model import Arrays, Fused, arrays, changed, contents, holding, loaded, save, tensors_of, weights_of
from weightwire import diff
from weightwire.delta.file import Delta
from weightwire.engines.live_model import LiveModel, naked_tensors
from weightwire.errors import EngineError, WeightwireError
from weightwire.weights.checkpoint import Checkpoint

RANKS = [(0, 1), (0, 2), (1, 2)]


def runtime_of(model: Fused, bits: Arrays, root: Path) -> LiveModel:
    runtime = LiveModel(model, model.load_weights)
    runtime.reload(save(bits, root / "first"), holding(bits, 1))
    return runtime


def patch_of(before: Arrays, after: Arrays) -> Delta:
    return diff(weights_of(before), weights_of(after), coo=True)


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_patches_give_the_same_bits_as_a_load(rank: int, ranks: int, tmp_path: Path) -> None:
    model, bits = Fused(rank, ranks), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    places = {name: one.data_ptr() for name, one in model.named_parameters()}
    for version in range(2, 8):
        after = changed(bits, version, chance=0.05 * version)
        runtime.stage(patch_of(bits, after), holding(after, version)).swap()
        bits = after
        assert contents(model) == loaded(bits, rank, ranks)
        assert runtime.holding == holding(bits, version)
    assert {name: one.data_ptr() for name, one in model.named_parameters()} == places


def test_staging_a_patch_writes_nothing(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    after = changed(bits, 2)
    runtime.stage(patch_of(bits, after), holding(after, 2))
    assert contents(model) == loaded(bits)
    assert runtime.holding == holding(bits, 1)


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_undo_restores_the_weights_and_the_next_patch_still_fits(rank: int, ranks: int, tmp_path: Path) -> None:
    model, bits = Fused(rank, ranks), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    after = changed(bits, 2)
    staged = runtime.stage(patch_of(bits, after), holding(after, 2))
    staged.swap()
    staged.undo()
    staged.undo()
    assert contents(model) == loaded(bits, rank, ranks)
    assert runtime.holding == holding(bits, 1)
    runtime.stage(patch_of(bits, after), holding(after, 2)).swap()
    assert contents(model) == loaded(after, rank, ranks)


def test_a_patch_may_start_before_the_models_version(tmp_path: Path) -> None:
    """A patch has absolute values, so one from version 1 to 3 also fits version 2."""
    model, first = Fused(), arrays()
    second, third = changed(first, 2), changed(changed(first, 2), 3)
    runtime = runtime_of(model, first, tmp_path)
    runtime.stage(patch_of(first, second), holding(second, 2)).swap()
    runtime.stage(patch_of(first, third), holding(third, 3)).swap()
    assert contents(model) == loaded(third)


def test_a_foreign_write_is_noticed_and_the_patch_undone(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    after = {**bits, "layer.q.weight": bits["layer.q.weight"] ^ np.uint16(1)}
    model.qk.data[3, 4] = 7.5  # a foreign write
    drifted = contents(model)
    staged = runtime.stage(patch_of(bits, after), holding(after, 2))
    with pytest.raises(EngineError, match=r"layer\.q\.weight.*the expected digest") as caught:
        staged.swap()
    assert "reload" in str(caught.value)
    assert contents(model) == drifted


def test_a_patch_cannot_be_swapped_in_twice(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    after = changed(bits, 2)
    staged = runtime.stage(patch_of(bits, after), holding(after, 2))
    staged.swap()
    with pytest.raises(EngineError, match="has changed since this patch was staged"):
        staged.swap()
    assert contents(model) == loaded(after)
    assert runtime.holding == holding(after, 2)


def test_a_patch_staged_before_another_swap_is_refused(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    after, other = changed(bits, 2), changed(bits, 3)
    late = runtime.stage(patch_of(bits, after), holding(after, 2))
    runtime.stage(patch_of(bits, other), holding(other, 3)).swap()
    with pytest.raises(EngineError, match="has changed since this patch was staged"):
        late.swap()
    late.undo()
    assert contents(model) == loaded(other)
    assert runtime.holding == holding(other, 3)


def test_a_failed_write_restores_the_old_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, bits = Fused(), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    after = changed(bits, 2)
    staged = runtime.stage(patch_of(bits, after), holding(after, 2))

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(staged._writes[3], "swap", fail)
    with pytest.raises(MemoryError):
        staged.swap()
    assert contents(model) == loaded(bits)
    assert (runtime.holding, runtime.mixed) == (holding(bits, 1), False)


@pytest.mark.parametrize("when", ["before it is staged", "before it is swapped in"])
def test_moved_parameters_are_noticed(when: str, tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    after = changed(bits, 2)
    staged = runtime.stage(patch_of(bits, after), holding(after, 2))
    model.norm.data = model.norm.data.clone()
    stage = partial(runtime.stage, patch_of(bits, after), holding(after, 2))
    with pytest.raises(EngineError, match="were moved or replaced"):
        (stage if when == "before it is staged" else staged.swap)()
    assert runtime.holding is None
    assert contents(model) == loaded(bits)
    runtime.reload(save(after, tmp_path / "again"), holding(after, 2))
    assert contents(model) == loaded(after)


class TestTiedWeights:
    """A model that keeps two tensors of the checkpoint in one parameter."""

    def tied(self) -> Fused:
        model = Fused()
        model.head = model.embed
        return model

    def test_equal_weights_under_two_names_are_accepted(self, tmp_path: Path) -> None:
        model, bits = self.tied(), arrays()
        bits["head.weight"] = bits["embed.weight"]
        runtime = runtime_of(model, bits, tmp_path)
        for version in range(2, 6):
            after = changed(bits, version)
            after["head.weight"] = after["embed.weight"]
            runtime.stage(patch_of(bits, after), holding(after, version)).swap()
            bits = after
            assert contents(model)["embed"][: bits["embed.weight"].nbytes] == bits["embed.weight"].tobytes()

    def test_tied_weights_that_differ_are_refused_before_the_first_write(self, tmp_path: Path) -> None:
        model, bits = self.tied(), arrays()
        before = contents(model)
        runtime = LiveModel(model, model.load_weights)
        with pytest.raises(EngineError, match=r"'head\.weight': the model does not use it"):
            runtime.reload(save(bits, tmp_path / "a"), holding(bits, 1))
        assert contents(model) == before
        assert not runtime.mixed

    def test_a_patch_that_unties_weights_is_refused(self, tmp_path: Path) -> None:
        model, bits = self.tied(), arrays()
        bits["head.weight"] = bits["embed.weight"]
        runtime = runtime_of(model, bits, tmp_path)
        before, after = contents(model), changed(bits, 2)
        with pytest.raises(EngineError, match=r"'head\.weight': the model does not use it"):
            runtime.stage(patch_of(bits, after), holding(after, 2))
        assert contents(model) == before


def test_a_failed_load_leaves_the_model_mixed(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    after = changed(bits, 2)
    runtime._load = lambda weights: [next(iter(weights)), 1 / 0]
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        runtime.reload(save(after, tmp_path / "b"), holding(after, 2))
    assert (runtime.holding, runtime.mixed) == (None, True)


def test_a_patch_may_hold_a_whole_tensor(tmp_path: Path) -> None:
    """If nearly all of a tensor changed, the patch holds all of it."""
    from weightwire.replica.replica import Replica
    from weightwire.replica.workdir import Position

    bits = arrays()
    after = {**bits, "layer.q.weight": ~bits["layer.q.weight"], "layer.norm.weight": ~bits["layer.norm.weight"]}
    from weightwire.delta.state import digest
    from weightwire.weights.schema import schema_of_weights
    from weightwire.weights.source import read_weights

    start = read_weights(weights_of(bits))
    with Replica.open(tmp_path / "replica") as replica:
        with replica.rebuild(schema_of_weights(start)) as new:
            for name in new:
                new[name].bits[:] = start[name].bits
            new.finish(Position("a" * 32, 1, "b" * 64), digest(start))
        delta = diff(weights_of(bits), weights_of(after))
        patch = replica.advance([delta], Position("a" * 32, 2, "c" * 64), digest(weights_of(after)).hex)
    assert any(entry.fresh for entry in patch.entries.values())
    for rank, ranks in RANKS:
        model = Fused(rank, ranks)
        runtime = runtime_of(model, bits, tmp_path / f"{rank}{ranks}")
        runtime.stage(patch, holding(after, 2)).swap()
        assert contents(model) == loaded(after, rank, ranks)


def test_adopt_compares_every_bit_and_writes_nothing(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    path = save(bits, tmp_path / "a")
    runtime = LiveModel(model, model.load_weights)
    assert not runtime.adopt(path, holding(bits, 1))
    assert runtime.holding is None
    model.load_weights(tensors_of(bits).items())
    assert runtime.adopt(path, holding(bits, 1))
    assert runtime.holding == holding(bits, 1)
    model.norm.data.view(torch.int16)[0] ^= 1
    assert not LiveModel(model, model.load_weights).adopt(path, holding(bits, 1))


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    runtime = LiveModel(model, model.load_weights)
    with pytest.raises(EngineError, match="does not hold version 4"):
        runtime.reload(save(bits, tmp_path / "a"), holding(changed(bits, 1), 4))
    assert runtime.holding is None


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unknown", "the version in the model is unknown"),
        ("run", "the model holds run aaaaaaaaaaaa, not bbbbbbbbbbbb"),
        ("name", "tensor 'other': not in the model"),
        ("shape", r"tensor 'layer\.norm\.weight': is BF16 \[24\], but BF16 \[12, 2\] in the patch"),
        ("elsewhere", "the patch does not lead from version 1 to 9"),
    ],
)
def test_an_unfitting_patch_is_refused_before_the_first_write(case: str, message: str, tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    runtime = runtime_of(model, bits, tmp_path)
    after, target = changed(bits, 2), holding(changed(bits, 2), 2)
    patch = patch_of(bits, after)
    if case == "unknown":
        runtime.holding = None
    elif case == "run":
        target = holding(after, 2, "b" * 32)
    elif case == "name":
        patch = diff({}, {"other": np.zeros(4, np.float16)})
    elif case == "shape":
        patch = diff({}, {"layer.norm.weight": ("BF16", (12, 2), bytes(48))})
    else:
        target = holding(arrays(5), 9)
    with pytest.raises(WeightwireError, match=message):
        runtime.stage(patch, target)
    assert contents(model) == loaded(bits)


def test_naked_tensors_are_torch_views_of_the_checkpoint(tmp_path: Path) -> None:
    bits = arrays()
    given = dict(naked_tensors(Checkpoint(save(bits, tmp_path / "a"))))
    assert all(
        torch.equal(given[name].view(torch.int16), one.view(torch.int16)) for name, one in tensors_of(bits).items()
    )
