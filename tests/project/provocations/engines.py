"""Errors of engines: torch modules, vLLM servers, and engines of other packages."""

from __future__ import annotations

import json
import socket
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from project.provocations.case import Answer, Case, Provocation, http_server
from support import packed_model
from support.adapters import adapted_layer
from support.fused_model import Arrays, Fused, arrays, changed, holding, save, weights_of
from support.stores import NOWHERE
from weightwire import EngineError, codec, diff
from weightwire.engines import shared_directory, vllm, worker_orders
from weightwire.engines.engine import CachePolicy
from weightwire.engines.live_model import LiveModel
from weightwire.engines.orders import Answer as WorkerAnswer
from weightwire.engines.registry import find_engine, open_engine
from weightwire.engines.sglang import SglangEngine
from weightwire.engines.sglang.http_api import LOADER
from weightwire.engines.torch import TorchEngine
from weightwire.engines.vllm import health_check, served_version
from weightwire.engines.vllm.rollout_server import VllmRolloutServer
from weightwire.engines.weight_map import learn, torch_dtype
from weightwire.weights import DTYPES

FIRST = arrays()
SECOND = changed(FIRST, 2)
F32 = DTYPES["F32"]


# --- models in this process --------------------------------------------------------------------------------------


def model(work: Callable[[Case, Fused, LiveModel], Any]) -> Provocation:
    """Work on a model that serves version 1."""

    def provoke(case: Case) -> None:
        fused = Fused()
        live = LiveModel(fused, fused.load_weights, threads=1)
        live.reload(save(FIRST, case.here / "first"), holding(FIRST, 1))
        work(case, fused, live)

    return provoke


def patch_to(after: Arrays) -> Any:
    return diff(weights_of(FIRST), weights_of(after), coo=True)


def stage(live: LiveModel, version: int = 2) -> Any:
    return live.stage(patch_to(SECOND), holding(SECOND, version))


def model_with_unknown_weights(case: Case, fused: Fused, live: LiveModel) -> None:
    live.holding = None
    stage(live)


def patch_of_another_run(case: Case, fused: Fused, live: LiveModel) -> None:
    live.stage(patch_to(SECOND), holding(SECOND, 2, "b" * 32))


def lost_tensor(case: Case, fused: Fused, live: LiveModel) -> None:
    less = {name: bits for name, bits in FIRST.items() if name != "head.weight"}
    live.stage(patch_to(less), holding(less, 2))


def patch_of_another_version(case: Case, fused: Fused, live: LiveModel) -> None:
    live.stage(patch_to(SECOND), holding(changed(FIRST, 9), 2))


def new_tensor(case: Case, fused: Fused, live: LiveModel) -> None:
    live.stage(diff({}, {"other": np.zeros(4, np.float16)}), holding(SECOND, 2))


def tensor_of_another_shape(case: Case, fused: Fused, live: LiveModel) -> None:
    live.stage(diff({}, {"layer.norm.weight": ("BF16", (12, 2), bytes(48))}), holding(SECOND, 2))


def moved_parameter(case: Case, fused: Fused, live: LiveModel) -> None:
    fused.norm.data = fused.norm.data.clone()
    stage(live)


def patch_swapped_twice(case: Case, fused: Fused, live: LiveModel) -> None:
    staged = stage(live)
    staged.swap()
    staged.swap()


def weights_changed_by_another_program(case: Case, fused: Fused, live: LiveModel) -> None:
    staged = stage(live)
    fused.norm.data.view(torch.int16)[:] ^= 1
    staged.swap()


def write_that_does_not_hold(case: Case, fused: Fused, live: LiveModel) -> None:
    staged = stage(live)
    case.patch.setattr(codec, "swap_units", lambda *_: (0, 0))
    staged.swap()


def failing_loader(case: Case, fused: Fused, live: LiveModel) -> None:
    live._load = lambda weights: [next(iter(weights)), 1 / 0]
    live.reload(save(SECOND, case.here / "second"), holding(SECOND, 2))


def loader_that_loads_nothing(case: Case, fused: Fused, live: LiveModel) -> None:
    live._load = lambda weights: None
    live.reload(save(SECOND, case.here / "second"), holding(SECOND, 2))


def checkpoint_of_another_version(case: Case, fused: Fused, live: LiveModel) -> None:
    live.reload(save(SECOND, case.here / "second"), holding(FIRST, 2))


