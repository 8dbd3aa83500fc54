"""A torch module that is patched while it is used."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from support.fused_model import SHAPES, Fused, arrays, changed, contents, holding, loaded, save, tensors_of, weights_of
from weightwire import diff, digest
from weightwire.engines.engine import ServedVersion
from weightwire.engines.torch import TorchEngine
from weightwire.errors import EngineError

RUN = "a" * 32


class Tied(torch.nn.Module):  # type: ignore[misc]
    """Two names for one parameter, and a buffer that is not saved."""

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


def test_a_module_with_the_names_of_its_checkpoint(tmp_path: Path) -> None:
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


def test_whoever_holds_the_lock_sees_one_version(tmp_path: Path) -> None:
    """All weights of a version are the same number: a mixture would show."""
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
    for number in range(2, 40):
        patch = diff(weights_of(version(number - 1)), weights_of(version(number)), coo=True)
        engine.patch(patch, holding(version(number), number))
    stop.set()
    user.join()
    assert all(len(numbers) == 1 for numbers in seen)
    assert len(set.union(*seen)) > 1


def test_a_module_that_was_torn_is_not_served(tmp_path: Path) -> None:
    model, bits = Fused(), arrays()
    engine = TorchEngine(model, load=model.load_weights)
    engine.reload(save(bits, tmp_path / "a"), holding(bits, 1))
    engine._live.torn = True
    with pytest.raises(EngineError, match="a reload failed half way"), engine.serving():
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
        ({"weight": torch.ones(2, 2)}, r"tensor 'weight': is \[1, 3\], and \[2, 2\] in the checkpoint"),
        ({"weight": torch.ones(1, 3), "bias": torch.ones(1)}, "tensor 'bias': the module has none"),
        ({"bias": torch.ones(1)}, "tensor 'bias': the module has none"),
        ({}, "tensor 'weight': the run has none"),
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


def test_a_module_of_another_dtype_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    state = {"weight": torch.ones(1, 3, dtype=torch.bfloat16)}
    engine = TorchEngine(model)
    path = save_state(state, tmp_path / "a")
    for ask in (engine.adopt, engine.reload):
        with pytest.raises(EngineError, match="the loader casts it to float32") as caught:
            ask(path, ServedVersion(RUN, 1, digest(state).hex))
        assert "bfloat16" in str(caught.value.hint)
    assert engine.holding is None


def test_tensors_of_a_checkpoint_that_hold_the_same_bits(tmp_path: Path) -> None:
    """A module starts from just what the replica holds: nothing needs to be loaded."""
    model, bits = Fused(), arrays()
    model.load_weights(tensors_of(bits).items())
    engine = TorchEngine(model, load=model.load_weights)
    assert engine.adopt(save(bits, tmp_path / "a"), holding(bits, 3))
    assert engine.version == 3
