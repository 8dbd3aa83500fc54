"""Hugging Face Trainers: a real Trainer trains a tiny Qwen3 and publishes a complete model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler

from support.failing_bucket import Act, Trouble, Troubled, denied, in_memory
from support.run_contents import commits_in, run_in, version_in
from support.vllm_server import tiny_model
from support.warm_python import warm_context
from weightwire import Follower, Publisher, digest
from weightwire.bucket.registry import open_bucket
from weightwire.errors import Fenced, PermissionDenied
from weightwire.trainers.transformers import WeightwireCallback, model_files


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings."""
    return tiny_model(tmp_path_factory.mktemp("tiny"), tied=True)


@pytest.fixture
def bucket() -> Troubled:
    return in_memory()


class Reporter(TrainerCallback):  # type: ignore[misc]
    """Reports logs as wandb's callback does: it is added before the callbacks of the user."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        self.logged.append(dict(logs))


class FirstVersion(TrainerCallback):  # type: ignore[misc]
    """Waits for the version of the initial weights, which the first steps could otherwise replace."""

    def __init__(self, callback: WeightwireCallback) -> None:
        self._callback = callback

    def on_train_begin(self, *args: Any, **given: Any) -> None:
        assert self._callback.publisher is not None
        self._callback.publisher.wait()


def until_step(reporter: Reporter, step: int) -> Trouble:
    """Holds requests until a step has been logged."""

    async def wait(act: Act) -> Any:
        while len(reporter.logged) < step:
            await asyncio.sleep(0.01)
        return await act()

    return wait


def loaded(checkpoint: Path) -> Any:
    """The model, with float32 masters."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def trainer(model: Any, directory: Path, *callbacks: Any, steps: int = 3, **given: Any) -> Any:
    tokens = torch.randint(3, 250, (16, 12), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=str(directory / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[*callbacks], **given)


def cast(model: Any) -> Any:
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return digest({name: value.to(torch.bfloat16) for name, value in state.items()})


def steps_in(bucket: Troubled) -> list[int]:
    return [commit.step for commit in commits_in(bucket) if commit.step is not None]


def test_a_trainer_publishes_a_complete_model(checkpoint: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    callback = WeightwireCallback(tmp_path / "run", blocking=True)

    trainer(model, tmp_path, callback, processing_class=tokenizer).train()

    with Follower(tmp_path / "run", into=tmp_path / "replica") as follower:
        follower.once()
        current = follower.checkpoint()
        held = safetensors.torch.load_file(current / "model.safetensors")
    assert "lm_head.weight" not in held
    for name, value in held.items():
        assert torch.equal(value, model.state_dict()[name].to(torch.bfloat16))
    # The replica alone is enough to load the model.
    again = AutoModelForCausalLM.from_pretrained(current, dtype="auto")
    assert again.dtype == torch.bfloat16
    assert digest(again.state_dict()) == digest(model.to(torch.bfloat16).state_dict())
    assert AutoTokenizer.from_pretrained(current)("weights")["input_ids"] == tokenizer("weights")["input_ids"]


def test_every_nth_step_and_the_last_are_published(checkpoint: Path, bucket: Troubled, tmp_path: Path) -> None:
    model = loaded(checkpoint)
    trainer(model, tmp_path, WeightwireCallback(bucket, every=2, blocking=True), steps=5).train()
    assert steps_in(bucket) == [0, 2, 4, 5]
    assert version_in(bucket) == cast(model)


def test_log_records_have_sync_metrics(checkpoint: Path, bucket: Troubled, tmp_path: Path) -> None:
    reporter = Reporter()
    trained = trainer(loaded(checkpoint), tmp_path, reporter, WeightwireCallback(bucket, every=2, blocking=True))

    trained.train()

    first, second, third = (one for one in reporter.logged if "loss" in one)
    assert (first["sync/version"], second["sync/version"], third["sync/version"]) == (1, 2, 2)
    assert (first["sync/behind_steps"], second["sync/behind_steps"], third["sync/behind_steps"]) == (1, 0, 1)
    assert "sync/changed" not in first  # an anchor
    assert 0 < second["sync/changed"] <= 1
    assert second["sync/bytes"] == commits_in(bucket)[2].nbytes
    assert first["sync/seconds"] > 0 == third["sync/seconds"]
    assert (third["sync/superseded"], third["sync/failed"]) == (0, 0)
    logged = [one for one in trained.state.log_history if "loss" in one]
    assert [one["sync/version"] for one in logged] == [1, 2, 2]


@pytest.mark.parametrize("best", [False, True], ids=["last weights", "best weights"])
def test_the_last_log_record_has_the_last_version(
    checkpoint: Path, bucket: Troubled, tmp_path: Path, best: bool
) -> None:
    reporter = Reporter()
    bucket.trouble("put", "deltas/", until_step(reporter, 3), times=100)
    trained = trainer(loaded(checkpoint), tmp_path, reporter, WeightwireCallback(bucket, every=2))
    trained.args.load_best_model_at_end = best

    trained.train()

    newest = commits_in(bucket)[-1]
    assert newest.step == 3
    for last in (reporter.logged[-1], trained.state.log_history[-1]):
        assert "train_runtime" in last
        assert (last["sync/version"], last["sync/bytes"], last["sync/behind_steps"]) == (
            newest.version,
            newest.nbytes,
            0,
        )


def test_a_last_publish_that_fails_is_raised_at_the_end(checkpoint: Path, bucket: Troubled, tmp_path: Path) -> None:
    reporter, callback = Reporter(), WeightwireCallback(bucket)
    bucket.trouble("put", "deltas/", denied, times=100)
    with pytest.raises(PermissionDenied):
        trainer(loaded(checkpoint), tmp_path, reporter, callback, FirstVersion(callback), steps=1).train()
    assert reporter.logged[-1]["sync/failed"] == 1


def test_a_restart_from_the_initial_weights_is_reported(
    checkpoint: Path, bucket: Troubled, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert "weightwire restore" not in caplog.text
        trainer(loaded(checkpoint), tmp_path, WeightwireCallback(bucket, blocking=True)).train()
    [warning] = [one.getMessage() for one in caplog.records if one.name == "weightwire" and one.levelname == "WARNING"]
    newest = [commit.version for commit in commits_in(bucket) if commit.epoch == 1][-1]
    assert "the step decreases from 3 to 0" in warning
    assert f"weightwire restore {bucket.url} --version {newest} -o DIR" in warning


def test_a_slow_bucket_does_not_delay_training(checkpoint: Path, bucket: Troubled, tmp_path: Path) -> None:
    model, reporter, callback = loaded(checkpoint), Reporter(), WeightwireCallback(bucket)
    bucket.trouble("put", "deltas/", until_step(reporter, 7), times=100)
    trainer(model, tmp_path, reporter, callback, FirstVersion(callback), steps=8).train()
    assert len(steps_in(bucket)) < 9  # the others were superseded
    assert steps_in(bucket)[-1] == 8
    assert version_in(bucket) == cast(model)
    assert reporter.logged[6]["sync/behind_steps"] > 0
    assert reporter.logged[-1]["sync/failed"] == 0


def test_a_callback_added_later_also_runs_first(checkpoint: Path, bucket: Troubled, tmp_path: Path) -> None:
    reporter = Reporter()
    trained = trainer(loaded(checkpoint), tmp_path, reporter, steps=1)
    trained.add_callback(WeightwireCallback(bucket, blocking=True))
    trained.train()
    assert reporter.logged[0]["sync/version"] == 2


def test_a_second_train_call_continues_the_run(checkpoint: Path, bucket: Troubled, tmp_path: Path) -> None:
    model, callback = loaded(checkpoint), WeightwireCallback(bucket, blocking=True)
    trained = trainer(model, tmp_path, callback, steps=1)
    trained.train()
    trained.train()
    assert [commit.kind for commit in commits_in(bucket)] == ["fence", "anchor", "delta", "fence", "delta", "delta"]
    assert version_in(bucket) == cast(model)
    assert callback.publisher is None


@contextmanager
def closed_after(callback: WeightwireCallback) -> Iterator[WeightwireCallback]:
    """A trainer that fails tells its callbacks nothing: the program ends, or trains again with the callback."""
    yield callback
    if callback.publisher is not None:
        with suppress(Fenced):
            callback.publisher.close()


def test_a_trainer_fails_when_another_publisher_takes_over(checkpoint: Path, bucket: Troubled, tmp_path: Path) -> None:
    class Other(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **given: Any) -> None:
            with Publisher(bucket) as other:
                other.publish(given["model"])

    with closed_after(WeightwireCallback(bucket, blocking=True)) as callback, pytest.raises(Fenced):
        trainer(loaded(checkpoint), tmp_path, callback, Other()).train()


def test_a_peft_model_is_merged_or_published_as_its_adapter(checkpoint: Path, bucket: Troubled, tmp_path: Path) -> None:
    import peft

    made = peft.get_peft_model(loaded(checkpoint), peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    adapter = in_memory()
    trainer(made, tmp_path, WeightwireCallback(adapter)).train()
    weights = peft.get_peft_model_state_dict(made)
    assert version_in(adapter) == digest({name: value.to(torch.bfloat16) for name, value in weights.items()})
    assert [file.name for file in run_in(adapter).files] == ["adapter_config.json"]
    trainer(made, tmp_path, WeightwireCallback(bucket, merge=True)).train()
    config = json.loads(asset(bucket, "config.json"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert version_in(bucket) == cast(made.merge_and_unload())


def asset(bucket: Troubled, name: str) -> bytes:
    """A side file of the run."""
    import asyncio

    [path] = [file.path for file in run_in(bucket).files if file.name == name]
    return asyncio.run(bucket.get(path))


def _train_rows(rank: int, checkpoint: Path, directory: Path) -> None:
    """One of two processes with half of the rows each, as in a Trainer with FSDP2, which needs GPUs."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = loaded(checkpoint)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    args, state, control = TrainingArguments(use_cpu=True), TrainerState(), TrainerControl()
    callback = WeightwireCallback(directory / "run")
    events = CallbackHandler([callback], model, AutoTokenizer.from_pretrained(checkpoint), optimizer, None)
    events.on_train_begin(args, state, control)
    for step in (1, 2):
        tokens = torch.randint(3, 250, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        state.global_step = step
        events.on_step_end(args, state, control)
    events.on_train_end(args, state, control)
    torch.save({name: value.full_tensor() for name, value in model.state_dict().items()}, directory / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_of_a_sharded_model_publish_it(checkpoint: Path, tmp_path: Path) -> None:
    ranks = [warm_context().Process(target=_train_rows, args=(rank, checkpoint, tmp_path)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(180)
        assert one.exitcode == 0
    with Follower(tmp_path / "run", into=tmp_path / "replica") as follower:
        follower.once()
        again = AutoModelForCausalLM.from_pretrained(follower.checkpoint(), dtype="auto")
    whole = torch.load(tmp_path / "1.pt")
    assert digest(again.state_dict()) == digest({name: value.to(torch.bfloat16) for name, value in whole.items()})
    assert {len(commit.files) for commit in commits_in(open_bucket(tmp_path / "run")) if commit.files} == {2}


class TestSideFiles:
    def test_config_has_the_published_dtype_and_architecture(self, checkpoint: Path) -> None:
        model = loaded(checkpoint)
        model.config.architectures = None
        config = json.loads(model_files(model, None, {})["config.json"])
        assert (config["dtype"], config["architectures"]) == ("bfloat16", ["Qwen3ForCausalLM"])
        for dtype, expected in [("float16", "float16"), (torch.float16, "float16"), (None, "float32")]:
            files = model_files(torch.compile(model), None, {"dtype": dtype})
            assert json.loads(files["config.json"])["dtype"] == expected
        files = model_files(model.to(torch.bfloat16), None, {"dtype": "float16"})
        assert json.loads(files["config.json"])["dtype"] == "bfloat16"

    def test_side_files_include_config_and_tokenizer(self, checkpoint: Path) -> None:
        files = model_files(loaded(checkpoint), AutoTokenizer.from_pretrained(checkpoint), {})
        assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
        assert not [name for name in files if name.endswith(".safetensors")]

    def test_modules_without_a_config_have_no_side_files(self) -> None:
        assert model_files(torch.nn.Linear(2, 2), None, {}) == {}

    def test_given_side_files_replace_those_of_the_model(
        self, checkpoint: Path, bucket: Troubled, tmp_path: Path
    ) -> None:
        callback = WeightwireCallback(bucket, files={"config.json": b"{}"})
        trainer(loaded(checkpoint), tmp_path, callback, steps=1).train()
        assert [file.name for file in run_in(bucket).files] == ["config.json"]
        assert asset(bucket, "config.json") == b"{}"

    def test_side_files_come_from_the_base_directory_if_given(
        self, checkpoint: Path, bucket: Troubled, tmp_path: Path
    ) -> None:
        trainer(loaded(checkpoint), tmp_path, WeightwireCallback(bucket, base=checkpoint), steps=1).train()
        assert asset(bucket, "config.json") == (checkpoint / "config.json").read_bytes()
        assert [commit.kind for commit in commits_in(bucket)][:2] == ["fence", "base"]


def test_an_interval_below_one_is_refused(bucket: Troubled) -> None:
    with pytest.raises(ValueError, match="every"):
        WeightwireCallback(bucket, every=0)
