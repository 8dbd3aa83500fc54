"""vLLM without a server: models in this process, with our plugin in their workers. A model takes seconds to start.

    python offline_vllm.py DIRECTORY    # patches every family, and prints what it found as JSON

`OfflineEngine` is our engine with vLLM's own calls in place of HTTP.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from support.vllm_drafts import draft_weights, record_predictions, shared_with_draft, take_predictions
from support.vllm_families import FAMILIES, family_model, next_version
from weightwire import diff
from weightwire.delta.state import digest
from weightwire.engines.engine import ServedVersion
from weightwire.engines.vllm.client import VllmEngine
from weightwire.engines.vllm.draft_engine import VllmDraftEngine
from weightwire.errors import EngineError
from weightwire.weights.checkpoint import Checkpoint

VERSIONS = 4
CHANCES = {"deepseek_mtp": 0.02}  # fewer changes, so that its draft stays right now and then
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
_SMALL = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def set_environment() -> None:
    """Call this before vLLM is imported."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", **_QUIET, **_SMALL)


class _Connection:
    """The requests of an engine, as calls of vLLM's workers. Nothing is generated meanwhile, so nothing is paused."""

    port = 0

    def __init__(self, model: Any) -> None:
        self._model = model

    def get(self, path: str, timeout: float = 0) -> dict[str, Any]:
        workers = self._model.llm_engine.vllm_config.parallel_config.world_size
        return {"weight_version": "default", "world_size": workers, "is_paused": True, "is_sleeping": False}

    def post(self, path: str, body: dict[str, Any], timeout: float = 0) -> dict[str, Any]:
        name = path[1:].partition("?")[0]
        if name in ("init_weight_transfer_engine", "update_weights"):
            self._model.collective_rpc(name, args=tuple(body.values()))
        elif name in ("start_weight_update", "finish_weight_update"):
            self._model.collective_rpc(name)
        return {}

    def check_alive(self) -> None:
        pass

    def close(self) -> None:
        pass


class OfflineEngine(VllmEngine):
    def __init__(self, model: Any, port: int = 0) -> None:
        super().__init__(f"http://127.0.0.1:{port or os.getpid() % 60000 + 1000}")  # names a directory, nothing else
        self._server = self._pausing = _Connection(model)  # type: ignore[assignment]


class OfflineDraftEngine(VllmDraftEngine):
    def __init__(self, model: Any) -> None:
        super().__init__(f"http://127.0.0.1:{os.getpid() % 60000 + 1000}")
        self._server = _Connection(model)  # type: ignore[assignment]


def offline_model(
    path: Path, workers: int = 1, backend: str = "weightwire", speculation: dict[str, Any] | None = None
) -> Any:
    from vllm import LLM

    return LLM(
        str(path),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,  # the cache of a gigabyte that vLLM makes at least is too much for many models
        tensor_parallel_size=workers,
        distributed_executor_backend="uni" if workers == 1 else "mp",
        weight_transfer_config={"backend": backend},
        speculative_config=speculation,
    )


@contextmanager
def engine_of(model: Any) -> Iterator[OfflineEngine]:
    engine = OfflineEngine(model)
    try:
        engine.attach()
        yield engine
    finally:
        engine.close()


def version_of(path: Path, number: int) -> ServedVersion:
    return ServedVersion("a" * 32, number, digest(Checkpoint(path)).hex)