def tensors_tied_only_in_the_model(case: Case) -> None:
    fused = Fused()
    fused.head = fused.embed
    live = LiveModel(fused, fused.load_weights, threads=1)
    live.reload(save(FIRST, case.here / "first"), holding(FIRST, 1))


def loads(put: Callable[[Any, list[torch.Tensor]], Any], **schema: Any) -> Provocation:
    """Learns where the loader of a linear layer puts two tensors."""

    def provoke(case: Case) -> None:
        linear = torch.nn.Linear(4, 4, bias=False)
        given = schema or {"a": (F32, (2, 4)), "b": (F32, (2, 4))}
        learn(linear, lambda weights: put(linear, [value for _, value in weights]), given)

    return provoke


def unknown_name(linear: Any, values: list[torch.Tensor]) -> None:
    raise KeyError("a")


def new_parameter(linear: Any, values: list[torch.Tensor]) -> None:
    linear.weight = torch.nn.Parameter(torch.cat(values))


def parameter_loaded_twice(linear: Any, values: list[torch.Tensor]) -> None:
    linear.weight.data[:2].copy_(values[0])
    linear.weight.data[1:3].copy_(values[1])


def rearranged(schema: dict[str, Any], *, with_the_form: bool = True) -> Provocation:
    """Learns where a checkpoint is in a model whose experts were packed after loading."""

    def provoke(case: Case) -> None:
        packed = packed_model.Packed()
        relaid = packed_model.started(packed_model.packed_arrays(), packed)
        if not with_the_form:
            relaid._loader_of = lambda form: packed.load_weights
        relaid.learn(schema)

    return provoke


def layer_that_grows(case: Case) -> None:
    """Computes a layer again, whose size depends on how often that was done."""
    calls = []

    def process(layer: torch.nn.Module) -> None:
        calls.append(layer)
        for one in layer.modules():
            if hasattr(one, "kv"):
                one.doubled = torch.nn.Parameter(one.kv.data.abs() * 2, requires_grad=False)
                one.doubled.data = torch.cat([one.doubled.data] * (len(calls) // 20 + 1))

    packed, bits = packed_model.Packed(), packed_model.packed_arrays()
    relaid = packed_model.started(bits, packed, process)
    live = LiveModel(packed, packed.load_weights, relaid=relaid, threads=1)
    calls += [packed] * 40
    live.reload(save(bits, case.here / "first"), holding(bits, 1))


def module(state: dict[str, torch.Tensor]) -> Provocation:
    """Loads a checkpoint into a linear layer of three inputs."""

    def provoke(case: Case) -> None:
        from safetensors.torch import save_file

        save_file(state, case.here / "model.safetensors")
        engine = TorchEngine(torch.nn.Linear(3, 1, bias=False))
        engine.reload(case.here, holding(FIRST, 1))

    return provoke


def adapter(spoil: Callable[[Any, Path], Any]) -> Provocation:
    """Loads an adapter into a PEFT model, one of which was spoilt."""

    def provoke(case: Case) -> None:
        model = adapted_layer()
        model.save_pretrained(case.here)
        spoil(model, case.here / "adapter_config.json")
        TorchEngine(model).reload(case.here, holding(FIRST, 1))

    return provoke


def _other_scale(model: Any, config: Path) -> None:
    config.write_text(json.dumps({**json.loads(config.read_bytes()), "lora_alpha": 99}))


def adapter_that_was_replaced(case: Case) -> None:
    model = adapted_layer()
    model.save_pretrained(case.here)
    engine = TorchEngine(model)
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)
    engine.reload(case.here, holding(FIRST, 1))


def two_adapters(case: Case) -> None:
    import peft

    model = adapted_layer()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["0"]))
    model.base_model.set_adapter(["default", "other"])
    TorchEngine(model)


def mixed_module(case: Case) -> None:
    fused = Fused()
    engine = TorchEngine(fused, load=fused.load_weights)
    engine.reload(save(FIRST, case.here / "first"), holding(FIRST, 1))
    engine._live._load = lambda weights: 1 / 0
    with suppress(EngineError):
        engine.reload(save(SECOND, case.here / "second"), holding(SECOND, 2))
    with engine.serving():
        pass


# --- engines of other packages -----------------------------------------------------------------------------------

