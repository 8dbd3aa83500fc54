"""A real vLLM whose running requests keep their KV cache through an update (`--cache keep`)."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.vllm_families import next_version
from support.vllm_server import VLLM
from weightwire import diff
from weightwire.delta.state import digest
from weightwire.engines.engine import ServedVersion
from weightwire.engines.orders import Answer
from weightwire.engines.server_connection import NotOffered, ServerRefusal
from weightwire.engines.shared_directory import SharedDirectory
from weightwire.engines.vllm import VllmEngine
from weightwire.engines.vllm.prefix_cache import why_not_kept
from weightwire.engines.vllm.sample_versions import spans_of
from weightwire.errors import EngineError
from weightwire.weights.checkpoint import Checkpoint

BLOCK = 128  # tokens of a block of the KV cache on a CPU; only full blocks are cached
LONGEST = 256  # tokens of a request
Sample = dict[str, Any]


def prompt(seed: int, length: int) -> list[int]:
    return [5 + (7 * seed + 31 * index + index * index) % 240 for index in range(length)]


# ENDED has ended before the update, RUNNING holds a cached block meanwhile, and FILLING fills its first block later.
ENDED, RUNNING, FILLING = prompt(1, BLOCK + 20), prompt(2, BLOCK + 20), prompt(3, BLOCK - 20)


def generate(server: VLLM, tokens: list[int], count: int = 24) -> Sample:
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = server.post("/inference/v1/generate", {"token_ids": tokens, "sampling_params": sampling})
    choice: Sample = answer["choices"][0]
    return choice


def output_of(sample: Sample) -> tuple[list[int], Any]:
    """The tokens with their logprobs."""
    return sample["token_ids"], sample["logprobs"]


def metric(server: VLLM, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as reply:
        found = re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)", reply.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def version_of(checkpoint: Path, number: int) -> ServedVersion:
    return ServedVersion("a" * 32, number, digest(Checkpoint(checkpoint)).hex)


def wait_until_running(server: VLLM, requests: list[Future[Sample]]) -> None:
    """Returns early if one of them has ended."""
    while metric(server, "num_requests_running") < len(requests) and not any(one.done() for one in requests):
        time.sleep(0.01)


def paused_while_running(server: VLLM, work: Callable[[], list[Future[Sample]]]) -> list[Future[Sample]]:
    """Starts requests with `work`, and pauses the server while all of them run."""
    for _ in range(20):
        requests = work()
        wait_until_running(server, requests)
        server.post("/pause?mode=keep&clear_cache=false")
        time.sleep(1.0)  # for answers that are on their way
        if not any(one.done() for one in requests):
            return requests
        server.post("/resume")
        for one in requests:
            one.result()
    raise AssertionError("the requests end before the server can be paused")


def generated_beside(server: VLLM, work: Callable[[], list[Future[Sample]]], *prompts: list[int]) -> list[Sample]:
    """Samples of a server with empty caches, while all requests of `work` run."""
    for _ in range(20):
        server.post("/pause?mode=keep")  # vLLM's own pause leaves nothing in its caches
        server.post("/resume")
        requests = work()
        wait_until_running(server, requests)
        samples = [generate(server, one) for one in prompts]
        still_running = not any(one.done() for one in requests)
        for one in requests:
            one.result()
        if still_running:
            return samples
    raise AssertionError("the requests end before the others")


def test_running_requests_keep_their_cache_and_new_ones_get_none_of_old_weights(
    vllm: VLLM, tiny: Path, tmp_path: Path
) -> None:
    after = next_version(tiny, tmp_path / "after", seed=4)
    with closing(VllmEngine(vllm.url, cache="keep")) as engine, ThreadPoolExecutor(2) as pool:

        def start(*prompts: list[int]) -> list[Future[Sample]]:
            """Two requests that run for long."""
            return [pool.submit(generate, vllm, one, LONGEST - len(one)) for one in prompts or (RUNNING, FILLING)]

        engine.attach()
        engine.reload(tiny, version_of(tiny, 1))
        old = [generate(vllm, one) for one in (ENDED, RUNNING)]
        requests = paused_while_running(vllm, start)
        preempted, hits = metric(vllm, "num_preemptions_total"), metric(vllm, "prefix_cache_hits_total")
        engine._shared.paused_mark.touch()  # as if the follower had paused it
        engine.patch(diff(Checkpoint(tiny), Checkpoint(after), coo=True), version_of(after, 2))
        # Both are cached under the old weights, and one is in use.
        new = [generate(vllm, one) for one in (ENDED, RUNNING)]
        kept = [one.result() for one in requests]
        # The request that filled its first block after the update must not have cached it for others.
        filled = [*FILLING, *kept[1]["token_ids"]][: BLOCK + 20]
        new += [generate(vllm, filled), generate(vllm, filled)]
        hits_after = metric(vllm, "prefix_cache_hits_total")
        # Some CPUs round differently in smaller batches, so as many other requests run as before.
        others = (prompt(4, len(RUNNING)), prompt(5, len(FILLING)))
        expected = [output_of(one) for one in generated_beside(vllm, lambda: start(*others), ENDED, RUNNING)]
        expected += [output_of(generate(vllm, one)) for one in (filled, filled)]

    for sample, length in zip(kept, (len(RUNNING), len(FILLING)), strict=True):
        assert [span.version for span in spans_of(sample)] == [1, 2]
        assert (len(sample["token_ids"]), sample["finish_reason"]) == (LONGEST - length, "length")
    assert metric(vllm, "num_preemptions_total") == preempted  # nothing was computed again
    # Only the last one found a block: of the same prompt, and the new weights.
    assert hits_after == hits + BLOCK
    assert [output_of(one) for one in new] == expected
    assert [output_of(one) for one in old] != expected[:2]


# --- what a server cannot do -------------------------------------------------------------------------------------


class RecordedConnection:
    """Answers like a server in a pause, and records the requests that pause it."""

    port = 0

    def __init__(self, reset: Any) -> None:
        self.reset = reset
        self.posted: list[str] = []

    def get(self, path: str, timeout: float = 0) -> dict[str, Any]:
        return {"is_paused": True}

    def post(self, path: str, body: Any, timeout: float = 0) -> dict[str, Any]:
        self.posted.append(path)
        if path != "/reset_prefix_cache":
            return {}
        if isinstance(self.reset, EngineError):
            raise self.reset
        answer: dict[str, Any] = self.reset
        return answer

    def close(self) -> None:
        pass


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[VllmEngine]:
    with closing(VllmEngine("http://127.0.0.1:9", cache="keep")) as one:
        one._shared = SharedDirectory(tmp_path / "shared", "engine")
        one._shared.path.mkdir()
        one._orders._directory = one._shared.path
        yield one


@pytest.mark.parametrize(
    "reset", [{"success": False}, {}, ServerRefusal("no", hint="none"), NotOffered("no", hint="none")]
)
def test_a_server_that_cannot_forget_prefixes_clears_its_cache_instead(engine: VllmEngine, reset: Any) -> None:
    server = RecordedConnection(reset)
    engine._server = engine._pausing = server  # type: ignore[assignment]
    with engine._pause(keeps_cache=True) as settled:
        settled()
    keeping = ["/pause?mode=keep&clear_cache=false", "/reset_prefix_cache"]
    assert server.posted == [*keeping, "/pause?mode=keep", "/resume"]


def test_a_server_that_forgets_prefixes_is_paused_once(engine: VllmEngine) -> None:
    server = RecordedConnection({"success": True})
    engine._server = engine._pausing = server  # type: ignore[assignment]
    with engine._pause(keeps_cache=True) as settled:
        settled()
    assert server.posted == ["/pause?mode=keep&clear_cache=false", "/reset_prefix_cache", "/resume"]


def test_a_reload_clears_the_cache(engine: VllmEngine) -> None:
    """The weights before it may be unknown, and so are the keys and values that they computed."""
    server = RecordedConnection({"success": True})
    engine._server = engine._pausing = server  # type: ignore[assignment]
    target = ServedVersion("a" * 32, 2, "b" * 32)
    engine._orders._read = lambda token, timeout: [Answer(target)]  # type: ignore[method-assign]
    engine.reload(Path("checkpoint"), target)
    assert "/pause?mode=keep" in server.posted
    assert "/reset_prefix_cache" not in server.posted


CAN_KEEP = {
    "kv_transfer_config": None,
    "model_config": SimpleNamespace(is_multimodal_model=False, is_encoder_decoder=False),
    "aux_output_config": SimpleNamespace(enabled=False),
}


@pytest.mark.parametrize(
    ("differing", "reason"),
    [
        ({}, ""),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"model_config": SimpleNamespace(is_multimodal_model=True, is_encoder_decoder=False)}, "encoder"),
        ({"model_config": SimpleNamespace(is_multimodal_model=False, is_encoder_decoder=True)}, "encoder"),
        ({"aux_output_config": SimpleNamespace(enabled=True)}, "routed experts"),
    ],
)
def test_servers_with_other_caches_cannot_keep(differing: dict[str, Any], reason: str) -> None:
    found = why_not_kept(SimpleNamespace(**(CAN_KEEP | differing)))
    assert reason in found
    assert bool(reason) == bool(found)


def test_an_unknown_policy_is_refused() -> None:
    policy: Any = "kept"
    with pytest.raises(EngineError, match="unknown cache policy 'kept'"):
        VllmEngine("http://127.0.0.1:9", cache=policy)
