"""A rollout server: vLLM, a follower that updates its weights, and a proxy for clients.

    WEIGHTWIRE_URL    the run to follow; required
    MODEL             what vLLM starts from: a directory, or a model of the Hub. Default: the run itself
    PORT              port for clients. Default: 7860
    HOST              address for clients. Default: 127.0.0.1; in the image: 0.0.0.0
    VLLM_API_KEY      the token that clients must send, or WEIGHTWIRE_TOKEN. Required unless HOST is this machine
    WEIGHTWIRE_INSECURE   1: serve other machines without a token
    WEIGHTWIRE_NAME   name of this replica in `weightwire status`
    WEIGHTWIRE_DIR    directory of the replica. Default: ~/weightwire
    WEIGHTWIRE_MAX_BEHIND   clients get 503 while vLLM is more versions behind than this. Default: any number
    WEIGHTWIRE_MAX_LAG      clients get 503 while vLLM has been behind for longer, such as 60s. Default: any time
    VLLM_OPTIONS      more command line options for vLLM

If one part dies, or on SIGTERM, all parts stop. Knows processes and the source of the model. Knows nothing of weights.
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
from ready_gate import ReadyGate
from typer import BadParameter

from weightwire import Follower
from weightwire.chain.reader import read_run
from weightwire.cli.shared.bucket_command import duration, with_bucket
from weightwire.cli.shared.terminal import fail, say
from weightwire.errors import CannotListen, NoRun, WeightwireError
from weightwire.system import Access, Guard, read_token, resolve

_LOOK = 5.0  # seconds between checks for a run
_GRACE = 8.0  # seconds for all parts to stop: Docker kills after ten
# The files of a model that vLLM or a follower reads.
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
    limits: tuple[str, ...]  # options of `follow`
    access: Access

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Self:
        url, port = variables.get("WEIGHTWIRE_URL", "").strip(), variables.get("PORT", "7860")
        if not url:
            fail(
                "WEIGHTWIRE_URL is not set",
                "set it to the URL of a run: s3://BUCKET/PREFIX, hf://buckets/OWNER/NAME/PREFIX",
            )
        if not (port.isdecimal() and 0 < int(port) < 65536):
            fail(f"PORT is {port!r}, which is not a port", "unset it for 7860, or use a number from 1 to 65535")
        try:
            options = tuple(shlex.split(variables.get("VLLM_OPTIONS", "")))
        except ValueError as problem:
            fail(f"cannot parse VLLM_OPTIONS ({problem})", "quote it as in a shell")
        return cls(
            url,
            variables.get("MODEL", "").strip(),
            variables.get("HOST") or "127.0.0.1",
            int(port),
            variables.get("WEIGHTWIRE_NAME", ""),
            Path(variables.get("WEIGHTWIRE_DIR") or Path.home() / "weightwire").absolute(),
            options,
            _limits(variables),
            # vLLM checks its key only under /v1; the proxy checks it everywhere.
            Access(variables.get("VLLM_API_KEY") or read_token(), variables.get("WEIGHTWIRE_INSECURE") == "1"),
        )

    @property
    def replica(self) -> Path:
        return self.directory / "replica"


def _limits(variables: Mapping[str, str]) -> tuple[str, ...]:
    behind, lag = variables.get("WEIGHTWIRE_MAX_BEHIND", "").strip(), variables.get("WEIGHTWIRE_MAX_LAG", "").strip()
    if behind and not (behind.isascii() and behind.isdecimal()):
        fail(f"WEIGHTWIRE_MAX_BEHIND is {behind!r}, which is not a number of versions", "unset it, or use 4, say")
    try:
        duration(lag or "0")
    except BadParameter as problem:
        fail(f"WEIGHTWIRE_MAX_LAG: {problem.message}", "unset it, or use 60s, say")
    return (*(("--max-behind", behind) if behind else ()), *(("--max-lag", lag) if lag else ()))


def main() -> None:
    try:
        settings = Settings.read(os.environ)
        guard = _guard(settings)
    except WeightwireError as problem:
        fail(problem.message, problem.hint, problem.code)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    try:
        # Bind the port first: vLLM takes minutes to start.
        outside = _take_port(settings.host, settings.port)
        model = _model_of_hub(settings) if settings.model else _model_of_run(settings)
    except WeightwireError as problem:
        fail(problem.message, problem.hint, problem.code)
    sys.exit(asyncio.run(_serve(settings, outside, model, guard)))


def _guard(settings: Settings) -> Guard:
    """Fails if the address needs a token that is not there."""
    try:
        return Guard(settings.access, settings.host, resolve(settings.host, settings.port)[1][0])
    except OSError as problem:
        fail(f"{settings.host}: not an address ({problem})", "set HOST to an address of this machine")
    except CannotListen as problem:
        fail(
            problem.message, "set VLLM_API_KEY or WEIGHTWIRE_TOKEN; WEIGHTWIRE_INSECURE=1 admits everyone", problem.code
        )


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Exits by an exception, so that partly written files are removed."""
    sys.exit(0)