PACKAGE = """
    NOT_CALLABLE = 3

    def failing(url):
        raise ValueError("no such engine")

    def nothing(url):
        return None
"""
ENTRY_POINTS = """
    [weightwire.engines]
    missing = madeup_errors:Missing
    number = madeup_errors:NOT_CALLABLE
    failing = madeup_errors:failing
    nothing = madeup_errors:nothing
"""


def installed(name: str, cache: CachePolicy = "flush") -> Provocation:
    """Opens an engine of a package that is installed for this provocation."""

    def provoke(case: Case) -> None:
        case.file("madeup_errors.py", textwrap.dedent(PACKAGE))
        case.file("madeup_errors-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: madeup\nVersion: 1.0\n")
        case.file("madeup_errors-1.0.dist-info/entry_points.txt", textwrap.dedent(ENTRY_POINTS))
        case.patch.syspath_prepend(str(case.here))
        try:
            open_engine(f"{name}=http://127.0.0.1:8000", cache)
        finally:
            sys.modules.pop("madeup_errors", None)

    return provoke


# --- vLLM --------------------------------------------------------------------------------------------------------

SERVER = {
    "/weight_info": {"weight_version": "1"},
    "/get_world_size": {"world_size": 2},
    "/version": {"version": "0.29.1"},
    "/init_weight_transfer_engine": {},
}


def server(
    work: Callable[[Case, str], Any], answers: dict[str, Any], status: dict[str, int] | None = None
) -> Provocation:
    """Work with a server that gives these answers, and 404 to everything else."""

    def respond(request: Any) -> Answer:
        path = request.path.split("?")[0]
        known = (status or {}).get(path, 200 if path in answers else 404)
        return known, {}, json.dumps(answers.get(path, {"error": "not found"})).encode()

    def provoke(case: Case) -> None:
        case.patch.setattr(shared_directory, "_SHARED_MEMORY", case.here)
        case.patch.setattr(worker_orders, "QUICK", 0.05)
        with http_server(respond) as url:
            work(case, url)

    return provoke


def attach(case: Case, url: str) -> None:
    engine = vllm.VllmEngine(url)
    try:
        engine.attach()
    finally:
        engine.close()


def attach_sglang(case: Case, url: str) -> None:
    with closing(SglangEngine(url)) as engine:
        engine.attach()


def attach_to_keep(case: Case, url: str) -> None:
    answer = WorkerAnswer(holding=None, not_kept="a KV connector holds a second copy (--kv-transfer-config)")
    case.patch.setattr(worker_orders, "read_answers", lambda directory, token: [answer, answer])
    engine = vllm.VllmEngine(url, cache="keep")
    try:
        engine.attach()
    finally:
        engine.close()


def attach_twice(case: Case, url: str) -> None:
    first = vllm.VllmEngine(url)
    try:
        first._shared.lock()
        attach(case, url)
    finally:
        first.close()


def unusable_directory(case: Case, url: str) -> None:
    engine = vllm.VllmEngine(url)
    engine._shared.path.write_text("a file")
    engine.attach()


def worker_says(answer: WorkerAnswer) -> Callable[[Case, str], None]:
    """Reloads a server whose only worker gives this answer."""

    def work(case: Case, url: str) -> None:
        case.patch.setattr(worker_orders, "read_answers", lambda directory, token: [answer])
        engine = vllm.VllmEngine(url)
        engine._orders.workers = 1
        try:
            engine._shared.lock()
            engine.reload(Path("/data/checkpoint"), holding(FIRST, 2))
        finally:
            engine.close()

    return work


def patch_a_server(case: Case, url: str) -> None:
    engine = vllm.VllmEngine(url)
    engine.patch(patch_to(SECOND), holding(SECOND, 2))


UPDATES = {path: {"is_paused": True} for path in ("/pause", "/resume", "/is_paused")} | {
    path: {} for path in ("/start_weight_update", "/finish_weight_update", "/update_weights")
}
REFUSED = WorkerAnswer(
    holding=None, problem="tensor 'w': is BF16 [4], and F32 [4] in the patch", hint="reload the model"
)


def reload_a_sleeping_server(case: Case, url: str) -> None:
    engine = vllm.VllmEngine(url)
    try:
        engine._shared.lock()
        engine.reload(Path("/data/checkpoint"), holding(FIRST, 2))
    finally:
        engine.close()


