"""Models that vLLM loads and processes in this process, with our plugin, but without an engine that could generate.

    python loaded_vllm.py DIRECTORY    # patches every quantized model, and prints what it found as JSON

So the code that vLLM runs after loading is tested where its kernels do not run, and in a second per model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from support.offline_vllm import VERSIONS, differing, engine_of, patched, set_environment, version_of
from support.vllm_families import QUANTIZED, family_model, next_version
from weightwire.errors import EngineError


class LoadedModel:
    """The part of vLLM's `LLM` and of its worker that our engine uses."""

    def __init__(self, path: Path) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model

        options = {"dtype": "bfloat16", "max_model_len": 256, "enforce_eager": True, "skip_tokenizer_init": True}
        arguments = EngineArgs(model=str(path), weight_transfer_config={"backend": "weightwire"}, **options)
        self.vllm_config = config = arguments.create_engine_config()
        self.llm_engine = SimpleNamespace(vllm_config=config)
        self._configured: Callable[[], Any] = lambda: set_current_vllm_config(config)
        with self._configured():
            _start_groups()
            self._model = get_model(vllm_config=config)
            self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
                config.weight_transfer_config, config, torch.device("cpu"), self._model
            )

    def get_model(self) -> torch.nn.Module:
        return self._model

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        with self._configured():
            return [method(self, *args) if callable(method) else getattr(self, method)(*args)]

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        engine = self.weight_transfer_engine
        engine.init_transfer_engine(engine.parse_init_info(info))

    def update_weights(self, info: dict[str, Any]) -> None:
        self.weight_transfer_engine.update_weights(info)

    def start_weight_update(self) -> None:
        self.weight_transfer_engine.start_weight_update()

    def finish_weight_update(self) -> None:
        self.weight_transfer_engine.finish_weight_update()


def _start_groups() -> None:
    """The process groups of a single worker."""
    from tempfile import mkdtemp

    from vllm.distributed import parallel_state
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()  # as vLLM's worker does
    if not torch.distributed.is_initialized():
        parallel_state.init_distributed_environment(1, 0, f"file://{mkdtemp()}/groups", 0, "gloo")
    parallel_state.ensure_model_parallel_initialized(1, 1)


@contextmanager
def gpu_kernel() -> Iterator[None]:
    """Makes vLLM choose its Triton kernel for fp8 in blocks, and process weights for it. Nothing is computed with them.

    Its kernel for CPUs needs AMX, and code that is not in every build.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    kernels, kernel = linear._POSSIBLE_FP8_BLOCK_KERNELS, linear.TritonFp8BlockScaledMMKernel
    before, is_supported = kernels[PlatformEnum.CPU], kernel.is_supported
    kernels[PlatformEnum.CPU], kernel.is_supported = [kernel], lambda *given: (True, None)
    try:
        yield
    finally:
        kernels[PlatformEnum.CPU], kernel.is_supported = before, is_supported


def refused(model: Any, version: Path) -> str:
    """The error for a version that the model cannot take."""
    with engine_of(model) as engine:
        try:
            engine.reload(version, version_of(version, 1))
        except EngineError as problem:
            return str(problem)
    return ""


def examine(scheme: str, versions: list[Path], other: Path) -> dict[str, Any]:
    """Patches a model through all versions. `other` is quantized in another way."""
    model = LoadedModel(versions[0])
    if scheme == "int8":
        return {"refused": refused(model, versions[1])}
    found = {"other": refused(model, other)} | patched(model, versions)
    relaid = model.weight_transfer_engine._desks[""]._live._relaid
    found["recomputed"] = [] if relaid is None else [layer.name for layer in relaid._recomputed]
    found["differing"] = model.collective_rpc(differing, args=(str(versions[-1]),))
    return found | {"from_first": model.collective_rpc(differing, args=(str(versions[0]),))}


def main(root: Path) -> None:
    chains: dict[str, list[Path]] = {}
    for scheme in QUANTIZED:
        chains[scheme] = [family_model(scheme, root / scheme / "0")]
        for number in range(1, VERSIONS + 1):
            chains[scheme].append(next_version(chains[scheme][-1], root / scheme / str(number), number))
    found = {}
    for scheme, versions in chains.items():
        other = chains["awq" if scheme == "gptq" else "gptq"][0]
        with gpu_kernel() if scheme == "fp8" else nullcontext():
            found[scheme] = examine(scheme, versions, other)
    print(json.dumps(found))


if __name__ == "__main__":
    set_environment()
    main(Path(sys.argv[1]))
