"""Engines by name: built in, or from another package through an entry point."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import weightwire
from weightwire.engines.registry import EngineKind, engine_names, find_engine, open_engine, split_engine
from weightwire.engines.vllm import VllmEngine
from weightwire.errors import EngineError

PACKAGE = """
    from pathlib import Path
    from weightwire.engines import Program, EngineKind, ServedVersion, Swap

    class MadeUp:
        '''Writes every version that it is brought to a file: its URL.'''

        can_patch = False

        def __init__(self, url):
            self.name, self.holding = f"made-up engine {url}", None

        def attach(self, run=""):
            return self.holding

        def adopt(self, checkpoint, target):
            return False

        def reload(self, checkpoint, target):
            assert (checkpoint / "model.safetensors").exists()
            self.holding = target
            Path(self.name.split()[-1]).write_text(str(target.version))
            return Swap(0.0, 0.0)

        def close(self):
            pass

    KIND = EngineKind(MadeUp, launch=lambda model, port: Program(["serve", model, str(port)]))
    NOT_CALLABLE = 3

    def failing(url):
        raise ValueError("no such thing")

    def nothing(url):
        return None
"""

ENTRY_POINTS = """
    [weightwire.engines]
    madeup = madeup_engine:MadeUp
    kind = madeup_engine:KIND
    missing = madeup_engine:Missing
    unimportable = madeup_nowhere:Engine
    number = madeup_engine:NOT_CALLABLE
    raising = madeup_raising:Engine
    failing = madeup_engine:failing
    nothing = madeup_engine:nothing
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Installs a package with engines, and sets the environment so that commands find it."""
    site = tmp_path / "site"
    about = site / "madeup_engine-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "madeup_engine.py").write_text(textwrap.dedent(PACKAGE))
    (site / "madeup_raising.py").write_text("raise RuntimeError('not today')\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: madeup-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    yield site
    sys.modules.pop("madeup_engine", None)


def follow(run: Path, into: Path, engine: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "weightwire", "follow", str(run), "--into", str(into), "--once", "--engine", engine]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with weightwire.Publisher(tmp_path / "run") as publisher:
        publisher.publish({"x": np.arange(4, dtype=np.float32)})
    return tmp_path / "run"


def test_vllm_is_built_in() -> None:
    kind = find_engine("vllm")
    assert kind.connect is VllmEngine
    assert kind.rollout is not None
    assert kind.launch is not None
    assert engine_names() == ["sglang", "vllm", "vllm-draft", "vllm-lora"]


def test_the_error_of_an_unknown_engine_lists_the_known_engines(installed: Path) -> None:
    with pytest.raises(EngineError, match="unknown engine 'tensorrt'") as caught:
        open_engine("tensorrt=http://127.0.0.1:8000")
    known = (
        "failing, kind, madeup, missing, nothing, number, raising, sglang, unimportable, vllm, vllm-draft, vllm-lora"
    )
    assert caught.value.hint == f"known engines: {known}"


@pytest.mark.parametrize("text", ["", "vllm", "vllm=", "=http://127.0.0.1:8000", "http://127.0.0.1:8000"])
def test_an_engine_needs_a_name_and_a_url(text: str) -> None:
    with pytest.raises(EngineError, match="given as 'NAME=URL'") as caught:
        open_engine(text)
    assert caught.value.hint == "known engines: sglang, vllm, vllm-draft, vllm-lora"


def test_a_url_alone_means_the_default_engine() -> None:
    assert split_engine("http://host:1/a?b=c", default="vllm") == ("vllm", "http://host:1/a?b=c")
    assert split_engine("other=http://host:1/a?b=c", default="vllm") == ("other", "http://host:1/a?b=c")


def test_a_malformed_url_is_refused_without_connecting() -> None:
    with pytest.raises(EngineError, match=r"'127\.0\.0\.1:8000' is not the URL"):
        open_engine("vllm=127.0.0.1:8000")


def test_an_engine_that_cannot_keep_the_kv_cache_is_refused(installed: Path) -> None:
    with pytest.raises(EngineError, match="engine 'madeup' cannot keep the KV cache"):
        open_engine("madeup=file", "keep")
    engine = open_engine("vllm=http://127.0.0.1:9", "keep")
    assert isinstance(engine, VllmEngine)
    assert engine._keeps_cache
    assert not VllmEngine("http://127.0.0.1:9")._keeps_cache


def test_an_entry_point_may_name_a_class_or_a_kind(installed: Path) -> None:
    engine = open_engine("madeup=file")
    assert engine.name == "made-up engine file"
    assert find_engine("madeup").launch is None
    kind = find_engine("kind")
    assert isinstance(kind, EngineKind)
    assert kind.launch is not None
    assert kind.launch(Path("model"), 8000).argv == ["serve", Path("model"), "8000"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "cannot be loaded"),
        ("unimportable", "cannot be loaded"),
        ("raising", "cannot be loaded"),
        ("number", "has an entry point of type int"),
    ],
)
def test_a_broken_entry_point_is_one_clear_error(installed: Path, name: str, message: str) -> None:
    with pytest.raises(EngineError, match=f"engine '{name}' {message}") as caught:
        find_engine(name)
    assert caught.value.hint


@pytest.mark.parametrize(("name", "message"), [("failing", "ValueError: no such thing"), ("nothing", "returned None")])
def test_an_engine_that_cannot_be_opened_is_one_clear_error(installed: Path, name: str, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        open_engine(f"{name}=http://127.0.0.1:1")
    assert caught.value.hint


def test_listing_engines_imports_none_of_them(installed: Path) -> None:
    assert "madeup" in engine_names()
    assert "madeup_engine" not in sys.modules


def test_the_command_line_updates_an_installed_engine(installed: Path, run: Path, tmp_path: Path) -> None:
    ran = follow(run, tmp_path / "replica", f"madeup={tmp_path / 'served'}")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "served").read_text() == "1"
    assert "made-up engine" in ran.stderr


def test_the_command_line_lists_the_known_engines(installed: Path, run: Path, tmp_path: Path) -> None:
    ran = follow(run, tmp_path / "replica", "tensorrt=http://127.0.0.1:8000")
    said = " ".join(ran.stderr.split())
    assert ran.returncode == 2
    assert "unknown engine 'tensorrt'" in said
    assert "known engines: failing, kind, madeup" in said
