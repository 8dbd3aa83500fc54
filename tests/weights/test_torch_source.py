"""Reading from a trainer: names, ties, dtypes, and tensors that are not simply bits in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from support.published import run_in, version_in
from support.troubled import Troubled, in_memory
from weightwire import DTYPES, Follower, Publisher, digest
from weightwire.errors import CheckpointError, SchemaChanged, WeightwireError
from weightwire.weights.source import read_weights
from weightwire.weights.tensor import Tensor, Weights
from weightwire.weights.torch_source import Casting, read_live, untie
from weightwire.weights.torch_tensor import LiveTensor

BF16, F32 = DTYPES["BF16"], DTYPES["F32"]
AS_IT_IS = Casting(None)


def read(source: Any, casting: Casting = AS_IT_IS, **options: Any) -> Weights:
    return read_live(source, casting, **options)[0]


def one(value: Any, casting: Casting = AS_IT_IS) -> Tensor:
    """What becomes of one tensor called x."""
    return read({"x": value}, casting)["x"]


def raw(tensor: Tensor) -> bytes:
    """All of it, copied in two parts that are not even."""
    out = np.zeros(tensor.count, f"<u{tensor.dtype.unit}")
    cut = tensor.count // 3
    tensor.copy_to(0, cut, out[:cut])
    tensor.copy_to(cut, tensor.count, out[cut:])
    return out.tobytes()


def bits_of(value: Any) -> bytes:
    """Those of a torch tensor, in order."""
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def state_of(weights: dict[str, Any]) -> Any:
    return digest({name: value.detach().contiguous() for name, value in weights.items()})


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 10, bias=False))


def every_float() -> Any:
    """float32 of every exponent and of all kinds: NaNs of many payloads, infinities, denormals, ties."""
    generator = torch.Generator().manual_seed(1)
    some = torch.randint(-(2**31), 2**31 - 1, (1 << 18,), generator=generator, dtype=torch.int64).to(torch.int32)
    special = [0, 1, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF]
    signed = [x - 2**32 if x >= 2**31 else x for y in special for x in (y, y | 1 << 31)]
    return torch.cat([torch.tensor(signed, dtype=torch.int32), some]).view(torch.float32)


@pytest.fixture
def bucket() -> Troubled:
    return in_memory()


class TestMasters:
    def test_are_cast_to_bfloat16(self) -> None:
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
    def test_are_cast_as_torch_casts_them(self, dtype: str) -> None:
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
    def test_are_cast_as_torch_casts_them_however_they_lie(self, value: Any) -> None:
        assert raw(one(value, Casting())) == bits_of(value.to(torch.bfloat16))

    def test_stay_as_they_are_if_one_says_so(self) -> None:
        assert one(torch.ones(3), Casting.of(None, None)).dtype == F32

    def test_may_each_have_a_dtype_by_name(self) -> None:
        casting = Casting.of("bfloat16", {"1.*": "float32", "*.weight": torch.float16})
        names = {name: tensor.dtype.name for name, tensor in read(model(), casting).items()}
        assert (names["0.weight"], names["0.bias"], names["1.weight"]) == ("F16", "BF16", "F32")

    def test_are_float32_and_nothing_else(self) -> None:
        for dtype in (torch.float64, torch.float16, torch.int32, torch.bool, torch.float8_e4m3fn):
            value = torch.ones(3).to(dtype)
            assert raw(one(value, Casting())) == bits_of(value)

    def test_get_the_dtype_that_the_run_has(self) -> None:
        given = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(3), "d": torch.ones(3)}
        run = {"a": DTYPES["F16"], "b": F32, "c": DTYPES["I32"]}
        weights = read(given, Casting.of("bfloat16", {"a": "float64"}), run=run)
        # What cannot be cast is told later, with the run's URL.
        assert [tensor.dtype.name for tensor in weights.values()] == ["F16", "F32", "F32", "BF16"]

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "bf16", 3])
    def test_cannot_be_cast_to_what_is_no_such_float(self, dtype: Any) -> None:
        with pytest.raises(WeightwireError, match=f"cannot be cast to {dtype}") as caught:
            Casting.of(dtype, None)
        assert "bfloat16" in str(caught.value.hint)

    def test_of_numpy_are_not_masters(self) -> None:
        assert one(np.ones(3, np.float32), Casting()).dtype == F32
        both = read({"torch": torch.ones(3), "numpy": np.ones(3, np.float32)}, Casting())
        assert [tensor.dtype.name for tensor in both.values()] == ["BF16", "F32"]


class TestTensors:
    def test_that_are_bits_in_memory_are_not_copied(self) -> None:
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
    def test_of_any_layout(self, value: Any) -> None:
        tensor = one(value)
        assert tensor.shape == tuple(value.shape)
        assert raw(tensor) == bits_of(value)
        assert (tensor.count, tensor.nbytes) == (value.numel(), value.numel() * value.element_size())

    def test_that_are_negated_by_a_flag(self) -> None:
        value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj().imag
        assert value.is_neg()
        assert raw(one(value)) == bits_of(value)
        assert raw(one(value, Casting())) == bits_of(value.to(torch.bfloat16))

    def test_that_are_packed(self) -> None:
        value = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
        assert (one(value).dtype.name, one(value).shape) == ("F4", (3, 8))
        assert raw(one(value)) == bytes(range(12))

    def test_that_nobody_may_change(self) -> None:
        with torch.inference_mode():
            value = torch.arange(6.0).reshape(2, 3)
        assert raw(one(value, Casting())) == bits_of(value.to(torch.bfloat16))
        assert raw(one(value)) == bits_of(value)

    def test_are_read_when_they_are_copied(self) -> None:
        value = torch.zeros(5)
        tensor = one(value, Casting())
        value += 1
        assert raw(tensor) == bits_of(torch.ones(5, dtype=torch.bfloat16))

    def test_of_more_than_a_piece(self) -> None:
        value = torch.arange((1 << 22) + 100, dtype=torch.int32).view(torch.float32)
        assert raw(one(value, Casting())) == bits_of(value.to(torch.bfloat16))
        tall = value[: 1 << 22].reshape(1 << 11, 1 << 11).T
        assert raw(one(tall, Casting())) == bits_of(tall.to(torch.bfloat16))

    def test_can_be_seen_as_bits_all_at_once(self) -> None:
        tensor = one(torch.tensor([1.0, 2.0]), Casting())
        assert tensor.bits.tolist() == [0x3F80, 0x4000]
        assert repr(tensor) == "LiveTensor(BF16 [2] on cpu)"

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (torch.ones(3, device="meta"), "is on the meta device"),
            (torch.ones(3).to_sparse(), "is a torch.sparse_coo tensor"),
            (torch.ones(3, dtype=torch.complex128), "unknown dtype complex128"),
            (None, "is a NoneType"),
            ({"weight": 1}, "is a dict"),
        ],
    )
    def test_that_cannot_be_published(self, value: Any, message: str) -> None:
        with pytest.raises(CheckpointError, match=f"tensor 'x': {message}") as caught:
            read({"other": torch.ones(1), "x": value})
        assert caught.value.hint

    def test_that_hold_more_than_bits(self) -> None:
        """As torchao's and bitsandbytes' quantised weights do."""

        class Quantised(torch.Tensor):  # type: ignore[misc]
            @classmethod
            def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                return NotImplemented

        Params4bit = type("Params4bit", (torch.nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
        for value in (torch.ones(3).as_subclass(Quantised), Params4bit(torch.ones(3))):
            with pytest.raises(CheckpointError, match="which holds more than bits") as caught:
                one(value)
            assert "not quantised" in str(caught.value.hint)

    def test_that_are_not_there_yet(self) -> None:
        with pytest.raises(CheckpointError, match="has no shape yet"):
            read(torch.nn.LazyLinear(3))

    def test_that_deepspeed_has_spread(self) -> None:
        value = torch.nn.Parameter(torch.empty(0))
        value.ds_shape = (3, 4)
        with pytest.raises(CheckpointError, match="by DeepSpeed"):
            one(value)


class TestSources:
    def test_are_modules_state_dicts_and_iterators(self) -> None:
        expected = {name: bits_of(value) for name, value in model().state_dict().items()}
        for source in (
            model(),
            model().state_dict(),
            model().state_dict().items(),
            iter(model().state_dict().items()),
            [*model().state_dict().items()],
        ):
            assert {name: raw(tensor) for name, tensor in read(source).items()} == expected

    def test_an_iterator_is_read_once_and_what_it_yields_is_held(self) -> None:
        def temporaries() -> Iterator[tuple[str, Any]]:
            for index in range(100):
                yield f"w{index}", torch.full((1000,), float(index))

        weights = read(temporaries(), Casting())
        for index in range(100):
            assert raw(weights[f"w{index}"]) == bits_of(torch.full((1000,), float(index), dtype=torch.bfloat16))

    def test_buffers_are_weights_if_they_are_saved(self) -> None:
        module = torch.nn.Module()
        module.register_buffer("kept", torch.ones(2))
        module.register_buffer("lost", torch.ones(2), persistent=False)
        assert list(read(module)) == ["kept"]

    def test_what_modules_keep_beside_their_weights_is_left_out(self) -> None:
        class Counting(torch.nn.Linear):  # type: ignore[misc]
            def get_extra_state(self) -> dict[str, int]:
                return {"steps": 3}

        assert list(read(torch.nn.Sequential(Counting(2, 2)))) == ["0.weight", "0.bias"]

    def test_parametrised_weights_have_the_names_of_a_checkpoint(self) -> None:
        module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 3, bias=False))
        assert list(read(module)) == list(module.state_dict())

    def test_files_and_arrays_are_read_as_before(self, tmp_path: Path) -> None:
        safetensors.torch.save_file({"module.x": torch.ones(3)}, tmp_path / "model.safetensors")
        for source in (tmp_path, read_weights(tmp_path), {"module.x": np.ones(3, np.float32)}):
            assert {name: tensor.dtype for name, tensor in read(source, Casting()).items()} == {"module.x": F32}

    @pytest.mark.parametrize("source", [3, None, np.ones((2, 2)), torch.ones(2, 2)])
    def test_that_are_none(self, source: Any) -> None:
        with pytest.raises(CheckpointError, match="weights cannot be read from a"):
            read(source)

    @pytest.mark.parametrize("source", [[torch.ones(2)], ["ab"], [("x", torch.ones(1), 3)]])
    def test_that_yield_something_else(self, source: Any) -> None:
        with pytest.raises(CheckpointError, match="must yield names and tensors"):
            read(iter(source))

    @pytest.mark.parametrize("name", [3, "__metadata__", "\ud800"])
    def test_names_that_safetensors_cannot_hold(self, name: Any) -> None:
        with pytest.raises(CheckpointError, match="cannot be a tensor's name"):
            read({name: torch.ones(2)})


class TestNames:
    NAMES = tuple(model().state_dict())

    def test_of_a_compiled_module(self) -> None:
        compiled = torch.compile(model())  # which compiles nothing until it runs
        assert next(iter(compiled.state_dict())) == "_orig_mod.0.weight"
        assert list(read(compiled)) == [*self.NAMES]
        inside = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2)))
        assert list(read(inside)) == ["0.weight", "0.bias"]

    def test_of_a_module_that_is_checkpointed(self) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        module = model()
        module[0] = checkpoint_wrapper(module[0])
        assert any("_checkpoint_wrapped_module" in name for name, _ in module.named_parameters())
        assert list(read(module)) == [*self.NAMES]
        assert set(read(module.named_parameters())) < set(self.NAMES)

    def test_of_a_module_in_ddp(self, tmp_path: Path) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            parallel = torch.nn.parallel.DistributedDataParallel(model())
            assert next(iter(parallel.state_dict())) == "module.0.weight"
            assert list(read(parallel)) == [*self.NAMES]
            assert list(read(torch.compile(parallel))) == [*self.NAMES]
        finally:
            torch.distributed.destroy_process_group()

    def test_keep_a_module_that_is_the_models_own(self) -> None:
        weights = {"module.x": torch.ones(1), "head": torch.ones(1), "deep.module.y": torch.ones(1)}
        assert list(read(weights)) == list(weights)

    def test_must_differ(self) -> None:
        with pytest.raises(CheckpointError, match="'a': is there twice"):
            read(iter([("a", torch.ones(1)), ("a", torch.ones(2))]))
        with pytest.raises(CheckpointError, match="'a': is there twice"):
            read({"a": torch.ones(1), "_orig_mod.a": torch.ones(2)})


class TestTies:
    def tied(self) -> Any:
        layers = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
        layers[1].weight = layers[0].weight
        return layers

    def test_are_listed_once(self) -> None:
        weights, aliases = read_live(self.tied(), Casting())
        assert (list(weights), aliases) == (["0.weight"], {"1.weight": "0.weight"})

    def test_have_the_name_that_the_run_knows(self) -> None:
        weights, aliases = read_live(self.tied(), Casting(), {"1.weight": F32})
        assert (list(weights), aliases) == (["1.weight"], {"0.weight": "1.weight"})
        assert weights["1.weight"].dtype == F32

    def test_are_ties_in_whatever_way_they_lie(self) -> None:
        value = torch.arange(6.0).reshape(2, 3).T
        assert read_live({"a": value, "b": value.detach()}, Casting())[1] == {"b": "a"}

    def test_are_not_other_views_of_the_same_memory(self) -> None:
        square = torch.arange(16.0).reshape(4, 4)
        views = {
            "whole": square,
            "turned": square.T,
            "half": square[:2],
            "other": square.view(2, 8),
            "row": square[0].expand(4, 4),
            "ints": square.view(torch.int32),
        }
        for casting in (AS_IT_IS, Casting()):
            assert list(read(views, casting)) == list(views)

    def test_are_not_tensors_without_memory(self) -> None:
        weights, aliases = untie(read({"a": torch.empty(0, 3), "b": torch.empty(0, 3)}))
        assert (list(weights), aliases) == (["a", "b"], {})


class TestTransformers:
    """Models of transformers may hold their weights in another form than their checkpoints."""

    def test_have_the_names_of_a_checkpoint(self, tmp_path: Path) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        fused = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2))
        assert "model.layers.0.mlp.experts.gate_up_proj" in fused.state_dict()
        fused.save_pretrained(tmp_path)
        for source in (fused, torch.compile(fused)):
            weights = read(source)
            assert "model.layers.0.mlp.experts.3.gate_proj.weight" in weights
            saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
            assert {name: raw(tensor) for name, tensor in weights.items()} == {n: bits_of(v) for n, v in saved.items()}

    def test_that_are_saved_as_they_are_are_not_copied(self) -> None:
        from transformers import Qwen3ForCausalLM

        from support.serving import tiny_config

        dense = Qwen3ForCausalLM(tiny_config(tied=True)).to(torch.bfloat16)
        weights, aliases = read_live(dense, Casting())
        assert weights["model.norm.weight"].bits.ctypes.data == dense.model.norm.weight.data_ptr()
        assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}


class TestShards:
    """What one of several ranks reads (FSDP2). The ranks are not there: nothing here needs to hear from them."""

    def rows(self, shape: tuple[int, ...], *placements: Any, mesh: tuple[int, ...] = (3,)) -> Any:
        """This rank's part of a tensor, as torch cuts it."""
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh

        made = init_device_mesh("cpu", mesh)
        placed = placements or (Shard(0),)
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        local = whole
        for dim, one in enumerate(placed):
            if isinstance(one, Shard):
                parts = torch.chunk(local, mesh[dim], one.dim)
                here = made.get_local_rank(dim)
                local = parts[here] if here < len(parts) else local[:0]
        return DTensor.from_local(local, made, placed, run_check=False, shape=whole.shape, stride=whole.stride())

    @pytest.fixture(autouse=True)
    def _ranks(self, request: pytest.FixtureRequest) -> Iterator[None]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, size = getattr(request, "param", (0, 3))
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield
        torch.distributed.destroy_process_group()

    @pytest.mark.parametrize(
        ("_ranks", "rows"), [((0, 3), (0, 3)), ((1, 3), (3, 6)), ((2, 3), (6, 7))], indirect=["_ranks"]
    )
    def test_are_the_rows_that_are_here(self, rows: tuple[int, int]) -> None:
        shard = self.rows((7, 4))
        for casting, dtype in [(AS_IT_IS, torch.float32), (Casting(), torch.bfloat16)]:
            tensor = read({"x": torch.nn.Parameter(shard)}, casting, sharded=True)["x"]
            assert (tensor.shape, tensor.rows) == ((7, 4), rows)
            assert raw(tensor) == bits_of(torch.arange(28.0).reshape(7, 4)[slice(*rows)].to(dtype))

    @pytest.mark.parametrize("_ranks", [(2, 3)], indirect=True)
    def test_may_be_none_at_all(self) -> None:
        assert list(read({"few": self.rows((2, 4)), "x": self.rows((9, 2))}, sharded=True)) == ["x"]

    @pytest.mark.parametrize("_ranks", [(4, 6)], indirect=True)
    def test_may_be_held_by_several_ranks(self) -> None:
        """Rows over some of them, the same for others (HSDP)."""
        from torch.distributed.tensor import Replicate, Shard

        shard = self.rows((6, 4), Replicate(), Shard(0), mesh=(2, 3))
        assert read({"x": shard}, sharded=True)["x"].rows == (2, 4)

    def test_that_are_the_whole_are_no_shards(self) -> None:
        from torch.distributed.tensor import Replicate

        tensor = read({"x": self.rows((6, 4), Replicate())})["x"]
        assert (tensor.rows, tensor.count) == (None, 24)

    def test_are_tied_like_any_other(self) -> None:
        shard = self.rows((6, 4))
        assert read_live({"a": shard, "b": shard}, Casting(), sharded=True)[1] == {"b": "a"}

    def test_of_columns_are_refused(self) -> None:
        from torch.distributed.tensor import Shard

        with pytest.raises(CheckpointError, match="is placed as") as caught:
            read({"x": self.rows((6, 6), Shard(1))}, sharded=True)
        assert "by rows" in str(caught.value.hint)

    def test_need_ranks_that_publish_them(self) -> None:
        with pytest.raises(CheckpointError, match="is sharded over 3 ranks") as caught:
            read({"x": self.rows((6, 4))})
        assert "Ranks()" in str(caught.value.hint)


