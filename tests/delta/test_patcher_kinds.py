"""Patches of buffers, torch tensors and modules, files and huge tensors."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from support.patch_checks import F32, U8, Arrays, bytes_of
from support.samples import base, change
from weightwire import (
    CheckpointError,
    Tensor,
    diff,
    patch,
)
from weightwire.delta.decoder import changes


def test_buffers_are_patched_in_place() -> None:
    memory = bytearray(b"?" + base(F32, 64).tobytes())
    old = {"x": ("F32", (64,), memoryview(memory)[1:])}
    new = {"x": ("F32", (64,), change(base(F32, 64), F32, "half").tobytes())}
    patch(old, diff(old, new))
    assert memory == b"?" + new["x"][2]


def test_a_copy_has_the_type_of_its_source() -> None:
    arrays = {
        "array": np.zeros((2, 3), np.float32),
        "bf16": np.zeros(4, ml_dtypes.bfloat16),
        "buffer": ("F32", (2,), bytes(8)),
        "tensor": Tensor(U8, (3,), np.zeros(3, np.uint8)),
    }
    moved = {
        "array": np.ones((2, 3), np.float32),
        "bf16": np.ones(4, ml_dtypes.bfloat16),
        "buffer": ("F32", (2,), b"\1" * 8),
        "tensor": Tensor(U8, (3,), np.ones(3, np.uint8)),
    }
    result = patch(arrays, diff(arrays, moved), copy=True)
    assert result["array"].dtype == np.float32
    assert result["array"].shape == (2, 3)
    assert result["bf16"].dtype == ml_dtypes.bfloat16
    assert result["buffer"][:2] == ("F32", (2,))
    assert bytes(result["buffer"][2]) == b"\1" * 8
    assert isinstance(result["tensor"], Tensor)


def test_torch_tensors_are_patched_in_place_and_in_a_copy() -> None:
    torch = pytest.importorskip("torch")
    old = {
        "bf16": torch.arange(6400).to(torch.bfloat16).reshape(100, 64),
        "fp8": torch.arange(64).to(torch.float8_e4m3fn),
        "fp32": torch.zeros(3, 4),
        "scalar": torch.tensor(5),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
    }
    new = {name: t.clone() for name, t in old.items()}
    new["bf16"][3, 4] = float("nan")
    new["fp8"][7] = -1.0
    new["fp32"] -= 0.5
    new["scalar"] += 1
    new["bool"] = ~new["bool"]
    new["complex"] *= 2
    delta = diff(old, new)

    result = patch(old, delta, copy=True)
    assert {name: (t.dtype, t.shape) for name, t in result.items()} == {n: (t.dtype, t.shape) for n, t in old.items()}
    assert bytes_of(result) == bytes_of(new)
    pointers = {name: t.data_ptr() for name, t in old.items()}
    patch(old, delta)
    assert bytes_of(old) == bytes_of(new)
    assert {name: t.data_ptr() for name, t in old.items()} == pointers


def test_a_torch_module_with_tied_weights_is_patched_in_place() -> None:
    torch = pytest.importorskip("torch")

    def model() -> Any:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50, bias=False))
        layers[1].weight = layers[0].weight
        return layers

    trained, served = model(), model()
    with torch.no_grad():
        trained[0].weight[3] += 1e-3
    delta = diff(served, trained)
    assert set(delta.entries) == {"0.weight", "1.weight"}
    assert patch(served, delta) is served
    assert bytes_of(served) == bytes_of(trained)


def test_read_only_weights_are_not_changed_in_place() -> None:
    old = {"x": np.zeros(10, np.uint8)}
    delta = diff(old, {"x": np.ones(10, np.uint8)})
    old["x"].flags.writeable = False
    with pytest.raises(CheckpointError, match=r"'x': is read-only") as caught:
        patch(old, delta)
    assert caught.value.hint
    assert (patch(old, delta, copy=True)["x"] == 1).all()


def test_a_delta_may_be_an_object_its_bytes_or_a_path(tmp_path: Path) -> None:
    old, new = {"x": np.zeros(10, np.uint8)}, {"x": np.ones(10, np.uint8)}
    delta = diff(old, new)
    delta.write(tmp_path / "d")
    data = delta.to_bytes()
    ways: list[Any] = [delta, data, bytearray(data), memoryview(data), tmp_path / "d", str(tmp_path / "d")]
    for given in ways:
        assert (patch(old, given, copy=True)["x"] == 1).all()


def test_weights_and_delta_in_the_wrong_order_are_refused() -> None:
    weights = {"x": np.zeros(10, np.uint8)}
    with pytest.raises(CheckpointError, match="a delta cannot be read from dict"):
        patch(diff(weights, weights), weights)  # type: ignore[arg-type]


def test_a_checkpoint_on_disk_is_patched_in_memory(tmp_path: Path) -> None:
    old, new = {"x": np.zeros((10, 8), np.float32)}, {"x": np.ones((10, 8), np.float32)}
    safetensors.numpy.save_file(old, tmp_path / "old.safetensors")
    delta = diff(tmp_path / "old.safetensors", new)
    assert bytes_of(patch(tmp_path / "old.safetensors", delta, copy=True)) == bytes_of(new)
    with pytest.raises(CheckpointError, match="read-only"):
        patch(tmp_path / "old.safetensors", delta)


ROWS = (1 << 20) + 1


AT = [0, 5, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 4096 * ROWS - 1]


TO = [0x38, 0x80, 0x7F, 0x01, 0xFF, 0x40]


@pytest.fixture
def huge() -> tuple[Arrays, Arrays]:
    """Zeros that take no memory: pages without writes share one page."""
    overcommit = Path("/proc/sys/vm/overcommit_memory")
    try:
        if overcommit.exists() and overcommit.read_text().strip() == "2":
            raise MemoryError("vm.overcommit_memory is 2")
        old, new = (np.zeros((ROWS, 4096), np.uint8) for _ in range(2))
    except MemoryError as problem:
        pytest.skip(f"TENSORS BEYOND 2^32 ELEMENTS ARE NOT TESTED: this machine promises no memory ({problem})")
    new.reshape(-1)[AT] = TO
    return {"x": old.view(ml_dtypes.float8_e4m3fn)}, {"x": new.view(ml_dtypes.float8_e4m3fn)}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is measured on Linux")
@pytest.mark.parametrize("coo", [False, True])
def test_positions_beyond_32_bits_are_patched(huge: tuple[Arrays, Arrays], coo: bool) -> None:
    old, new = huge
    before = resident()
    delta = diff(old, new, coo=coo)
    assert delta.changed == 6
    assert delta.nbytes < 3000

    positions, values = changes(old, delta, "x")
    assert positions.tolist() == AT
    assert values.tolist() == TO
    assert changes(old, delta, "x", (1 << 20, ROWS))[0].tolist() == AT[3:]

    assert patch(old, delta)["x"].view(np.uint8).reshape(-1)[AT].tolist() == TO
    assert not old["x"].view(np.uint8)[1:1000].any()
    assert resident() - before < 150_000_000


def test_torch_sees_that_patching_changed_its_tensors() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(4, 4))
    product = (weight * weight).sum()
    base = {"w": weight}
    old = {"w": weight.detach().clone()}
    patch(base, diff(old, {"w": old["w"] * 2}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