def hanging_server(case: Case) -> None:
    case.patch.setattr(health_check, "_CORE", 0.1)
    case.patch.setattr(health_check, "_FRONT_END", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = vllm.VllmEngine(f"http://127.0.0.1:{silent.getsockname()[1]}")
        try:
            engine.check_health()
        finally:
            engine.close()


def wait_for_a_server(case: Case, url: str) -> None:
    from weightwire.trainers.trl import _EngineLag

    lag = _EngineLag(f"vllm={url}")
    lag.sent = [2, 3]
    lag.wait(0, 0.01)


def closed_engine(case: Case) -> None:
    engine = vllm.VllmEngine(NOWHERE)
    engine.close()
    engine.attach()


PROVOCATIONS: list[Provocation] = [
    closed_engine,
    model(model_with_unknown_weights),
    model(patch_of_another_run),
    model(lost_tensor),
    model(patch_of_another_version),
    model(new_tensor),
    model(tensor_of_another_shape),
    model(moved_parameter),
    model(patch_swapped_twice),
    model(weights_changed_by_another_program),
    model(write_that_does_not_hold),
    model(failing_loader),
    model(loader_that_loads_nothing),
    model(checkpoint_of_another_version),
    tensors_tied_only_in_the_model,
    loads(unknown_name),
    loads(new_parameter),
    loads(parameter_loaded_twice),
    loads(lambda linear, values: linear.weight.data[:2].copy_(values[0])),
    loads(lambda linear, values: torch._foreach_add_([linear.weight.data[:2], linear.weight.data[2:]], 1)),
    lambda case: torch_dtype("w", DTYPES["F4"]),
    rearranged(packed_model.schema() | {"1.experts.0.up": (F32, (packed_model.INNER, packed_model.HIDDEN))}),
    rearranged(packed_model.schema(), with_the_form=False),
    layer_that_grows,
    module({"weight": torch.ones(2, 2)}),
    module({"weight": torch.ones(1, 3), "bias": torch.ones(1)}),
    module({}),
    module({"weight": torch.ones(1, 3, dtype=torch.bfloat16)}),
    mixed_module,
    adapter(lambda model, config: model.merge_adapter()),
    adapter(lambda model, config: config.unlink()),
    adapter(_other_scale),
    adapter(lambda model, config: config.write_text("{")),
    adapter(lambda model, config: config.write_text('{"peft_type": "LOHA"}')),
    adapter(lambda model, config: model.base_model.disable_adapter_layers()),
    adapter_that_was_replaced,
    two_adapters,
    # Other packages
    lambda case: open_engine("http://127.0.0.1:8000"),
    lambda case: find_engine("tensorrt"),
    installed("missing"),
    installed("number"),
    installed("failing"),
    installed("nothing"),
    installed("nothing", "keep"),
    # vLLM
    lambda case: open_engine("vllm=127.0.0.1"),
    lambda case: served_version(NOWHERE),
    server(attach, {}),
    server(attach, {"/weight_info": {"error": {"message": "the model is loading"}}}, {"/weight_info": 503}),
    server(attach, {"/version": {"version": "0.20.0"}}),
    server(attach, SERVER, {"/init_weight_transfer_engine": 500}),
    server(attach, SERVER),
    server(attach_twice, SERVER),
    server(attach_to_keep, SERVER),
    lambda case: vllm.VllmEngine(NOWHERE, cache="kept"),  # type: ignore[arg-type]
    server(unusable_directory, SERVER),
    server(worker_says(REFUSED), UPDATES),
    server(worker_says(WorkerAnswer(holding=holding(FIRST, 1))), UPDATES),
    server(patch_a_server, UPDATES | {"/weight_info": {}}),  # its directory does not exist
    server(patch_a_server, UPDATES | {"/weight_info": {"weight_version": "slept"}}),
    server(reload_a_sleeping_server, UPDATES | {"/is_sleeping": {"is_sleeping": True}}),
    hanging_server,
    server(lambda case, url: VllmRolloutServer(url).check(), SERVER | {"/server_info": {"vllm_config": {}}}),
    server(wait_for_a_server, SERVER),
    # SGLang
    server(attach_sglang, {"/server_info": {"version": "0.5.23", "custom_weight_loader": []}}),
    server(attach_sglang, {"/server_info": {"custom_weight_loader": [LOADER], "enable_eplb": True}}),
]
