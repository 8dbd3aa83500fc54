"""Torch tensors: casts in any layout, and tensors that cannot be read as bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from support.torch_weights import bits_of, every_float, model, one, raw, read
from weightwire.errors import CheckpointError, WeightwireError
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.torch_source import Casting
from weightwire.weights.torch_tensor import LiveTensor

F32 = DTYPES["F32"]


class TestMasterWeights:
    def test_master_weights_are_cast_to_bfloat16(self) -> None:
        weights = read(model(), Casting())
        assert {name: tensor.dtype.name for name, tensor in weights.items()} == {
            "0.weight": "BF16",
            "0.bias": "BF16",
            "1.weight": "BF16",
            "1.bias": "BF16",
            "1.running_mean": "BF16",
            "1.running_var": "BF16",
            "1.num_batches_tracked": "I64",
            "2.weight": "BF16",
        }
        assert raw(weights["0.weight"]) == bits_of(model()[0].weight.to(torch.bfloat16))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float32"])
    def test_master_weights_are_cast_as_torch_casts_them(self, dtype: str) -> None:
        masters = every_float()
        assert raw(one(masters, Casting.of(dtype, None))) == bits_of(masters.to(getattr(torch, dtype)))

    @pytest.mark.parametrize(
        "value",
        [
            every_float()[::3],
            every_float()[: 1 << 18].reshape(512, 512).T,
            every_float()[: 1 << 18].reshape(64, 64, 64).permute(1, 2, 0),
            every_float()[: 1 << 18].reshape(512, 512)[:, ::2],
            every_float()[3],
        ],
        ids=["strided", "transposed", "permuted", "columns", "scalar"],
    )
    def test_master_weights_of_any_layout_are_cast_as_torch_casts_them(self, value: Any) -> None:
        assert raw(one(value, Casting())) == bits_of(value.to(torch.bfloat16))

    def test_master_weights_stay_float32_if_dtype_is_none(self) -> None:
        assert one(torch.ones(3), Casting.of(None, None)).dtype == F32

    def test_master_weights_may_have_a_dtype_for_each_name(self) -> None:
        casting = Casting.of("bfloat16", {"1.*": "float32", "*.weight": torch.float16})
        names = {name: tensor.dtype.name for name, tensor in read(model(), casting).items()}
        assert (names["0.weight"], names["0.bias"], names["1.weight"]) == ("F16", "BF16", "F32")

    def test_only_float32_tensors_are_master_weights(self) -> None:
        for dtype in (torch.float64, torch.float16, torch.int32, torch.bool, torch.float8_e4m3fn):
            value = torch.ones(3).to(dtype)
            assert raw(one(value, Casting())) == bits_of(value)

    def test_master_weights_get_the_dtype_of_the_run(self) -> None:
        given = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(3), "d": torch.ones(3)}
        run = {"a": DTYPES["F16"], "b": F32, "c": DTYPES["I32"]}
        weights = read(given, Casting.of("bfloat16", {"a": "float64"}), run=run)
        # Only float32 is cast. "b" and "c" are refused later, with the URL of the run.
        assert [tensor.dtype.name for tensor in weights.values()] == ["F16", "BF16", "F32", "BF16"]

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "bf16", 3])
    def test_master_weights_cannot_be_cast_to_quantized_or_integer_dtypes(self, dtype: Any) -> None:
        with pytest.raises(WeightwireError, match=f"cannot be cast to {dtype}") as caught:
            Casting.of(dtype, None)
        assert "bfloat16" in str(caught.value.hint)

    def test_numpy_arrays_are_not_master_weights(self) -> None:
        assert one(np.ones(3, np.float32), Casting()).dtype == F32
        both = read({"torch": torch.ones(3), "numpy": np.ones(3, np.float32)}, Casting())
        assert [tensor.dtype.name for tensor in both.values()] == ["BF16", "F32"]


class TestTensors:
    def test_contiguous_tensors_are_not_copied(self) -> None:
        value = torch.ones(4, 3, dtype=torch.bfloat16)
        tensor = one(torch.nn.Parameter(value), Casting())
        assert not isinstance(tensor, LiveTensor)
        assert tensor.bits.ctypes.data == value.data_ptr()

    @pytest.mark.parametrize(
        "value",
        [
            torch.arange(12.0).reshape(3, 4).T,
            torch.arange(12.0)[::2],
            torch.arange(3.0).expand(4, 3),
            torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
            torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
            torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
            torch.tensor(1 + 2j, dtype=torch.complex64).conj(),
            torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float8_e5m2).T,
            torch.tensor([True, False, True])[::2],
            torch.tensor(1.5),
            torch.empty(0, 3),
            torch.empty(3, 0).T,
        ],
        ids=lambda value: f"{value.dtype}-{list(value.shape)}-{value.stride()}",
    )
    def test_tensors_of_any_layout_are_copied_in_order(self, value: Any) -> None:
        tensor = one(value)
        assert tensor.shape == tuple(value.shape)
        assert raw(tensor) == bits_of(value)
        assert (tensor.count, tensor.nbytes) == (value.numel(), value.numel() * value.element_size())

    def test_tensors_with_the_negative_flag_are_copied_negated(self) -> None:
        value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj().imag
        assert value.is_neg()
        assert raw(one(value)) == bits_of(value)
        assert raw(one(value, Casting())) == bits_of(value.to(torch.bfloat16))

    def test_packed_tensors_keep_their_bytes(self) -> None:
        value = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
        assert (one(value).dtype.name, one(value).shape) == ("F4", (3, 8))
        assert raw(one(value)) == bytes(range(12))

    def test_inference_tensors_are_read(self) -> None:
        with torch.inference_mode():
            value = torch.arange(6.0).reshape(2, 3)
        assert raw(one(value, Casting())) == bits_of(value.to(torch.bfloat16))
        assert raw(one(value)) == bits_of(value)

    def test_live_tensors_are_read_when_they_are_copied(self) -> None:
        value = torch.zeros(5)
        tensor = one(value, Casting())
        value += 1
        assert raw(tensor) == bits_of(torch.ones(5, dtype=torch.bfloat16))

    def test_tensors_larger_than_one_piece_are_copied_whole(self) -> None:
        value = torch.arange((1 << 22) + 100, dtype=torch.int32).view(torch.float32)
        assert raw(one(value, Casting())) == bits_of(value.to(torch.bfloat16))
        tall = value[: 1 << 22].reshape(1 << 11, 1 << 11).T
        assert raw(one(tall, Casting())) == bits_of(tall.to(torch.bfloat16))

    def test_bits_of_a_live_tensor_are_those_of_the_cast(self) -> None:
        tensor = one(torch.tensor([1.0, 2.0]), Casting())
        assert tensor.bits.tolist() == [0x3F80, 0x4000]
        assert repr(tensor) == "LiveTensor(BF16 [2] on cpu)"

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (torch.ones(3, device="meta"), "is on the meta device"),
            (torch.ones(3).to_sparse(), "has layout torch.sparse_coo"),
            (torch.ones(3, dtype=torch.complex128), "unknown dtype complex128"),
            (None, "has type NoneType"),
            ({"weight": 1}, "has type dict"),
        ],
    )
    def test_tensors_without_plain_memory_are_refused(self, value: Any, message: str) -> None:
        with pytest.raises(CheckpointError, match=f"tensor 'x': {message}") as caught:
            read({"other": torch.ones(1), "x": value})
        assert caught.value.hint

    def test_quantized_subclasses_are_refused(self) -> None:
        """Such as the quantized weights of torchao and bitsandbytes."""

        class Quantised(torch.Tensor):  # type: ignore[misc]
            @classmethod
            def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                return NotImplemented

        Params4bit = type("Params4bit", (torch.nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
        for value in (torch.ones(3).as_subclass(Quantised), Params4bit(torch.ones(3))):
            with pytest.raises(CheckpointError, match="which is not plain bits") as caught:
                one(value)
            assert "not quantized" in str(caught.value.hint)

    def test_lazy_modules_are_refused(self) -> None:
        with pytest.raises(CheckpointError, match="has no shape yet"):
            read(torch.nn.LazyLinear(3))

    def test_tensors_partitioned_by_deepspeed_are_refused(self) -> None:
        value = torch.nn.Parameter(torch.empty(0))
        value.ds_shape = (3, 4)
        with pytest.raises(CheckpointError, match="by DeepSpeed"):
            one(value)
