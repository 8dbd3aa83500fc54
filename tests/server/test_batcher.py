"""The thread that generates: waiting requests join, and every request ends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing

import pytest

from support.followers import until as eventually
from support.vllm_server import tiny_config
from weightwire.engines.torch import TorchEngine
from weightwire.errors import EngineError
from weightwire.server.batcher import Batcher, FairLock
from weightwire.server.generation import Generation
from weightwire.server.sequence import Running, Sampling, Task

LONG = 1_000_000  # tokens; more than are generated during a test, also if it is stopped for seconds


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    from transformers import Qwen3ForCausalLM

    return TorchEngine(Qwen3ForCausalLM(tiny_config()).requires_grad_(False).eval(), lock=FairLock())


@pytest.fixture
def batcher(engine: TorchEngine) -> Iterator[Batcher]:
    generation = Generation(engine._model, engine.serving, ends=(), decode=str)
    with closing(Batcher(generation)) as batcher:
        yield batcher


def task(length: int = 4, most: int = 3, seed: int = 0) -> Task:
    prompt = tuple(random.Random(seed).randrange(3, 320) for _ in range(length))
    return Task(prompt, most, Sampling(temperature=0.0), seed=seed)


def result(future: Future[list[Running]]) -> list[Running]:
    return future.result(timeout=60)


def test_more_sequences_than_fit_are_all_served(batcher: Batcher) -> None:
    tasks = [task(1 + seed % 60, 1 + seed % 3, seed) for seed in range(400)]
    futures = [batcher.submit(tasks[start : start + 25]) for start in range(0, 400, 25)]
    finished = [one for future in futures for one in result(future)]
    assert [one.task for one in finished] == tasks
    assert [len(one.tokens) for one in finished] == [one.most for one in tasks]


def test_a_later_request_joins_the_running_batch(batcher: Batcher) -> None:
    long = batcher.submit([task(most=LONG)])
    eventually(lambda: batcher.running)
    [short] = result(batcher.submit([task(seed=1)]))
    assert short.reason == "length"
    assert not long.done()
    long.cancel()


def test_cancelled_requests_are_dropped(batcher: Batcher) -> None:
    futures = [batcher.submit([task(most=LONG), task(most=LONG, seed=1)]) for _ in range(2)]
    eventually(lambda: batcher.running == 4)
    futures[0].cancel()
    eventually(lambda: batcher.running == 2)
    futures[1].cancel()
    eventually(lambda: batcher.running == 0)


def test_a_full_queue_refuses_more(batcher: Batcher) -> None:
    many = [task(most=LONG)] * 4096
    futures = [batcher.submit(many) for _ in range(4)]
    eventually(lambda: batcher.running == 256)
    assert batcher.waiting == 4 * 4096 - 256
    with pytest.raises(EngineError, match="4096 sequences do not fit: 16128 of 16384 places are taken"):
        batcher.submit(many)
    futures.append(batcher.submit(many[:256]))
    for future in futures:
        future.cancel()
    eventually(lambda: not batcher.waiting)
    assert result(batcher.submit([task()]))[0].reason


def test_mixed_weights_fail_requests_until_the_next_reload(batcher: Batcher, engine: TorchEngine) -> None:
    engine._live.mixed = True
    try:
        with pytest.raises(EngineError, match="a reload failed halfway"):
            result(batcher.submit([task()]))
    finally:
        engine._live.mixed = False
    assert result(batcher.submit([task()]))[0].reason


def test_a_failing_model_fails_requests_and_the_batcher_continues(batcher: Batcher) -> None:
    running = batcher.submit([task(most=LONG)])
    wrong = Task((100_000,), 1)  # not a token
    with pytest.raises(EngineError, match="the model failed"):
        result(batcher.submit([wrong]))
    assert running.exception(timeout=60) is not None
    assert result(batcher.submit([task()]))[0].reason
    assert (batcher.running, batcher.waiting) == (0, 0)


def test_a_paused_batcher_adds_no_tokens_until_it_resumes(batcher: Batcher) -> None:
    one = Running(task(most=LONG))
    future = batcher.start([one])
    eventually(lambda: batcher.running)
    batcher.pause()
    reached = len(one.tokens)
    late = batcher.submit([task()])
    time.sleep(0.1)
    assert (batcher.paused, len(one.tokens), late.done()) == (True, reached, False)
    batcher.resume()
    assert result(late)[0].reason
    assert len(one.tokens) > reached
    future.cancel()


def test_cancelled_requests_of_a_paused_batcher_are_dropped(batcher: Batcher) -> None:
    kept = Running(task(most=LONG))
    future, other = batcher.submit([task(most=LONG)]), batcher.start([kept])
    eventually(lambda: batcher.running == 2)
    batcher.pause()
    reached = len(kept.tokens)
    waiting = batcher.submit([task(most=LONG)])
    future.cancel()
    waiting.cancel()
    eventually(lambda: batcher.running == 1 and not batcher.waiting)
    time.sleep(0.05)
    assert len(kept.tokens) == reached  # dropping the others is not a step
    other.cancel()
    eventually(lambda: not batcher.running)
    batcher.pause()  # a second time changes nothing
    batcher.resume()
    assert result(batcher.submit([task()]))[0].reason


def test_a_paused_batcher_can_be_closed(engine: TorchEngine) -> None:
    batcher = Batcher(Generation(engine._model, engine.serving, ends=(), decode=str))
    batcher.pause()
    future = batcher.submit([task()])
    batcher.close()
    with pytest.raises(EngineError, match="stopping"):
        result(future)


def test_each_step_is_announced(batcher: Batcher) -> None:
    one, lengths = Running(task(most=5)), list[int]()
    result(batcher.start([one], on_step=lambda: lengths.append(len(one.tokens))))
    assert lengths == [2, 3, 4, 5]  # a step after the prompt was read adds the second token


def test_close_fails_waiting_requests(engine: TorchEngine) -> None:
    batcher = Batcher(Generation(engine._model, engine.serving, ends=(), decode=str))
    future = batcher.submit([task(most=LONG)])
    batcher.close()
    with pytest.raises(EngineError, match="stopping"):
        result(future)
    with pytest.raises(EngineError, match="stopping"):
        batcher.submit([task()])


def test_a_fair_lock_goes_to_the_waiting_thread() -> None:
    """One thread takes it again at once, and the other still gets it first."""
    lock, order = FairLock(), list[str]()

    def wait() -> None:
        with lock:
            order.append("waiting")

    for _ in range(20):
        with lock:
            waiting = threading.Thread(target=wait)
            waiting.start()
            eventually(lock._next.locked)
        with lock:
            order.append("again")
        waiting.join()
    assert order == ["waiting", "again"] * 20
