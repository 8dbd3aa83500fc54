"""The loader that SGLang calls in each worker, on a model with loaders like SGLang's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fused_model import Arrays, changed, contents, holding, save, tensors_of, weights_of
from support.sglang_model import SglangModel, loaded_contents, sglang_arrays, with_tied_head
from weightwire import diff
from weightwire.engines.orders import Answer, Order, read_answers
from weightwire.engines.sglang import load

FIRST = sglang_arrays()
SECOND = with_tied_head(changed(FIRST, 2))


class Worker:
    """A worker with a model, and a follower's directory."""

    def __init__(self, root: Path, model: SglangModel, bits: Arrays = FIRST) -> None:
        self.model, self.root = model, root
        self.directory = root / "weightwire-test"
        self.directory.mkdir()
        self._tokens = count()
        model.load_weights(tensors_of(bits).items())

    def order(self, action: str, file: Path | None = None, bits: Arrays = FIRST, version: int = 1) -> Answer:
        token = f"t{next(self._tokens)}"
        target = asdict(holding(bits, version))
        order = Order(action, str(self.directory), token, "" if file is None else str(file), **target)
        data = list(json.dumps(asdict(order)).encode())
        with torch.inference_mode():  # as SGLang's scheduler
            load(self.model, [("weightwire", torch.tensor(data, dtype=torch.uint8))])
        worker = self.model.__dict__["weightwire_worker"]
        if worker._desk._busy is not None:
            worker._desk._busy.join()
        [answer] = read_answers(self.directory, token)
        return answer

    def adopt(self, bits: Arrays = FIRST) -> Answer:
        return self.order("adopt", save(bits, self.root / "first"), bits)

    def stage(self, before: Arrays = FIRST, after: Arrays = SECOND) -> Answer:
        file = self.root / "patch"
        file.write_bytes(b"".join(diff(weights_of(before), weights_of(after), coo=True).chunks()))
        return self.order("stage", file, after, 2)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_patched_model_equals_a_fresh_one(rank: int, ranks: int, tmp_path: Path) -> None:
    worker = Worker(tmp_path, SglangModel(rank, ranks))
    assert worker.order("status") == Answer(None)
    assert worker.adopt() == Answer(holding(FIRST, 1))
    assert worker.stage() == Answer(holding(FIRST, 1))
    assert contents(worker.model) == loaded_contents(FIRST, rank, ranks)
    assert worker.order("swap", None, SECOND, 2) == Answer(holding(SECOND, 2))
    assert contents(worker.model) == loaded_contents(SECOND, rank, ranks)
    assert worker.order("undo", None, SECOND, 2) == Answer(holding(FIRST, 1))
    assert contents(worker.model) == loaded_contents(FIRST, rank, ranks)


def test_model_with_other_weights_is_not_adopted(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SglangModel())
    assert worker.adopt(SECOND) == Answer(None, done=False)
    assert "version in the model is unknown" in worker.stage().problem


def test_changed_weights_fail_the_swap_and_are_restored(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SglangModel())
    worker.adopt()
    worker.stage()
    worker.model.layers[1].norm.weight.data.view(torch.int16)[:] ^= 1
    before = contents(worker.model)
    answer = worker.order("swap", None, SECOND, 2)
    assert "does not have the expected digest" in answer.problem
    assert (answer.holding, answer.mixed) == (holding(FIRST, 1), False)
    assert contents(worker.model) == before


def test_only_the_patch_that_is_staged_is_swapped(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SglangModel())
    worker.adopt()
    assert worker.order("swap", None, SECOND, 2).problem == "no patch to version 2 is staged here"
    worker.stage()
    assert worker.order("swap", None, SECOND, 3).problem == "no patch to version 3 is staged here"
    assert contents(worker.model) == loaded_contents(FIRST)


def test_model_that_is_about_to_be_reloaded_is_a_mixture_until_it_is_compared(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SglangModel())
    worker.adopt()
    assert worker.order("forget", None, SECOND, 2) == Answer(None, mixed=True)
    second = save(SECOND, tmp_path / "second")
    failed = worker.order("reload", second, SECOND, 2)  # SGLang has not loaded it
    assert (failed.holding, failed.mixed) == (None, True)
    assert "differ from the checkpoint after SGLang loaded it" in failed.problem
    worker.model.load_weights(tensors_of(SECOND).items())
    assert worker.order("reload", second, SECOND, 2) == Answer(holding(SECOND, 2))


def test_checkpoint_of_another_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SglangModel())
    larger = sglang_arrays(layers=3)
    answer = worker.order("check", save(larger, tmp_path / "larger"), larger)
    assert "layers.2" in answer.problem
    assert contents(worker.model) == loaded_contents(FIRST)


# --- models that cannot be patched -------------------------------------------------------------------------------


def absorb(model: SglangModel) -> None:
    model.layers[0].w_kc = model.layers[0].qkv_proj.weight.data * 2


def shuffle(model: SglangModel) -> None:
    weight = model.layers[1].experts.w13_weight
    weight.data = weight.data.flip(1).clone()


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (absorb, "layers.0.w_kc: may be computed from weights"),
        (shuffle, "the weights are not kept as they were loaded"),
    ],
)
def test_processed_model_is_reloaded_by_sglang(
    process: Callable[[SglangModel], None], reason: str, tmp_path: Path
) -> None:
    worker = Worker(tmp_path, SglangModel())
    process(worker.model)
    assert not worker.adopt().done
    assert worker.order("forget").mixed
    worker.model.load_weights(tensors_of(FIRST).items())
    process(worker.model)
    assert worker.order("reload", tmp_path / "first") == Answer(holding(FIRST, 1), unpatchable=reason)


def test_quantized_model_is_refused(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SglangModel())
    worker.model.layers[1].o_proj.quant_method = type("Fp8LinearMethod", (), {})()
    assert worker.adopt().problem == "layer 'layers.1.o_proj': is served quantized (Fp8LinearMethod)"


class ThreadedModel(SglangModel):
    """Loads in threads, as SGLang's DeepSeek models."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with ThreadPoolExecutor(2) as pool:
            for one in weights:
                pool.submit(super().load_weights, [one]).result()


def test_loader_with_threads_does_not_write_into_the_model(tmp_path: Path) -> None:
    worker = Worker(tmp_path, ThreadedModel())
    before = contents(worker.model)
    answer = worker.adopt()
    assert "no tensor of the run fills all of it" in answer.problem
    assert contents(worker.model) == before


def test_parameters_that_share_memory_are_tied(tmp_path: Path) -> None:
    model: Any = SglangModel()
    model.lm_head = torch.nn.Module()
    model.lm_head.weight = torch.nn.Parameter(model.embed_tokens.weight.data, requires_grad=False)
    assert Worker(tmp_path, model).adopt() == Answer(holding(FIRST, 1))


def test_loader_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An exception would end SGLang's scheduler."""
    load(SglangModel(), [("weightwire", torch.zeros(3, dtype=torch.uint8))])
    load(SglangModel(), [("model.norm.weight", torch.zeros(3))])
    elsewhere = json.dumps(asdict(Order("status", str(tmp_path), "t"))).encode()
    load(SglangModel(), [("weightwire", torch.tensor(list(elsewhere), dtype=torch.uint8))])
    assert len(caplog.records) == 3
    assert not list(tmp_path.iterdir())
