"""Weights of a trainer: modules, state dicts and iterators, their names, ties and shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from support.torch_weights import AS_IT_IS, bits_of, model, raw, read, tied_model
from weightwire.errors import CheckpointError
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.source import read_weights
from weightwire.weights.torch_source import Casting, read_live, untie

F32 = DTYPES["F32"]


class TestSources:
    def test_modules_state_dicts_and_iterators_give_the_same_weights(self) -> None:
        expected = {name: bits_of(value) for name, value in model().state_dict().items()}
        for source in (
            model(),
            model().state_dict(),
            model().state_dict().items(),
            iter(model().state_dict().items()),
            [*model().state_dict().items()],
        ):
            assert {name: raw(tensor) for name, tensor in read(source).items()} == expected

    def test_an_iterator_is_read_once_and_its_tensors_are_kept(self) -> None:
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

    def test_extra_state_is_left_out(self) -> None:
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
    def test_other_objects_are_refused(self, source: Any) -> None:
        with pytest.raises(CheckpointError, match="weights cannot be read from"):
            read(source)

    @pytest.mark.parametrize("source", [[torch.ones(2)], ["ab"], [("x", torch.ones(1), 3)]])
    def test_an_iterator_must_yield_names_and_tensors(self, source: Any) -> None:
        with pytest.raises(CheckpointError, match="must yield names and tensors"):
            read(iter(source))

    @pytest.mark.parametrize("name", [3, "__metadata__", "\ud800"])
    def test_names_that_safetensors_cannot_hold_are_refused(self, name: Any) -> None:
        with pytest.raises(CheckpointError, match="is not a valid tensor name"):
            read({name: torch.ones(2)})


class TestNames:
    NAMES = tuple(model().state_dict())

    def test_a_compiled_module_has_the_names_of_the_original(self) -> None:
        compiled = torch.compile(model())  # which compiles nothing until it runs
        assert next(iter(compiled.state_dict())) == "_orig_mod.0.weight"
        assert list(read(compiled)) == [*self.NAMES]
        inside = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2)))
        assert list(read(inside)) == ["0.weight", "0.bias"]

    def test_activation_checkpointing_does_not_change_names(self) -> None:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        module = model()
        module[0] = checkpoint_wrapper(module[0])
        assert any("_checkpoint_wrapped_module" in name for name, _ in module.named_parameters())
        assert list(read(module)) == [*self.NAMES]
        assert set(read(module.named_parameters())) < set(self.NAMES)

    def test_a_ddp_module_has_the_names_of_the_original(self, tmp_path: Path) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            parallel = torch.nn.parallel.DistributedDataParallel(model())
            assert next(iter(parallel.state_dict())) == "module.0.weight"
            assert list(read(parallel)) == [*self.NAMES]
            assert list(read(torch.compile(parallel))) == [*self.NAMES]
        finally:
            torch.distributed.destroy_process_group()

    def test_names_keep_the_prefix_module_if_the_model_uses_it(self) -> None:
        weights = {"module.x": torch.ones(1), "head": torch.ones(1), "deep.module.y": torch.ones(1)}
        assert list(read(weights)) == list(weights)

    def test_names_that_are_equal_without_prefixes_are_refused(self) -> None:
        with pytest.raises(CheckpointError, match="'a': occurs twice"):
            read(iter([("a", torch.ones(1)), ("a", torch.ones(2))]))
        with pytest.raises(CheckpointError, match="'a': occurs twice"):
            read({"a": torch.ones(1), "_orig_mod.a": torch.ones(2)})


class TestTiedWeights:
    def test_tied_weights_are_listed_once(self) -> None:
        weights, aliases = read_live(tied_model(), Casting())
        assert (list(weights), aliases) == (["0.weight"], {"1.weight": "0.weight"})

    def test_tied_weights_have_the_name_that_the_run_knows(self) -> None:
        weights, aliases = read_live(tied_model(), Casting(), {"1.weight": F32})
        assert (list(weights), aliases) == (["1.weight"], {"0.weight": "1.weight"})
        assert weights["1.weight"].dtype == F32

    def test_tied_weights_are_found_in_any_layout(self) -> None:
        value = torch.arange(6.0).reshape(2, 3).T
        assert read_live({"a": value, "b": value.detach()}, Casting())[1] == {"b": "a"}

    def test_different_views_of_the_same_memory_are_not_tied(self) -> None:
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

    def test_empty_tensors_are_not_tied(self) -> None:
        weights, aliases = untie(read({"a": torch.empty(0, 3), "b": torch.empty(0, 3)}))
        assert (list(weights), aliases) == (["a", "b"], {})


class TestTransformers:
    """Models of transformers may hold weights in another layout than their checkpoints."""

    def test_fused_transformers_weights_are_read_as_their_checkpoint(self, tmp_path: Path) -> None:
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

    def test_plain_transformers_weights_are_not_copied(self) -> None:
        from transformers import Qwen3ForCausalLM

        from support.vllm_server import tiny_config

        dense = Qwen3ForCausalLM(tiny_config(tied=True)).to(torch.bfloat16)
        weights, aliases = read_live(dense, Casting())
        assert weights["model.norm.weight"].bits.ctypes.data == dense.model.norm.weight.data_ptr()
        assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}


class TestShards:
    """The rows that one rank of several reads (FSDP2). The other ranks do not run."""

    def rows(self, shape: tuple[int, ...], *placements: Any, mesh: tuple[int, ...] = (3,)) -> Any:
        """The rows of a tensor on this rank."""
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
    def test_a_shard_holds_the_rows_of_its_rank(self, rows: tuple[int, int]) -> None:
        shard = self.rows((7, 4))
        for casting, dtype in [(AS_IT_IS, torch.float32), (Casting(), torch.bfloat16)]:
            tensor = read({"x": torch.nn.Parameter(shard)}, casting, sharded=True)["x"]
            assert (tensor.shape, tensor.rows) == ((7, 4), rows)
            assert raw(tensor) == bits_of(torch.arange(28.0).reshape(7, 4)[slice(*rows)].to(dtype))

    @pytest.mark.parametrize("_ranks", [(2, 3)], indirect=True)
    def test_a_shard_without_rows_is_left_out(self) -> None:
        assert list(read({"few": self.rows((2, 4)), "x": self.rows((9, 2))}, sharded=True)) == ["x"]

    @pytest.mark.parametrize("_ranks", [(4, 6)], indirect=True)
    def test_a_shard_may_be_replicated_on_several_ranks(self) -> None:
        """Sharded over some ranks, replicated over others (HSDP)."""
        from torch.distributed.tensor import Replicate, Shard

        shard = self.rows((6, 4), Replicate(), Shard(0), mesh=(2, 3))
        assert read({"x": shard}, sharded=True)["x"].rows == (2, 4)

    def test_a_replicated_tensor_is_read_whole(self) -> None:
        from torch.distributed.tensor import Replicate

        tensor = read({"x": self.rows((6, 4), Replicate())})["x"]
        assert (tensor.rows, tensor.count) == (None, 24)

    def test_shards_can_be_tied(self) -> None:
        shard = self.rows((6, 4))
        assert read_live({"a": shard, "b": shard}, Casting(), sharded=True)[1] == {"b": "a"}

    def test_column_shards_are_refused(self) -> None:
        from torch.distributed.tensor import Shard

        with pytest.raises(CheckpointError, match="is placed as") as caught:
            read({"x": self.rows((6, 6), Shard(1))}, sharded=True)
        assert "by rows" in str(caught.value.hint)

    def test_shards_are_refused_without_ranks(self) -> None:
        with pytest.raises(CheckpointError, match="is sharded over 3 ranks") as caught:
            read({"x": self.rows((6, 4))})
        assert "Ranks()" in str(caught.value.hint)
