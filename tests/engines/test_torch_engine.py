"""A torch module that is patched while it serves."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from support.followers import until
from support.fused_model import SHAPES, Fused, arrays, changed, contents, holding, loaded, save, tensors_of, weights_of
from weightwire import anchor, diff, digest
from weightwire.codec import BLOCK
from weightwire.engines.engine import ServedVersion
from weightwire.engines.torch import TorchEngine
from weightwire.errors import EngineError

RUN = "a" * 32


class Tied(torch.nn.Module):  # type: ignore[misc]
    """A module with two names for one parameter, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("cache", torch.ones(3), persistent=False)


def save_state(state: dict[str, torch.Tensor], directory: Path) -> Path:
    from safetensors.torch import save_file

    directory.mkdir()
    save_file(state, directory / "model.safetensors")
    return directory


def test_a_module_with_the_checkpoints_names_is_patched(tmp_path: Path) -> None:
    model = Tied()
    first = {"embed.weight": torch.randn(8, 4, dtype=torch.bfloat16), "mean": torch.randn(4)}
    second = {"embed.weight": first["embed.weight"] * 2, "mean": first["mean"] + 1}
    engine = TorchEngine(torch.nn.Sequential(model)[0])
    engine.reload(save_state(first, tmp_path / "first"), ServedVersion(RUN, 1, digest(first).hex))
    assert torch.equal(model.head.weight, first["embed.weight"])
    swap = engine.patch(diff(first, second, coo=True), ServedVersion(RUN, 2, digest(second).hex))
    assert torch.equal(model.head.weight, second["embed.weight"])
    assert torch.equal(model.mean, second["mean"])
    assert torch.equal(model.cache, torch.ones(3))
    assert engine.version == 2
    assert swap.paused > 0
    assert model.head.weight is model.embed.weight


def test_wrapper_prefixes_are_ignored(tmp_path: Path) -> None:
    model = torch.compile(torch.nn.Linear(3, 2, bias=False))  # never run, so never compiled
    first = {"weight": torch.randn(2, 3)}
    TorchEngine(model).reload(save_state(first, tmp_path / "a"), ServedVersion(RUN, 1, digest(first).hex))
    assert torch.equal(model.weight, first["weight"])


