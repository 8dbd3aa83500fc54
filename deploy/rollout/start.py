"""A rollout server: vLLM, the follower that keeps its weights up to date, and a proxy through which clients reach it.

    WEIGHTWIRE_URL    the run to follow; needed
    MODEL             what vLLM starts from: a directory, or a model of the Hub. Without it: the run itself
    PORT              where clients come in: 7860
    HOST              on which address: 0.0.0.0
    WEIGHTWIRE_NAME   what `weightwire status` shows it under
    WEIGHTWIRE_DIR    where the replica is kept: ~/weightwire
    VLLM_OPTIONS      more options for vLLM, as on its command line

All of it ends together: when one part dies, or on SIGTERM. Knows processes, and where a model comes from; no weights.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from aiohttp import ClientError, ClientSession, ClientTimeout
from filtering_proxy import FilteringProxy

from weightwire import Follower
from weightwire.chain.reader import read_run
from weightwire.cli.shared.bucket_command import with_bucket
from weightwire.cli.shared.terminal import fail, say
from weightwire.errors import NoRun, WeightwireError

_LOOK = 5.0  # seconds between two looks for a run
_GRACE = 8.0  # seconds for all to end, before Docker's ten are over
# What a model is made of that vLLM, or a follower, reads.
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt"]


@dataclass(frozen=True)
class Settings:
    url: str
    model: str
    host: str
    port: int
    name: str
    directory: Path
    options: tuple[str, ...]

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Self:
        url, port = variables.get("WEIGHTWIRE_URL", "").strip(), variables.get("PORT", "7860")
        if not url:
            fail("WEIGHTWIRE_URL is not set", "set it to the run to follow: s3://BUCKET/PREFIX, hf://buckets/...")
        if not (port.isdecimal() and 0 < int(port) < 65536):
            fail(f"PORT is {port!r}, which is no port", "leave it at 7860, or name one from 1 to 65535")
        try:
            options = tuple(shlex.split(variables.get("VLLM_OPTIONS", "")))
        except ValueError as problem:
            fail(f"VLLM_OPTIONS cannot be read ({problem})", "quote it as in a shell")
        return cls(
            url,
            variables.get("MODEL", "").strip(),
            variables.get("HOST", "0.0.0.0"),
            int(port),
            variables.get("WEIGHTWIRE_NAME", ""),
            Path(variables.get("WEIGHTWIRE_DIR") or Path.home() / "weightwire").absolute(),
            options,
        )

    @property
    def replica(self) -> Path:
        return self.directory / "replica"


def main() -> None:
    settings = Settings.read(os.environ)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    try:
        # Now, and not when vLLM has started: that takes minutes.
        outside = _take_port(settings.host, settings.port)
        model = _model_of_hub(settings) if settings.model else _model_of_run(settings)
    except WeightwireError as problem:
        fail(problem.message, problem.hint)
    sys.exit(asyncio.run(_serve(settings, outside, model)))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """It was told to. By an exception, so that files half written are removed on the way out."""
    sys.exit(0)


def _take_port(host: str, port: int) -> socket.socket:
    """Ours from now on; nobody is let in yet."""
    outside = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    outside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        outside.bind((host, port))
    except OSError as problem:
        fail(f"{host}:{port}: cannot be listened on ({problem.strerror})", "set PORT to another one, or free it")
    return outside


# --- the model ---------------------------------------------------------------------------------------------------


def _model_of_run(settings: Settings) -> Path:
    """A whole checkpoint, from the run itself; waits for one that is still to come.

    A copy by hard links: the follower replaces `replica/current` while vLLM may still be reading what it was told to.
    """
    while not _is_there(settings.url):
        say(f"waiting for a run at {settings.url}, since MODEL is not set")
        time.sleep(_LOOK)
    say(f"fetching the model from {settings.url}")
    with Follower(settings.url, into=settings.replica, name=settings.name or None) as follower:
        version = None
        while version is None:
            try:
                version = follower.once()
            except NoRun:  # begun, and without weights yet
                time.sleep(_LOOK)
        found, model = follower.checkpoint(), settings.directory / "model"
        if not (found / "config.json").is_file():
            fail(
                f"{settings.url}: has no config.json",
                "publish with files=, or set MODEL to where config and tokenizer are",
            )
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(found, model, copy_function=os.link)
    say(f"starting from version {version}")
    return model


def _model_of_hub(settings: Settings) -> Path:
    """On this machine: the follower may need it too, where the run starts from it and has no anchor."""
    _is_there(settings.url)  # what is wrong with the URL is said before anything is downloaded
    if Path(settings.model).is_dir():
        return Path(settings.model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(settings.model, allow_patterns=_FILES))
    except Exception as problem:  # its errors have nothing in common
        reason = str(problem).partition("\n")[0][:200]
        fail(f"MODEL is {settings.model!r}, which cannot be had ({reason})", "name a directory, or a model of the Hub")


def _is_there(url: str) -> bool:
    """Whether there is a run. What is wrong with the URL, or with the rights to it, is raised."""
    try:
        with_bucket(url, read_run)
    except NoRun:
        return False
    return True


# --- the processes -----------------------------------------------------------------------------------------------


async def _serve(settings: Settings, outside: socket.socket, model: Path) -> int:
    """Until it is told to stop, which is 0, or one of them has ended, which is 1."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = f"http://127.0.0.1:{_free_port()}"
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(Child("vLLM", _vllm(settings, model, server), VLLM_SERVER_DEV_MODE="1"))
        if await _first(_healthy(server), stop.wait(), vllm.ended()) == 0:
            follower = await stack.enter_async_context(Child("the follower", _follow(settings, model, server)))
            proxy = FilteringProxy(outside, server)
            stack.push_async_callback(proxy.close)
            await proxy.open()
            say(f"serving on http://{settings.host}:{settings.port}")
            await _first(stop.wait(), vllm.ended(), follower.ended())
    return 0 if stop.is_set() else 1