def outputs(model: Any, tokens: int = 24) -> list[Any]:
    """Greedy tokens and their logprobs, for four prompts."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": [5, 6, 7, last]} for last in range(20, 24)]
    found = []
    for answer in model.generate(prompts, sampling, use_tqdm=False):
        [choice] = answer.outputs
        found.append([list(choice.token_ids), [one.logprob for step in choice.logprobs for one in step.values()]])
    return found


def patched(model: Any, versions: list[Path]) -> dict[str, Any]:
    """Patches a model that was started from the first version up to the last."""
    model.collective_rpc(forget_directory)
    with engine_of(model) as engine:
        with_eplb = _with_eplb(model, engine, versions[0])
        adopted = engine.adopt(versions[0], version_of(versions[0], 1))
        for number, (before, after) in enumerate(pairwise(versions), 2):
            engine.patch(diff(Checkpoint(before), Checkpoint(after), coo=True), version_of(after, number))
        problems = {"lacking": _lacking(engine, versions[0]), "with_eplb": with_eplb}
        return {"adopted": adopted, "unpatchable": engine.unpatchable, **problems}


def patched_draft(model: Any, versions: list[Path]) -> dict[str, Any]:
    """Patches a separate draft model as well, which follows a run of its own: here one with the same versions."""
    [untouched] = model.collective_rpc(draft_weights)
    with closing(OfflineDraftEngine(model)) as engine:
        engine.attach()
        adopted = engine.adopt(versions[0], version_of(versions[0], 1))
        for number, (before, after) in enumerate(pairwise(versions), 2):
            engine.patch(diff(Checkpoint(before), Checkpoint(after), coo=True), version_of(after, number))
        held = engine.attach()
        return {"draft_adopted": adopted, "draft_untouched": untouched, "draft_version": held and held.version}


def forget_directory(worker: Any) -> None:
    """In a worker: as if vLLM had been started with a model of the Hub."""
    worker.weight_transfer_engine.model_config.model = "somebody/some-model"


def set_eplb(worker: Any, is_on: bool) -> None:
    worker.weight_transfer_engine.parallel_config.enable_eplb = is_on


def _with_eplb(model: Any, engine: OfflineEngine, version: Path) -> str:
    """The error for a server that moves experts."""
    model.collective_rpc(set_eplb, args=(True,))
    try:
        engine.adopt(version, version_of(version, 1))
    except EngineError as problem:
        return str(problem)
    finally:
        model.collective_rpc(set_eplb, args=(False,))
    return ""


def _lacking(engine: OfflineEngine, version: Path) -> str:
    """The error for a run without the last expert, without the draft's attention, or without a layer's norm."""
    from safetensors.torch import load_file, save_file

    weights = load_file(version / "model.safetensors")
    less = version.parent / "less"
    less.mkdir(exist_ok=True)
    gone = [name for name in weights if ".experts.5." in name or name.startswith("model.layers.2.self_attn.")]
    gone = gone or ["model.layers.1.input_layernorm.weight"]
    save_file({name: one for name, one in weights.items() if name not in gone}, less / "model.safetensors")
    try:
        engine.reload(less, version_of(less, 99))
    except EngineError as problem:
        return str(problem)
    return ""


def differing(worker: Any, path: str) -> list[str]:
    """In a worker: which tensors differ from those of the same model that vLLM loads from `path`."""
    from copy import copy

    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    from weightwire.engines.skeleton import tensors_in
    from weightwire.engines.vllm.post_load import is_part

    config = copy(worker.vllm_config)
    config.compilation_config, config.model_config = copy(config.compilation_config), copy(config.model_config)
    config.compilation_config.static_forward_context, config.model_config.model = {}, path
    with set_current_vllm_config(config):
        fresh = get_model(vllm_config=config)
    held = dict(worker.get_model().named_parameters())
    wanted = {name[1:]: one for name, one in tensors_in(fresh, is_part).items() if name[1:] in held}
    assert wanted.keys() == held.keys()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [
        name
        for name, one in held.items()
        if not torch.equal(one.data.view(bits[one.element_size()]), wanted[name].data.view(bits[one.element_size()]))
    ]


def main(root: Path) -> None:
    found: dict[str, Any] = {}
    kept = []  # a model that is collected would end the process groups that they share
    for family in FAMILIES:
        versions = [family_model(family, root / family / "0")]
        for number in range(1, VERSIONS + 1):
            versions.append(next_version(versions[-1], root / family / str(number), number, CHANCES.get(family, 0.05)))
        speculation, logged = _speculation(family, versions[0]), _warnings()
        model = offline_model(versions[0], speculation=speculation)
        kept.append(model)
        examine = _with_predictions if speculation else _outputs
        before = examine(model, "before")
        found[family] = patched(model, versions)
        if family == "qwen3":
            found[family] |= patched_draft(model, versions)
        found[family]["differing"] = model.collective_rpc(differing, args=(str(versions[-1]),))
        kept.append(offline_model(versions[-1], speculation=_speculation(family, versions[-1])))
        found[family] |= before | examine(model, "patched") | examine(kept[-1], "fresh") | {"logged": logged}
    print(json.dumps(found))


def _warnings() -> list[str]:
    """The warnings that our plugin logs from now on."""
    log, found = logging.getLogger("vllm.weightwire"), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.WARNING)
    return found


def _outputs(model: Any, name: str) -> dict[str, Any]:
    return {name: outputs(model)}


def _with_predictions(model: Any, name: str) -> dict[str, Any]:
    """Also what the draft holds and predicts."""
    model.collective_rpc(record_predictions)
    found = {name: outputs(model)}
    [predicted], [weights], [shared] = map(model.collective_rpc, (take_predictions, draft_weights, shared_with_draft))
    return found | {f"draft_{name}": {"predicted": predicted, "weights": weights, "shared": shared}}


def _speculation(family: str, draft: Path) -> dict[str, Any] | None:
    if family == "deepseek_mtp":
        return {"method": "mtp", "num_speculative_tokens": 1}
    return {"model": str(draft), "num_speculative_tokens": 2} if family == "qwen3" else None


def split(root: Path) -> None:
    """The first family on two workers. Uses the checkpoints of `main`."""
    family = next(iter(FAMILIES))
    versions = [root / family / str(number) for number in range(VERSIONS + 1)]
    model = offline_model(versions[0], workers=2)
    before = {"before": outputs(model)}
    found = before | patched(model, versions) | {"patched": outputs(model)}
    found["differing"] = model.collective_rpc(differing, args=(str(versions[-1]),))
    found["from_first"] = model.collective_rpc(differing, args=(str(versions[0]),))
    found["fresh"] = outputs(offline_model(versions[-1], workers=2))
    print(json.dumps(found))


if __name__ == "__main__":
    set_environment()
    (split if "--split" in sys.argv else main)(Path(sys.argv[1]))
