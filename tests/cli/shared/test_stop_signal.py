"""Ctrl-C and SIGTERM: the first one lets a command finish, the second one does not wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightwire.cli.shared.stop_signal import (
    CommandInterrupted,
    StopSignal,
    interrupt_leaves,
    output_left,
    stop_on_signal,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


class TestStopOnSignal:
    @pytest.mark.parametrize("number", SIGNALS)
    def test_first_signal_only_sets_the_event(self, number: int) -> None:
        with stop_on_signal() as stop:
            assert not stop.is_set()
            assert stop.number is None
            signal.raise_signal(number)
            assert stop.is_set()
            assert stop.number == number

    @pytest.mark.parametrize("first", SIGNALS)
    def test_second_ctrl_c_interrupts(self, first: int) -> None:
        with stop_on_signal() as stop:
            signal.raise_signal(first)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert stop.number == first

    @pytest.mark.parametrize("first", SIGNALS)
    def test_second_sigterm_exits_with_143(self, first: int) -> None:
        with stop_on_signal() as stop:
            signal.raise_signal(first)
            with pytest.raises(SystemExit) as exit:
                signal.raise_signal(signal.SIGTERM)
            assert exit.value.code == 143
            assert stop.number == first

    def test_handlers_from_before_return_at_the_end(self) -> None:
        def interrupted(number: int, frame: object) -> None: ...
        def terminated(number: int, frame: object) -> None: ...

        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGTERM, terminated)
        with pytest.raises(ZeroDivisionError), stop_on_signal():
            raise ZeroDivisionError
        assert [signal.getsignal(number) for number in SIGNALS] == [interrupted, terminated]


class TestFinish:
    def test_ctrl_c_ends_the_command_with_its_state(self, capsys: pytest.CaptureFixture[str]) -> None:
        stop = StopSignal()
        stop.number = signal.SIGINT
        with pytest.raises(CommandInterrupted, match=r"^the run is at version 1$"):
            stop.finish("the run is at version 1")
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("number", [signal.SIGTERM, None])
    def test_any_other_end_prints_the_state(self, number: int | None, capsys: pytest.CaptureFixture[str]) -> None:
        stop = StopSignal()
        stop.number = number
        stop.finish("the run is at version 1")
        assert capsys.readouterr().err == "stopped: the run is at version 1\n"


class TestInterruptLeaves:
    def test_state_is_described_after_the_cleanup(self) -> None:
        done: list[str] = []

        def clean_up() -> None:
            try:
                raise KeyboardInterrupt
            finally:
                done.append("cleaned up")

        with pytest.raises(CommandInterrupted, match=r"^cleaned up$") as caught, interrupt_leaves(lambda: done[-1]):
            clean_up()
        assert caught.value.__suppress_context__

    def test_other_errors_pass(self) -> None:
        with pytest.raises(ZeroDivisionError), interrupt_leaves(lambda: "not called"):
            raise ZeroDivisionError


class TestOutputLeft:
    def test_missing_output_was_not_written(self, tmp_path: Path) -> None:
        assert output_left(tmp_path / "out")() == f"nothing was written to {tmp_path / 'out'}"

    def test_new_output_is_complete(self, tmp_path: Path) -> None:
        describe = output_left(tmp_path / "out")
        (tmp_path / "out").write_text("new")
        assert describe() == f"{tmp_path / 'out'} is complete"

    def test_output_from_before_was_not_written(self, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("old")
        assert output_left(tmp_path / "out")() == f"nothing was written to {tmp_path / 'out'}"

    @pytest.mark.parametrize("is_same_file", [True, False])
    def test_replaced_output_is_complete(self, tmp_path: Path, is_same_file: bool) -> None:
        out, other = tmp_path / "out", tmp_path / "other"
        out.write_text("old")
        other.write_text("new")
        os.utime(out, ns=(1, 1))
        describe = output_left(out)
        if is_same_file:
            os.utime(out, ns=(2, 2))
        else:
            os.utime(other, ns=(1, 1))
            other.replace(out)
        assert describe() == f"{out} is complete"
