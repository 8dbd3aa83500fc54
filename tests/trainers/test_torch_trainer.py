"""Plain torch: a model is published after each step of its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from support.failing_bucket import Troubled, in_memory
from support.run_contents import commits_in, version_in
from support.warm_python import warm_context
from weightwire import Follower, digest
from weightwire.errors import CheckpointError, Fenced
from weightwire.publisher.publisher import Publisher
from weightwire.trainers.torch import attach


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 10))


def step(optimizer: Any, model: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 30)).square().mean().backward()
    optimizer.step()


def cast(model: Any) -> Any:
    return digest({name: value.to(torch.bfloat16) for name, value in model.state_dict().items()})


def steps_in(bucket: Troubled) -> list[int]:
    return [commit.step for commit in commits_in(bucket) if commit.step is not None]


@pytest.fixture
def bucket() -> Troubled:
    return in_memory()


class TestAttached:
    def test_attach_publishes_the_initial_weights_and_every_step(self, bucket: Troubled) -> None:
        trained = model()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        with attach(optimizer, trained, bucket) as attached:
            assert attached.last is not None
            attached.last.wait()
            assert version_in(bucket) == cast(trained)
            for _ in range(3):
                step(optimizer, trained)
                attached.last.wait()
                assert version_in(bucket) == cast(trained)
            assert attached.publisher is not None
            assert attached.publisher.version == 4
        assert steps_in(bucket) == [0, 1, 2, 3]

    def test_attach_publishes_every_nth_step_and_the_last(self, bucket: Troubled) -> None:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        with attach(optimizer, trained, bucket, every=3, step=100) as attached:
            for _ in range(8):
                step(optimizer, trained)
                assert attached.last is not None
                attached.last.wait()
        assert steps_in(bucket) == [100, 102, 105, 108]
        assert version_in(bucket) == cast(trained)

    def test_attach_publishes_the_last_step_only_once(self, bucket: Troubled) -> None:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        attached = attach(optimizer, trained, bucket, every=2)
        for _ in range(2):
            step(optimizer, trained)
        attached.close()
        attached.close()
        assert steps_in(bucket)[-1] == 2
        assert len(steps_in(bucket)) <= 2

    def test_close_removes_the_hook_from_the_optimizer(self, bucket: Troubled) -> None:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        with attach(optimizer, trained, bucket):
            step(optimizer, trained)
        published = version_in(bucket)
        step(optimizer, trained)
        assert version_in(bucket) == published != cast(trained)

    def test_a_step_that_evaluates_the_loss_many_times_counts_once(self, bucket: Troubled) -> None:
        trained = model()
        optimizer = torch.optim.LBFGS(trained.parameters(), max_iter=4)
        evaluated = []

        def closure() -> Any:
            evaluated.append(True)
            optimizer.zero_grad()
            loss = (trained(torch.ones(8, 30)) - 1).square().mean()
            loss.backward()
            return loss

        with attach(optimizer, trained, bucket) as attached:
            optimizer.step(closure)
            assert attached.step == 1
            assert len(evaluated) > 1
        assert version_in(bucket) == cast(trained)

    def test_attach_hooks_into_the_optimizer_inside_a_wrapper(self, bucket: Troubled) -> None:
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True)
        trained, optimizer = accelerator.prepare(model(), torch.optim.SGD(model().parameters(), lr=0.1))
        with attach(optimizer, trained, bucket) as attached:
            step(optimizer, trained)
            assert attached.step == 1

    def test_attach_passes_options_to_the_publisher(self, bucket: Troubled) -> None:
        trained = model()
        with attach(torch.optim.SGD(trained.parameters()), trained, bucket, dtype=None, files={"a.json": b"{}"}):
            pass
        assert version_in(bucket) == digest(trained.state_dict())

    def test_a_model_that_cannot_be_published_leaves_no_hook(self, bucket: Troubled) -> None:
        trained = torch.nn.Linear(3, 3, device="meta")
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        with pytest.raises(CheckpointError, match="meta device"):
            attach(optimizer, trained, bucket)
        assert not optimizer._optimizer_step_post_hooks

    def test_attach_refuses_an_interval_below_one(self, bucket: Troubled) -> None:
        with pytest.raises(ValueError, match="every"):
            attach(torch.optim.SGD(model().parameters()), model(), bucket, every=0)

    def test_nothing_more_is_published_when_training_fails(self, bucket: Troubled) -> None:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)

        def fail() -> None:
            with attach(optimizer, trained, bucket, every=2):
                step(optimizer, trained)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert steps_in(bucket) == [0]
        step(optimizer, trained)

    def test_training_fails_when_another_publisher_takes_over(self, bucket: Troubled) -> None:
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        attached = attach(optimizer, trained, bucket, blocking=True)
        with Publisher(bucket) as other:
            other.publish(trained)
        with pytest.raises(Fenced):
            step(optimizer, trained)
        attached.abandon()


class TestResume:
    def train(self, bucket: Troubled, trained: Any, **options: Any) -> None:
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        with attach(optimizer, trained, bucket, **options):
            for _ in range(3):
                step(optimizer, trained)

    def test_a_restart_from_the_initial_weights_is_reported(
        self, bucket: Troubled, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.train(bucket, model())
        assert not caplog.records
        self.train(bucket, model(), blocking=True)  # otherwise later steps may replace the initial weights
        [warning] = [record.getMessage() for record in caplog.records]
        assert "weights (" in warning
        assert "the step decreases from 3 to " in warning
        assert f"weightwire restore {bucket.url} --version " in warning

    def test_restored_weights_are_continued(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        url = tmp_path / "run"
        self.train(url, model())  # type: ignore[arg-type]
        with Follower(url, into=tmp_path / "replica") as follower:
            follower.once()
            held = safetensors.torch.load_file(follower.checkpoint() / "model.safetensors")
        resumed = model()
        resumed.load_state_dict(held)
        self.train(url, resumed, step=3)  # type: ignore[arg-type]
        assert not caplog.records


def test_a_follower_restores_a_compiled_model_in_any_dtype(tmp_path: Path) -> None:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    with attach(optimizer, torch.compile(trained), tmp_path / "run", dtypes={"2.*": "float32"}):
        for _ in range(3):
            step(optimizer, trained)
    with Follower(tmp_path / "run", into=tmp_path / "replica") as follower:
        follower.once()
        held = safetensors.torch.load_file(follower.checkpoint() / "model.safetensors")
    assert held.keys() == trained.state_dict().keys()
    for name, value in trained.state_dict().items():
        assert torch.equal(held[name], value if name.startswith("2.") else value.to(torch.bfloat16))


def _train_in_parallel(rank: int, directory: Path, sharded: bool) -> None:
    """One of two processes that train the same model, or half of its rows each."""
    store = f"file://{directory}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    trained = model()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        trained = fully_shard(trained, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    else:
        trained = torch.nn.parallel.DistributedDataParallel(trained)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    torch.manual_seed(rank)
    with attach(optimizer, trained, directory / "run") as attached:
        for _ in range(2):
            step(optimizer, trained)
    state = {name.removeprefix("module."): value for name, value in trained.state_dict().items()}
    whole = {name: value.full_tensor() if sharded else value for name, value in state.items()}
    torch.save((attached.publisher is not None, whole), directory / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_the_first_process_publishes_with_ddp_and_all_with_fsdp2(tmp_path: Path, sharded: bool) -> None:
    ranks = [warm_context().Process(target=_train_in_parallel, args=(rank, tmp_path, sharded)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(180)
        assert one.exitcode == 0
    (first, _), (second, whole) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert (first, second) == (True, sharded)
    with Follower(tmp_path / "run", into=tmp_path / "replica") as follower:
        follower.once()
        held = safetensors.torch.load_file(follower.checkpoint() / "model.safetensors")
    assert held.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(held[name], value.to(torch.bfloat16))
