"""Torch weights: a follower gets the trainer's weights in the dtypes of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from support.failing_bucket import Troubled, in_memory
from support.run_contents import run_in, version_in
from support.torch_weights import bits_of, model, state_of, tied_model
from weightwire import Follower, Publisher
from weightwire.errors import SchemaChanged


@pytest.fixture
def bucket() -> Troubled:
    return in_memory()


class TestPublished:
    """Checks the weights that a follower gets."""

    @pytest.mark.parametrize("blocking", [False, True])
    def test_masters_are_published_as_bf16(self, bucket: Troubled, blocking: bool) -> None:
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
            assert publisher.parameters == sum(value.numel() for value in module.state_dict().values())

    @pytest.mark.parametrize("blocking", [False, True])
    def test_tensors_of_several_blocks_and_any_layout_are_published(self, bucket: Troubled, blocking: bool) -> None:
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

    def test_a_capture_is_complete_when_publish_returns(self, bucket: Troubled) -> None:
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
        tied = tied_model()
        with Publisher(bucket, dtypes={"0.*": "float32"}) as publisher:
            publisher.publish(tied)
        assert run_in(bucket).tensors == {"0.weight": ("F32", (5, 4))}
        assert run_in(bucket).aliases == {"1.weight": "0.weight"}
        with Publisher(bucket) as publisher:
            publisher.publish(tied)
        assert version_in(bucket) == state_of({"0.weight": tied[0].weight.float()})

    def test_a_base_decides_the_dtypes(self, bucket: Troubled) -> None:
        module = model()
        base = {name: value.clone() for name, value in module.state_dict().items()}
        with Publisher(bucket, base=base, files={}) as publisher:
            with torch.no_grad():
                module[0].weight[3] += 1
            publisher.publish(module)
        assert version_in(bucket, base=base) == state_of(module.state_dict())

    def test_another_kind_of_tensor_is_refused(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish({"x": torch.ones(3)})
            with pytest.raises(SchemaChanged, match="is I64"):
                publisher.publish({"x": torch.ones(3, dtype=torch.int64)})

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    @pytest.mark.parametrize("blocking", [False, True])
    def test_only_masters_are_cast_to_the_dtype_of_the_run(
        self, bucket: Troubled, dtype: torch.dtype, blocking: bool
    ) -> None:
        weights = {"x": torch.full((3,), 1 / 3), "y": torch.full((3,), 2 / 3)}
        others = {name: value.to(dtype) for name, value in weights.items()}
        refused = rf"2 tensors \('x', 'y'\) are F{torch.finfo(dtype).bits}, but BF16 in the run"
        for _ in range(2):  # in a new run, then in an existing run
            with Publisher(bucket, blocking=blocking) as publisher:
                if publisher.dtypes:
                    with pytest.raises(SchemaChanged, match=refused):
                        publisher.publish(others)
                publisher.publish(weights).wait()
                with pytest.raises(SchemaChanged, match=refused):
                    publisher.publish(others)
        assert version_in(bucket) == state_of({name: value.to(torch.bfloat16) for name, value in weights.items()})

    def test_a_pattern_also_casts_other_floats_in_an_existing_run(self, bucket: Troubled) -> None:
        weights = {"x": torch.full((3,), 1 / 3, dtype=torch.float16)}
        for _ in range(2):
            with Publisher(bucket, dtypes={"x": "bfloat16"}) as publisher:
                publisher.publish(weights).wait()
                publisher.publish(weights).wait()
        assert version_in(bucket) == state_of({"x": weights["x"].to(torch.bfloat16)})

    def test_a_follower_gets_a_checkpoint(self, tmp_path: Path) -> None:
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