def test_fused_parameters_are_patched_through_the_modules_own_loader(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    engine = TorchEngine(model, load=model.load_weights)
    engine.reload(save(bits, tmp_path / "a"), holding(bits, 1))
    after = changed(bits, 2)
    engine.patch(diff(weights_of(bits), weights_of(after), coo=True), holding(after, 2))
    assert contents(model) == loaded(after)


def test_serving_never_shows_a_mixture_of_versions(tmp_path: Path) -> None:
    """All weights of a version are the same number, so a mixture would show."""
    names = list(SHAPES)

    def version(number: int) -> dict[str, np.ndarray]:
        return {name: np.full(SHAPES[name], number, np.uint16) for name in names}

    model = Fused()
    engine = TorchEngine(model, load=model.load_weights)
    engine.reload(save(version(1), tmp_path / "a"), holding(version(1), 1))
    seen: list[set[int]] = []
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            with engine.serving() as served:
                parts = (model.embed[:50], model.qk, model.o, model.norm, model.head[:50])
                seen.append({int(number) for part in parts for number in part.view(torch.int16).unique()})
                seen.append({served or 0, *seen[-1]})

    user = threading.Thread(target=use)
    user.start()
    until(lambda: seen)
    for number in range(2, 40):
        patch = diff(weights_of(version(number - 1)), weights_of(version(number)), coo=True)
        engine.patch(patch, holding(version(number), number))
    until(lambda: 39 in seen[-1])
    stop.set()
    user.join()
    assert all(len(numbers) == 1 for numbers in seen)
    assert len(set.union(*seen)) > 1


def test_a_mixed_module_is_not_served(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    engine = TorchEngine(model, load=model.load_weights)
    engine.reload(save(bits, tmp_path / "a"), holding(bits, 1))
    engine._live.mixed = True
    with pytest.raises(EngineError, match="a reload failed halfway"), engine.serving():
        pass
    engine.reload(save(bits, tmp_path / "b"), holding(bits, 2))
    with engine.serving() as version:
        assert version == 2


def test_autograd_notices_that_weights_changed(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    first, second = {"weight": torch.ones(1, 3)}, {"weight": torch.full((1, 3), 2.0)}
    engine = TorchEngine(model)
    engine.reload(save_state(first, tmp_path / "a"), ServedVersion(RUN, 1, digest(first).hex))
    result = (model.weight**2).sum()
    engine.patch(diff(first, second, coo=True), ServedVersion(RUN, 2, digest(second).hex))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": torch.ones(2, 2)}, r"tensor 'weight': has shape \[1, 3\], but \[2, 2\] in the run"),
        ({"weight": torch.ones(1, 3), "bias": torch.ones(1)}, "tensor 'bias': not in the module"),
        ({"bias": torch.ones(1)}, "tensor 'bias': not in the module"),
        ({}, "tensor 'weight': not in the run"),
    ],
)
def test_another_models_checkpoint_is_refused(state: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    engine = TorchEngine(model)
    path = save_state(state, tmp_path / "a")
    with pytest.raises(EngineError, match=message):
        engine.reload(path, ServedVersion(RUN, 1, digest(state).hex))
    assert torch.equal(model.weight, before)
    assert engine.holding is None


def test_a_float32_module_serves_a_bfloat16_run(tmp_path: Path) -> None:
    model = Tied().to(torch.float32)
    bits = torch.randint(-(1 << 15), 1 << 15, (8, 4), dtype=torch.int16)  # includes NaNs of all kinds
    first = {"embed.weight": bits.view(torch.bfloat16), "mean": torch.randn(4)}
    second = {"embed.weight": (bits ^ 0x0101).view(torch.bfloat16), "mean": first["mean"] + 1}
    third = {"embed.weight": (bits ^ (torch.arange(4) == 1)).view(torch.bfloat16), "mean": first["mean"]}
    engine = TorchEngine(model)

    def check(state: dict[str, torch.Tensor], version: int) -> None:
        held = model.head.weight.detach().view(torch.int32)
        assert torch.equal(held, state["embed.weight"].view(torch.int16).to(torch.int32) << 16)
        assert torch.equal(model.mean, state["mean"])
        assert engine.version == version

    engine.reload(path := save_state(first, tmp_path / "first"), ServedVersion(RUN, 1, digest(first).hex))
    check(first, 1)
    engine.patch(diff(first, second, coo=True), ServedVersion(RUN, 2, digest(second).hex))
    check(second, 2)
    engine.patch(diff(second, third, coo=True), ServedVersion(RUN, 3, digest(third).hex))
    check(third, 3)
    assert not engine.adopt(path, ServedVersion(RUN, 1, digest(first).hex))


def test_a_patch_to_a_float32_module_is_undone_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    first = {"weight": torch.ones(1, 3, dtype=torch.bfloat16)}
    second = {"weight": torch.full((1, 3), 2.0, dtype=torch.bfloat16)}
    engine = TorchEngine(model)
    engine.reload(save_state(first, tmp_path / "a"), ServedVersion(RUN, 1, digest(first).hex))

    def fail(write: object) -> None:
        raise EngineError("the check failed")

    monkeypatch.setattr("weightwire.engines.weight_writes._HostWrite.check", fail)
    with pytest.raises(EngineError, match="the check failed"):
        engine.patch(diff(first, second, coo=True), ServedVersion(RUN, 2, digest(second).hex))
    assert torch.equal(model.weight, torch.ones(1, 3))
    assert engine.version == 1


@pytest.mark.parametrize(
    ("dtype", "outside"),
    [(torch.bfloat16, 3.0), (torch.float32, 3.0), (torch.float32, 1 + 2**-20)],  # bfloat16 rounds the last one
)
@pytest.mark.parametrize("columns", [8, 3])  # digests are over words of 8 bytes, or over single weights
@pytest.mark.parametrize("kind", ["few", "all", "anchor"])
def test_weights_changed_from_outside_are_noticed_where_a_patch_touches_them(
    dtype: torch.dtype, outside: float, columns: int, kind: str, tmp_path: Path
) -> None:
    model = torch.nn.Linear(columns, 40, bias=False, dtype=dtype)
    first = {"weight": torch.ones(40, columns, dtype=torch.bfloat16)}
    second = {"weight": first["weight"].clone()}
    second["weight"].view(-1)[: 1 if kind == "few" else None] = 2
    engine = TorchEngine(model)
    path = save_state(first, tmp_path / "a")
    engine.reload(path, ServedVersion(RUN, 1, digest(first).hex))
    patch = anchor(second) if kind == "anchor" else diff(first, second, coo=True)
    target = ServedVersion(RUN, 2, digest(second).hex)
    with torch.no_grad():
        model.weight[0, 0] = outside
    before = model.weight.detach().clone()
    with pytest.raises(EngineError, match="does not have the expected digest") as caught:
        engine.patch(patch, target)
    assert "changed from outside" in str(caught.value.hint)
    assert torch.equal(model.weight, before)
    assert engine.version == 1
    engine.reload(path, ServedVersion(RUN, 1, digest(first).hex))
    engine.patch(patch, target)
    assert torch.equal(model.weight, second["weight"].to(dtype))


def test_a_float32_module_of_several_blocks_is_patched(tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, 1 + 2 * BLOCK // 1024, bias=False)
    first = {"weight": torch.ones(model.weight.shape, dtype=torch.bfloat16)}
    second = {"weight": first["weight"].clone()}
    second["weight"].view(-1)[:: BLOCK // 3] = 2
    engine = TorchEngine(model)
    engine.reload(save_state(first, tmp_path / "a"), ServedVersion(RUN, 1, digest(first).hex))
    engine.patch(diff(first, second, coo=True), ServedVersion(RUN, 2, digest(second).hex))
    assert torch.equal(model.weight, second["weight"].float())


@pytest.mark.parametrize("is_anchor", [False, True])
def test_a_float32_write_that_has_no_effect_is_noticed(
    is_anchor: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(8, 1, bias=False)
    first = {"weight": torch.ones(1, 8, dtype=torch.bfloat16)}
    second = {"weight": torch.full((1, 8), 2.0, dtype=torch.bfloat16)}
    engine = TorchEngine(model)
    engine.reload(save_state(first, tmp_path / "a"), ServedVersion(RUN, 1, digest(first).hex))
    monkeypatch.setattr("weightwire.engines.weight_writes._HostWrite.swap", lambda write: None)
    patch = anchor(second) if is_anchor else diff(first, second, coo=True)
    with pytest.raises(EngineError, match="read-back differs"):
        engine.patch(patch, ServedVersion(RUN, 2, digest(second).hex))


def test_a_fused_float32_module_serves_a_bfloat16_run(tmp_path: Path) -> None:
    model, bits = Fused().to(torch.float32), arrays()
    engine = TorchEngine(model, load=model.load_weights)
    engine.reload(save(bits, tmp_path / "a"), holding(bits, 1))
    after = changed(bits, 2)
    engine.patch(diff(weights_of(bits), weights_of(after), coo=True), holding(after, 2))
    narrow = Fused()
    for half, whole in zip(narrow.parameters(), model.parameters(), strict=True):
        half.data.view(torch.int16).copy_(whole.data.view(torch.int32) >> 16)
    assert contents(narrow) == loaded(after)


def test_a_module_whose_dtype_loses_bits_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float16)
    state = {"weight": torch.ones(1, 3, dtype=torch.bfloat16)}
    engine = TorchEngine(model)
    path = save_state(state, tmp_path / "a")
    for ask in (engine.adopt, engine.reload):
        with pytest.raises(EngineError, match="the loader casts it to float16") as caught:
            ask(path, ServedVersion(RUN, 1, digest(state).hex))
        assert "bfloat16" in str(caught.value.hint)
    assert engine.holding is None


def test_a_module_that_holds_the_checkpoint_is_adopted(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    model.load_weights(tensors_of(bits).items())
    engine = TorchEngine(model, load=model.load_weights)
    assert engine.adopt(save(bits, tmp_path / "a"), holding(bits, 3))
    assert engine.version == 3
