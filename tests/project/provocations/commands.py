"""Errors of commands, of the demo, of the built-in server and of everything that listens."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import weightwire
from project.provocations.case import OTHER, WEIGHTS, Case, Provocation, publish
from project.provocations.runs import command
from support.adapters import adapted_layer
from support.command_files import save
from support.stores import NOWHERE
from support.vllm_server import tiny_config
from weightwire.cli import serve
from weightwire.cli.demo import demo_command
from weightwire.cli.page import _export
from weightwire.cli.publish.checkpoint_candidate import CheckpointCandidate
from weightwire.cli.serve import RunKind, check_kind
from weightwire.cli.shared.bucket_command import check_installed
from weightwire.demo import programs
from weightwire.demo.processes import Processes
from weightwire.demo.proof import prove
from weightwire.demo.scenario import _make_room
from weightwire.engines.engine import Swap
from weightwire.engines.registry import EngineKind, Program
from weightwire.engines.torch import TorchEngine
from weightwire.page import PageServer, document
from weightwire.page.run_view import RunView
from weightwire.server.batcher import Batcher, FairLock
from weightwire.server.generation import Generation
from weightwire.server.model_loader import load_model
from weightwire.server.sequence import Task
from weightwire.system import durable_files
from weightwire.system.access import Access, read_token
from weightwire.system.http_server import parse_address


def _failing(problem: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise problem

    return fail


# --- files -------------------------------------------------------------------------------------------------------


def two_checkpoints(case: Case) -> tuple[Path, Path]:
    return save(case.here / "old.safetensors", WEIGHTS), save(case.here / "new.safetensors", OTHER)


def diff_over_its_input(case: Case) -> None:
    old, new = two_checkpoints(case)
    command("diff", old, new, "-o", new)


def patch_over_the_delta(case: Case) -> None:
    old, new = two_checkpoints(case)
    command("diff", old, new, "-o", case.here / "delta.safetensors")
    command("patch", old, case.here / "delta.safetensors", "-o", case.here / "delta.safetensors")


def out_of_memory(case: Case) -> None:
    case.patch.setattr(weightwire, "diff", _failing(MemoryError()))
    command("diff", *two_checkpoints(case), "-o", case.here / "delta.safetensors")


def unwritable_page(case: Case) -> None:
    case.patch.setattr(durable_files, "write_file", _failing(OSError(errno.ENOSPC, "No space left on device")))
    _export(str(publish(case)), case.here / "page.html")


def unwritable_page_of_the_demo(case: Case) -> None:
    case.patch.setattr(demo_command, "exported", lambda data: b"")
    demo_command._write_page(RunView("s3://bucket/run", 0.0), case.here / "missing/page.html")


def page_over_other_files(case: Case) -> None:
    command("page", publish(case), "--export", case.file("notes.html", "mine"))


def checkpoint_that_is_written_to(case: Case) -> None:
    old, _ = two_checkpoints(case)
    candidate = CheckpointCandidate(old, None, 1)
    os.utime(old, (1, 1))
    candidate.check_whole()


# --- engines of commands -----------------------------------------------------------------------------------------


class Unwilling:
    """An engine that ignores the weights that it is given."""

    can_patch, holding, name = False, None, "http://127.0.0.1:8000"

    def attach(self, run: str = "") -> None:
        return None

    def adopt(self, checkpoint: Path, target: Any) -> bool:
        return False

    def reload(self, checkpoint: Path, target: Any) -> Swap:
        return Swap(0.0, 0.0)

    def close(self) -> None:
        pass


def engine_that_takes_no_weights(case: Case) -> None:
    case.patch.setattr("weightwire.cli.shared.engine_updates.open_engine", lambda text, cache: Unwilling())
    run = publish(case)
    command("follow", run, "--into", case.here / "replica", "--once", "--engine", "other=http://127.0.0.1:8000")


# --- the demo ----------------------------------------------------------------------------------------------------


def process(code: str, work: Callable[[Processes], Any] = Processes.check, stop: int = 0) -> Provocation:
    """A process of the demo runs this code."""

    def provoke(case: Case) -> None:
        with closing(Processes(case.here)) as processes:
            one = processes.start("trainer", [sys.executable, "-c", code])
            if stop:
                os.kill(one.pid, stop)
            while not one.ended and work is Processes.check:
                time.sleep(0.01)
            work(processes)

    return provoke


def process_that_cannot_start(case: Case) -> None:
    Processes(case.here / "missing").start("trainer", [sys.executable])


def process_that_starts_slowly(processes: Processes) -> None:
    processes.wait(lambda: False, "the start of the trainer", 0)


def missing_example(case: Case) -> None:
    case.patch.setattr(programs, "__file__", str(case.here / "weightwire/demo/programs.py"))
    programs.find_example()


def engine_without_a_launcher(case: Case) -> None:
    kind = EngineKind(connect=lambda url: Unwilling())  # type: ignore[arg-type,return-value]
    case.patch.setattr(programs, "find_engine", lambda name: kind)
    programs.needed_modules("other")


def proof(same: bool) -> Provocation:
    """Compares the bits of a trainer and a replica."""

    def provoke(case: Case) -> None:
        (case.here / "trained").mkdir()
        (case.here / "replica/current").mkdir(parents=True)
        save(case.here / "trained/model.safetensors", WEIGHTS)
        save(case.here / "replica/current/model.safetensors", WEIGHTS if same else OTHER)
        replica = programs.ReplicaProgram("replica-1", NOWHERE, case.here / "replica", Program([]))
        prove([replica], case.here / "trained")

    return provoke


def small_disk(case: Case) -> None:
    case.patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 100 << 20))
    _make_room(case.here / "demo")


def demo_into_a_file(case: Case) -> None:
    _make_room(case.file("demo", "mine"))


# --- the server --------------------------------------------------------------------------------------------------


@cache
def tiny() -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM(tiny_config()).to(torch.bfloat16).requires_grad_(False).eval()


def generation(work: Callable[[Batcher], Any]) -> Provocation:
    def provoke(case: Case) -> None:
        engine = TorchEngine(tiny(), lock=FairLock())
        with closing(Batcher(Generation(tiny(), engine.serving, ends=(), decode=str))) as batcher:
            work(batcher)

    return provoke


def task(token: int = 3, most: int = 1) -> Task:
    return Task((token,), most)


def closed_batcher(batcher: Batcher) -> None:
    batcher.close()
    batcher.submit([task()])


def request_cut_off_by_close(batcher: Batcher) -> None:
    future = batcher.submit([task(most=400)])
    batcher.close()
    future.result(10)


def unknown_token(batcher: Batcher) -> None:
    batcher.submit([task(token=100_000)]).result(10)


def full_queue(case: Case) -> None:
    case.patch.setattr("weightwire.server.batcher._MOST_WAITING", 0)
    generation(lambda batcher: batcher.submit([task()]))(case)


def model(spoil: Callable[[Path], Any]) -> Provocation:
    """Loads a checkpoint that was spoilt."""

    def provoke(case: Case) -> None:
        tiny().save_pretrained(case.here / "model")
        spoil(case.here / "model")
        load_model(case.here / "model")

    return provoke


def _edit(path: Path, **tensors: Any) -> None:
    held = safetensors.torch.load_file(path / "model.safetensors") | tensors
    kept = {name: value for name, value in held.items() if value is not None}
    safetensors.torch.save_file(kept, path / "model.safetensors", {"format": "pt"})


def model_that_cannot_generate(case: Case) -> None:
    from support.vllm_server import tiny_model

    case.patch.setattr(Generation, "advance", _failing(NotImplementedError("a cache of this kind cannot be cut")))
    load_model(tiny_model(case.here / "model"))


def adapter_of_another_model(case: Case) -> None:
    from support.vllm_server import tiny_model

    load_model(tiny_model(case.here / "model"), adapter=b'{"peft_type": "LORA", "target_modules": ["other"]}')


def adapter_without_config(case: Case) -> None:
    path = save(case.here / "adapter_model.safetensors", {"base_model.model.a.lora_A.weight": np.zeros(2, np.float32)})
    check_kind(str(publish(case, path)), RunKind())


def adapter_without_peft(case: Case) -> None:
    case.patch.setattr(serve, "find_spec", lambda name: None)
    check_kind(str(publish(case, adapted_layer())), RunKind())


# --- addresses ---------------------------------------------------------------------------------------------------


def taken_port(case: Case) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        PageServer(str(publish(case)), host="127.0.0.1", port=taken.getsockname()[1])


def foreign_address(case: Case) -> None:
    PageServer(str(publish(case)), host="192.0.2.1", port=8000, access=Access("t" * 32))


def public_address_without_a_token(case: Case) -> None:
    PageServer(str(publish(case)), host="0.0.0.0", port=8000)


def token_that_is_too_short(case: Case) -> None:
    (case.here / "token").write_text("swordfish")
    read_token(case.here / "token")


def missing_plotly(case: Case) -> None:
    document.plotly.cache_clear()
    case.patch.setattr(document, "import_module", _failing(ImportError("plotly")))
    try:
        document.plotly()
    finally:
        document.plotly.cache_clear()


def serve_a_model_of_the_hub(case: Case) -> None:
    command("serve", "Qwen/Qwen3-0.6B", "--follow", case.here / "run")


PROVOCATIONS: list[Provocation] = [
    serve_a_model_of_the_hub,
    diff_over_its_input,
    patch_over_the_delta,
    out_of_memory,
    unwritable_page,
    unwritable_page_of_the_demo,
    page_over_other_files,
    checkpoint_that_is_written_to,
    lambda case: command("publish", case.here / "missing", case.run),
    lambda case: command("show", case.here / "missing.safetensors"),
    lambda case: check_installed("the demo", ["no_such_module"], "demo"),
    engine_that_takes_no_weights,
    # The demo
    process("exit(3)"),
    process("print('error: s3://x: no such bucket'); print('hint: create it'); exit(1)"),
    process("import time; time.sleep(60)", stop=signal.SIGKILL),
    process("import time; time.sleep(60)", process_that_starts_slowly),
    process_that_cannot_start,
    missing_example,
    engine_without_a_launcher,
    proof(same=False),
    proof(same=True),
    small_disk,
    demo_into_a_file,
    # The server
    generation(closed_batcher),
    generation(request_cut_off_by_close),
    generation(unknown_token),
    full_queue,
    lambda case: load_model(case.here),
    model(lambda path: (path / "config.json").write_text('{"model_type": "other"}')),
    model(lambda path: _edit(path, **{"model.norm.weight": None})),
    model(lambda path: _edit(path, **{"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)})),
    model_that_cannot_generate,
    adapter_of_another_model,
    lambda case: check_kind(str(publish(case)), RunKind("bfloat16")),
    lambda case: check_kind(str(publish(case, adapted_layer())), RunKind()),
    adapter_without_peft,
    adapter_without_config,
    # Addresses
    lambda case: parse_address("localhost"),
    taken_port,
    foreign_address,
    public_address_without_a_token,
    token_that_is_too_short,
    lambda case: read_token(case.here / "token"),
    missing_plotly,
]