class TestPublished:
    """What a follower holds in the end."""

    @pytest.mark.parametrize("blocking", [False, True])
    def test_masters(self, bucket: Troubled, blocking: bool) -> None:
        module = model()
        with Publisher(bucket, blocking=blocking) as publisher:
            for step in range(3):
                publisher.publish(module, step=step).wait()
                expected = {
                    name: value.to(torch.bfloat16) if value.is_floating_point() else value
                    for name, value in module.state_dict().items()
                }
                assert version_in(bucket) == state_of(expected)
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter += 0.01 * torch.randn_like(parameter)
            assert publisher.weights == sum(value.numel() for value in module.state_dict().values())

    @pytest.mark.parametrize("blocking", [False, True])
    def test_tensors_of_several_blocks_and_any_layout(self, bucket: Troubled, blocking: bool) -> None:
        weights = {
            "long": torch.randn((1 << 22) + 5),
            "turned": torch.randn(1100, 2000, dtype=torch.bfloat16).T,
            "columns": torch.randn(300, 70)[:, 3:],
            "scalar": torch.tensor(2.5),
        }
        with Publisher(bucket, blocking=blocking) as publisher:
            for _ in range(2):
                publisher.publish(iter(weights.items())).wait()
                assert version_in(bucket) == state_of({n: value.to(torch.bfloat16) for n, value in weights.items()})
                weights["turned"][7, 9] += 1
                weights["long"][1 << 22 :] *= 2

    def test_a_capture_is_whole_when_publish_returns(self, bucket: Troubled) -> None:
        weights = {"x": torch.zeros(1 << 20)}
        with Publisher(bucket) as publisher:
            publisher.publish(weights).wait()
            for step in range(5):
                weights["x"].fill_(step + 1)
                published = publisher.publish(weights)
                weights["x"].fill_(-1)
                published.wait()
                assert version_in(bucket) == state_of({"x": torch.full((1 << 20,), step + 1, dtype=torch.bfloat16)})

    def test_a_restart_keeps_dtypes_and_names(self, bucket: Troubled) -> None:
        tied = TestTies().tied()
        with Publisher(bucket, dtypes={"0.*": "float32"}) as publisher:
            publisher.publish(tied)
        assert run_in(bucket).tensors == {"0.weight": ("F32", (5, 4))}
        assert run_in(bucket).aliases == {"1.weight": "0.weight"}
        with Publisher(bucket) as publisher:
            publisher.publish(tied)
            publisher.publish(tied.to(torch.bfloat16))  # whatever the trainer does
        assert version_in(bucket) == state_of({"0.weight": tied[0].weight.float()})

    def test_a_base_decides_too(self, bucket: Troubled) -> None:
        module = model()
        base = {name: value.clone() for name, value in module.state_dict().items()}
        with Publisher(bucket, base=base, files={}) as publisher:
            with torch.no_grad():
                module[0].weight[3] += 1
            publisher.publish(module)
        assert version_in(bucket, base=base) == state_of(module.state_dict())

    def test_another_kind_of_tensor_is_told(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish({"x": torch.ones(3)})
            with pytest.raises(SchemaChanged, match="is I64"):
                publisher.publish({"x": torch.ones(3, dtype=torch.int64)})

    def test_a_follower_gets_them_as_a_checkpoint(self, tmp_path: Path) -> None:
        module = torch.compile(model())
        with Publisher(tmp_path / "run", dtypes={"1.*": "float32"}) as publisher:
            publisher.publish(module)
        with Follower(tmp_path / "run", into=tmp_path / "replica") as follower:
            follower.once()
            held = safetensors.torch.load_file(follower.checkpoint() / "model.safetensors")
        for name, value in model().state_dict().items():
            expected = value.to(torch.bfloat16) if value.is_floating_point() and name[0] != "1" else value
            assert held[name].dtype == expected.dtype
            assert bits_of(held[name]) == bits_of(expected)