def _vllm(settings: Settings, model: Path, server: str) -> list[str]:
    # `vllm serve` is not there in all builds of vLLM.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *settings.options]
    # After what the user wants: of two the last one counts, and where vLLM listens is no matter of taste.
    command += ["--host", "127.0.0.1", "--port", server.rpartition(":")[2], "--model", str(model)]
    command += ["--served-model-name", settings.model or "model"]
    # With /inference/v1/generate, which says of every token which version it came from.
    return [*command, "--weight-transfer-config", '{"backend": "weightwire"}', "--enable-scale-out"]


def _follow(settings: Settings, model: Path, server: str) -> list[str]:
    command = [sys.executable, "-m", "weightwire", "follow", settings.url, "--into", str(settings.replica)]
    command += ["--engine", f"vllm={server}"]
    command += ["--base", str(model)] if settings.model else []
    return [*command, "--name", settings.name] if settings.name else command


class Child:
    """A process and all that it starts: none of them is left when the block is over."""

    def __init__(self, name: str, command: Sequence[str], **variables: str) -> None:
        self.name = name
        self._command = command
        self._variables = variables
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, **self._variables},
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    async def ended(self) -> None:
        """Returns once it has, and says so."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        say(f"error: {self.name} ended {how}, and everything with it")

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _GRACE / 2)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


async def _first(*work: Coroutine[Any, Any, object]) -> int:
    """Which of them is done first. The others are given up."""
    tasks = [asyncio.create_task(one) for one in work]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    first = next(number for number, task in enumerate(tasks) if task.done())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return first


async def _healthy(server: str) -> None:
    """Returns once it answers."""
    async with ClientSession(timeout=ClientTimeout(total=5)) as session:
        while True:
            with suppress(ClientError, TimeoutError):
                async with session.get(f"{server}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


if __name__ == "__main__":
    code: object = 0
    try:
        main()
    except SystemExit as left:
        code = left.code
    sys.stdout.flush()
    sys.stderr.flush()
    # Not Python's own way out: threads of the object store's client may still report to it, and would abort.
    os._exit(code if isinstance(code, int) else 1)