def _take_port(host: str, port: int) -> socket.socket:
    """Reserves the port. It does not accept connections yet."""
    outside = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    outside.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        outside.bind((host, port))
    except OSError as problem:
        fail(f"{host}:{port}: cannot listen ({problem.strerror})", "set PORT to a free port")
    return outside


# --- the model ---------------------------------------------------------------------------------------------------


def _model_of_run(settings: Settings) -> Path:
    """A checkpoint of the newest version of the run. Waits for the first version.

    It is a copy by hard links: the follower replaces `replica/current` while vLLM may still be reading.
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
            except NoRun:  # the run has no weights yet
                time.sleep(_LOOK)
        found, model = follower.checkpoint(), settings.directory / "model"
        if not (found / "config.json").is_file():
            fail(
                f"{settings.url}: the run has no config.json",
                "publish with files=, or set MODEL to a directory with config and tokenizer",
            )
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(found, model, copy_function=os.link)
    say(f"starting vLLM with version {version}")
    return model


def _model_of_hub(settings: Settings) -> Path:
    """Downloads the model: the follower also needs it if the run starts from this base and has no anchor."""
    _is_there(settings.url)  # report a wrong URL before the download
    if Path(settings.model).is_dir():
        return Path(settings.model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(settings.model, allow_patterns=_FILES))
    except Exception as problem:  # its errors have no common base
        reason = str(problem).partition("\n")[0][:200]
        fail(
            f"cannot download MODEL {settings.model!r} ({reason})", "set MODEL to a directory or to a model of the Hub"
        )


def _is_there(url: str) -> bool:
    """Whether the URL has a run. Raises if the URL is wrong or access is denied."""
    try:
        with_bucket(url, read_run)
    except NoRun:
        return False
    return True


# --- the processes -----------------------------------------------------------------------------------------------


async def _serve(settings: Settings, outside: socket.socket, model: Path, guard: Guard) -> int:
    """Serves until a signal (returns 0) or until a part dies (returns 1)."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server, status = f"http://127.0.0.1:{_free_port()}", f"127.0.0.1:{_free_port()}"
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(Child("vLLM", _vllm(settings, model, server), VLLM_SERVER_DEV_MODE="1"))
        if await _first(_healthy(server), stop.wait(), vllm.ended()) == 0:
            command = _follow(settings, model, server, status)
            follower = await stack.enter_async_context(Child("the follower", command))
            gate = ReadyGate(f"http://{status}/readyz", say)
            proxy = FilteringProxy(outside, server, guard, gate)
            stack.push_async_callback(proxy.close)
            await proxy.open()
            stack.callback(asyncio.create_task(gate.watch()).cancel)
            if await _first(gate.opened(), stop.wait(), vllm.ended(), follower.ended()) == 0:
                say(f"serving on http://{settings.host}:{settings.port}")
                await _first(stop.wait(), vllm.ended(), follower.ended())
    return 0 if stop.is_set() else 1


def _vllm(settings: Settings, model: Path, server: str) -> list[str]:
    # Some builds of vLLM have no `vllm serve`.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *settings.options]
    # After the user's options: the last one wins, and vLLM must listen on localhost.
    command += ["--host", "127.0.0.1", "--port", server.rpartition(":")[2], "--model", str(model)]
    command += ["--served-model-name", settings.model or "model"]
    # --enable-scale-out adds /inference/v1/generate, which reports the version of every token.
    return [*command, "--weight-transfer-config", '{"backend": "weightwire"}', "--enable-scale-out"]


def _follow(settings: Settings, model: Path, server: str, status: str) -> list[str]:
    command = [sys.executable, "-m", "weightwire", "follow", settings.url, "--into", str(settings.replica)]
    command += ["--engine", f"vllm={server}", "--listen", status, *settings.limits]
    command += ["--base", str(model)] if settings.model else []
    return [*command, "--name", settings.name] if settings.name else command


class Child:
    """A process. The end of the block stops it and all of its children."""

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
        """Waits for the end of the process and logs it."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        say(f"error: {self.name} {how}; stopping the server")

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
    """Returns the index of the coroutine that ends first, and cancels the others."""
    tasks = [asyncio.create_task(one) for one in work]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    first = next(number for number, task in enumerate(tasks) if task.done())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return first


async def _healthy(server: str) -> None:
    """Waits until the server responds."""
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
    # Skip Python's shutdown: threads of the object store's client may still call into it, and would abort.
    os._exit(code if isinstance(code, int) else 1)
