"""gc, verify, status and log: stdout, stderr and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.numpy

from support.clocked_bucket import beat, first_weights, publish, stepped
from support.clocked_bucket import run as run_now
from support.commands import Command, Ran
from support.stores import SeaweedFS, use
from weightwire.bucket.registry import open_bucket
from weightwire.chain.reader import read_run
from weightwire.chain.record_paths import commit_path, gc_path
from weightwire.cli.shared import bucket_command, terminal

AGO = r"(just now|[0-9.]+ s ago)"
"""How long ago the run was made, on machines of any speed."""


class Watched(Command):
    """A command that can also print as on a terminal."""

    def watched(self, *args: str | Path, width: int = 80) -> Ran:
        """Output as on a terminal, without colour."""
        with self._monkeypatch.context() as patch:
            patch.setenv("COLUMNS", str(width))
            patch.setattr(terminal, "stdout_is_watched", lambda: True)
            return self(*args)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Watched]:
    monkeypatch.setattr(terminal, "has_kernel", lambda: True)  # no note that it is missing
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    hook = sys.excepthook
    yield Watched(monkeypatch, capsys)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.excepthook = hook


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """Versions 0 to 7; 0 is a fence, and 1, 3, 5 and 7 have anchors."""
    publish(open_bucket(tmp_path / "run"), first_weights(), 7, anchor_every=2)
    return tmp_path / "run"


def put(url: Path, path: str, data: bytes) -> Path:
    (url / path).parent.mkdir(parents=True, exist_ok=True)
    (url / path).write_bytes(data)
    return url / path


def run_id(url: Path) -> str:
    return run_now(read_run(open_bucket(url))).run


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def objects(url: Path) -> set[str]:
    return {path.relative_to(url).as_posix() for path in url.rglob("*") if path.is_file()}


class TestGc:
    def test_gc_announces_and_then_deletes(self, run: Watched, url: Path) -> None:
        for path in url.rglob("*.*"):
            age(path, 3 * 86400)
        before = objects(url)

        first = run("gc", url)

        assert (first.code, first.out) == (0, "")
        assert first.err.splitlines()[:2] == [
            "nothing to delete",
            "data from version 5 on is kept: oldest anchor to keep",
        ]
        assert first.err.splitlines()[2].endswith(" below that will be deleted in 60 min")
        assert objects(url) - before == {gc_path(5)}

        age(url / gc_path(5), 2 * 3600)
        second = run("gc", url)

        assert second.err.startswith("deleted 6 objects, ")
        assert "  6 below version 5\n" in second.err
        assert sorted(int(path.name) for path in (url / "deltas").iterdir()) == [5, 6, 7]

    def test_gc_dry_run_lists_the_data_to_delete(self, run: Watched, url: Path) -> None:
        before = objects(url)

        ran = run("gc", url, "--dry-run", "--window", "0", "--grace", "0")

        assert ran.code == 0
        lines = [line.split() for line in ran.out.splitlines()]
        assert lines[0] == ["path", "bytes", "why"]
        listed = {line[0] for line in lines[1:]}
        assert listed == {path for path in before if path.split("/")[1:2] and path.split("/")[1] in "1234"}
        assert int(lines[1][1]) == (url / lines[1][0]).stat().st_size
        assert ran.err.startswith("would delete 6 objects, ")
        assert objects(url) == before

    def test_gc_keeps_the_requested_number_of_anchors(self, run: Watched, url: Path) -> None:
        figures = json.loads(run("gc", url, "--keep-anchors", "3", "--window", "0s", "--dry-run", "--json").out)
        assert (figures["below_version"], figures["anchor_versions"], figures["dry_run"]) == (3, [3, 5, 7], True)

    def test_gc_writes_json(self, run: Watched, url: Path) -> None:
        ran = run("gc", url, "--window", "0s", "--grace", "0s", "--json")

        figures = json.loads(ran.out)
        assert (figures["run"], figures["version"], figures["below_version"]) == (run_id(url), 7, 5)
        assert figures["limits"][0] == {"version": 5, "why": "oldest anchor to keep"}
        assert figures["bytes"] == sum(one["bytes"] for one in figures["removed"]) > 0
        assert figures["waiting"] == figures["leases"] == []

    def test_gc_names_the_replica_that_needs_data(self, run: Watched, url: Path) -> None:
        put(url, *beat(run_id(url), "slow", 2))
        ran = run("gc", url, "--window", "0s")
        assert "data from version 3 on is kept: replica slow is at version 2\n" in ran.err

    def test_gc_keeps_data_of_recent_versions(self, run: Watched, url: Path) -> None:
        assert "data from version 0 on is kept: needed for versions committed less than 24 h ago" in run("gc", url).err

    @pytest.mark.parametrize("wrong", ["1", "-1h", "1 week", "1e3s", "", "99999999999d", "nan", "1h1h"])
    def test_invalid_duration_is_refused(self, run: Watched, url: Path, wrong: str) -> None:
        ran = run("gc", url, f"--window={wrong}")
        assert ran.code == 2
        assert "is not a duration: use 90s, 30min, 24h or 7d" in ran.err

    def test_gc_keeps_at_least_one_anchor(self, run: Watched, url: Path) -> None:
        assert run("gc", url, "--keep-anchors", "0").code == 2

    def test_missing_run_is_an_error(self, run: Watched, tmp_path: Path) -> None:
        ran = run("gc", tmp_path)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("error: ")
        assert "\nhint: " in ran.err


class TestVerify:
    def test_intact_run_has_no_problems(self, run: Watched, url: Path) -> None:
        ran = run("verify", url)
        assert (ran.code, ran.out) == (0, "")
        first, second, last = ran.err.splitlines()
        assert first == "the chain is whole up to version 7, the newest"
        assert second.startswith("10 data files intact, ")
        assert last == "no problems found"

    def test_rebuild_reports_versions_and_anchors(self, run: Watched, url: Path) -> None:
        ran = run("verify", url, "--rebuild", "--threads", "1")
        assert ran.code == 0
        assert "rebuilt versions 1 to 7: all digests match\n" in ran.err
        assert "3 anchors compared with the rebuilt weights\n" in ran.err

    def test_verify_writes_one_line_per_problem(self, run: Watched, url: Path) -> None:
        damaged = [next((url / "deltas" / str(version)).iterdir()) for version in (2, 6)]
        for path in damaged:
            path.write_bytes(path.read_bytes()[:-1] + b"!")

        ran = run("verify", url)

        assert ran.code == 1
        assert ran.out.splitlines() == [
            f"{path.relative_to(url)}: corrupt: its hash does not match the record" for path in damaged
        ]
        assert ran.err.splitlines()[-1] == "2 problems found"
        assert "error" not in ran.err

    def test_broken_chain_is_a_problem(self, run: Watched, url: Path) -> None:
        (url / commit_path(4)).unlink()
        ran = run("verify", url)
        assert (ran.code, ran.out) == (1, f"{commit_path(4)}: missing, although later versions exist\n")
        assert ran.err.splitlines()[0] == "the chain is broken: whole up to version 3 of 7"

    def test_verify_writes_json(self, run: Watched, url: Path) -> None:
        (url / commit_path(7)).write_bytes(b"\x1b[31m")
        ran = run("verify", url, "--json")
        figures = json.loads(ran.out)
        assert (ran.code, figures["ok"], figures["version"], figures["whole_version"]) == (1, False, 7, 6)
        assert figures["problems"][0]["path"] == commit_path(7)

    def test_data_deleted_by_retention_is_not_a_problem(self, run: Watched, url: Path) -> None:
        run("gc", url, "--window", "0s", "--grace", "0s")
        ran = run("verify", url, "--rebuild")
        assert ran.code == 0
        assert "; 4 files below version 5 deleted by retention\n" in ran.err
        assert "rebuilt versions 5 to 7: " in ran.err

    def test_rebuild_of_a_run_from_a_base_needs_the_base(self, run: Watched, tmp_path: Path) -> None:
        weights = first_weights()
        safetensors.numpy.save_file(weights, tmp_path / "base.safetensors")
        safetensors.numpy.save_file(first_weights(8), tmp_path / "other.safetensors")
        url = tmp_path / "run"
        publish(open_bucket(url), stepped(weights, 1), 2, base=weights, anchor_every=100)

        assert run("verify", url).code == 0
        assert "cannot be rebuilt" in run("verify", url, "--rebuild").out
        fine = run("verify", url, "--rebuild", "--base", tmp_path / "base.safetensors")
        wrong = run("verify", url, "--rebuild", "--base", tmp_path / "other.safetensors")

        assert fine.code == 0
        assert "rebuilt versions 1 to 3: " in fine.err
        assert (
            wrong.code,
            wrong.err.startswith("error: the base does not hold the weights that the run starts from"),
        ) == (
            1,
            1,
        )

    def test_base_option_needs_rebuild(self, run: Watched, url: Path) -> None:
        ran = run("verify", url, "--base", url)
        assert ran.code == 2
        assert "needs --rebuild" in ran.err


@pytest.mark.parametrize("command", ["status", "log"])
def test_missing_commit_is_a_warning(run: Watched, url: Path, command: str) -> None:
    (url / commit_path(3)).unlink()
    ran = run(command, url)
    assert ran.code == 0
    assert "warning: " in ran.err
    assert commit_path(3) in ran.err
    assert "7" in ran.out


class TestStatus:
    def test_status_shows_the_facts_of_a_run(self, run: Watched, url: Path) -> None:
        ran = run("status", url)
        assert (ran.code, ran.err) == (0, "")
        facts = {line[:10].strip(): line[11:] for line in ran.out.splitlines()}
        assert facts["run"].startswith(f"{run_id(url)[:12]} at {url}")
        assert facts["weights"] == "2 tensors, 552 parameters, 2.1 kB"
        assert re.search(f", epoch 1, claimed {AGO}$", facts["publisher"])
        assert re.fullmatch(f"version 7, step 6, {AGO}", facts["newest"])
        assert facts["deltas"].startswith("402 B on average of the last 6, 5.3x smaller")
        assert facts["anchor"].startswith("version 7, ")
        assert facts["replicas"] == "none"
        assert "mode" not in facts

    def test_status_shows_a_table_of_replicas(self, run: Watched, url: Path) -> None:
        near, new, once = (
            beat(run_id(url), "near", 7),
            beat(run_id(url), "new", -1),
            beat(run_id(url), "once", 6, lease=0.0),
        )
        age(put(url, *beat(run_id(url), "far", 2, served=1, trouble="no space left")), 540)
        modified = time.time() + 60  # the newest objects define "now" if they are ahead of this machine's clock
        for path in [put(url, *one) for one in (near, new, once)]:
            os.utime(path, (modified, modified))

        lines = [re.split("  +", line) for line in run("status", url).out.split("\n\n")[1].splitlines()]
        assert lines == [
            ["replica", "version", "serves", "behind", "seen", "alive", "fetch", "apply", "pause", "trouble"],
            ["far", "2", "1", "6", "10 min ago", "no", "250 ms", "10 ms", "-", "no space left"],
            ["near", "7", "-", "0", "just now", "yes", "250 ms", "10 ms", "-", "-"],
            ["new", "-", "-", "-", "just now", "yes", "250 ms", "10 ms", "-", "-"],
            ["once", "6", "-", "1", "just now", "stopped", "250 ms", "10 ms", "-", "-"],
        ]
        assert "replicas   2 alive of 4, 1 stopped\n" in run("status", url).out

    def test_single_writer_mode_is_shown(self, run: Watched, tmp_path: Path) -> None:
        publish(open_bucket(tmp_path / "run"), first_weights(), 1, insist=True)
        ran = run("status", tmp_path / "run")
        assert "mode       single-writer: nothing stops a second publisher" in ran.out

    @pytest.mark.parametrize("watched", [False, True])
    def test_control_characters_are_escaped(self, run: Watched, url: Path, watched: bool) -> None:
        path, data = beat(run_id(url), "x", 2, trouble="\x1b[2Jgone\n[red]bad[/red]", host="\x1b[1m")
        put(url, path, data)
        ran = run.watched("status", url, width=200) if watched else run("status", url)
        assert "\x1b" not in ran.out
        assert "\\x1b[2Jgone\\n[red]bad[/red]" in ran.out

    def test_status_table_fits_80_columns(self, run: Watched, url: Path) -> None:
        put(url, *beat(run_id(url), "worker-17.region-2.example", 2, trouble="the bucket cannot be reached " * 5))
        table = run.watched("status", url).out.split("\n\n")[1]
        assert max(map(len, table.splitlines())) <= 80
        assert len(table.splitlines()) > 2

    def test_status_writes_json(self, run: Watched, url: Path) -> None:
        put(url, *beat(run_id(url), "x", 2))
        figures = json.loads(run("status", url, "--json").out)
        assert (figures["run"], figures["mode"], figures["newest"]["version"]) == (run_id(url), "strict", 7)
        assert (figures["tensors"], figures["weights"], figures["weights_bytes"]) == (2, 552, 2128)
        deltas = figures["deltas"]
        assert (deltas["count"], round(deltas["average_bytes"])) == (6, 402)
        assert deltas["ratio"] == pytest.approx(2128 / deltas["average_bytes"])
        assert figures["replicas"][0]["behind"] == 5
        assert figures["replicas"][0]["stages"]["apply"] == {"seconds": 0.01, "bytes": 0, "time": None}
        assert figures["replicas"][0]["served_version"] is None

    def test_status_json_has_no_negative_versions(self, run: Watched, url: Path) -> None:
        put(url, *beat(run_id(url), "new", -1, served=-1))
        [replica] = json.loads(run("status", url, "--json").out)["replicas"]
        assert (replica["version"], replica["served_version"], replica["behind"]) == (None, None, None)

    def test_status_mentions_retention_only_after_it_deleted_data(self, run: Watched, url: Path) -> None:
        run("gc", url, "--window", "0s")
        assert "\nretention " not in run("status", url).out
        run("gc", url, "--window", "0s", "--grace", "0s")
        assert "retention  data below version 5 is deleted\n" in run("status", url).out

    def test_status_shows_a_run_without_a_version(self, run: Watched, url: Path) -> None:
        for path in (url / "commits").iterdir():
            path.unlink()
        assert "newest     no version yet\n" in run("status", url).out

    def test_missing_run_is_an_error(self, run: Watched, tmp_path: Path) -> None:
        ran = run("status", tmp_path)
        assert (ran.code, ran.out) == (1, "")
        assert "nothing has been published there yet" in ran.err

    def test_unsupported_url_is_an_error(self, run: Watched) -> None:
        ran = run("status", "ftp://x/y")
        assert (ran.code, ran.out) == (1, "")
        assert "\nhint: use s3://" in ran.err


class TestLog:
    def test_log_writes_one_line_per_version(self, run: Watched, url: Path) -> None:
        ran = run("log", url)

        lines = [re.split("  +", line.strip()) for line in ran.out.splitlines()]
        assert lines[0] == [
            "version",
            "kind",
            "step",
            "when",
            "bytes",
            "anchor",
            "changed",
            "encode",
            "upload",
            "reward",
        ]
        assert [line[:3] for line in lines[1:3]] == [["7", "delta", "6"], ["6", "delta", "5"]]
        assert [line[:3] for line in lines[-2:]] == [["1", "anchor", "0"], ["0", "fence", "-"]]
        assert {len(line) for line in lines} == {10}
        delta, anchor = (next((url / kind / "7").iterdir()).stat().st_size for kind in ("deltas", "anchors"))
        assert re.fullmatch(AGO, lines[1][3])
        assert lines[1][4:7] == [terminal.byte_size(delta), terminal.byte_size(anchor), "11"]
        assert lines[2][5] == "-"  # no anchor beside version 6
        assert (lines[1][9], ran.err) == ("3", "")

    def test_log_limits_the_number_of_versions(self, run: Watched, url: Path) -> None:
        assert len(run("log", url, "-n", "3").out.splitlines()) == 4
        assert run("log", url, "-n", "0").code == 2

    def test_log_table_fits_a_terminal(self, run: Watched, url: Path) -> None:
        ran = run.watched("log", url)
        assert max(map(len, ran.out.splitlines())) <= 80
        assert re.search(AGO, ran.out)
        assert "\x1b" not in ran.out

    def test_log_writes_json(self, run: Watched, url: Path) -> None:
        versions = json.loads(run("log", url, "-n", "2", "--json").out)["versions"]
        assert [one["version"] for one in versions] == [7, 6]
        assert (versions[0]["metrics"], versions[0]["changed"]) == ({"reward": 3.0}, 11)
        assert versions[0]["stages"]["upload"]["bytes"] == versions[0]["bytes"]

    def test_log_of_a_run_without_a_version_is_empty(self, run: Watched, url: Path) -> None:
        for path in (url / "commits").iterdir():
            path.unlink()
        ran = run("log", url)
        assert (ran.code, ran.out, ran.err) == (
            0,
            "",
            "no version has been published yet: run `weightwire publish DIR URL`\n",
        )


def check_commands(run: Watched, url: str) -> None:
    publish(open_bucket(url), first_weights(), 3, anchor_every=1)
    assert "version 3, step 2" in run("status", url).out
    assert run("verify", url, "--rebuild").code == 0
    assert run("gc", url, "--window", "0", "--grace", "0", "--keep-anchors", "1").err.startswith("deleted ")
    assert len(run("log", url).out.splitlines()) == 5
    after = run("verify", url, "--rebuild")
    assert (after.code, after.out) == (0, "")
    assert "deleted by retention" in after.err


def test_every_command_works_on_memory_buckets(run: Watched) -> None:
    check_commands(run, "memory://cli/run")


class TestS3:
    def test_every_command_works_on_s3(
        self, run: Watched, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(monkeypatch, seaweedfs.env)
        check_commands(run, seaweedfs.url("cli/run"))

    def test_read_only_key_is_enough_for_all_commands_but_gc(
        self, run: Watched, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(monkeypatch, seaweedfs.env)
        url = seaweedfs.url("cli/read-only")
        publish(open_bucket(url), first_weights(), 5, anchor_every=1)

        use(monkeypatch, seaweedfs.env_of("reader"))

        codes = {command: run(*command.split(), url).code for command in ("status", "log", "verify", "gc --dry-run")}
        assert set(codes.values()) == {0}
        denied = run("gc", url, "--window", "0")
        assert (denied.code, denied.out) == (1, "")
        assert denied.err.startswith("error: ")
        assert "\nhint: " in denied.err


class TestTimes:
    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("0", 0),
            ("90s", 90),
            ("30m", 1800),
            ("30min", 1800),
            ("24h", 86400),
            ("1.5h", 5400),
            ("7d", 604800),
            (5.0, 5),
        ],
    )
    def test_duration_is_parsed_into_seconds(self, text: str | float, seconds: float) -> None:
        assert bucket_command.duration(text) == seconds

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (-5, "just now"),
            (0.9, "just now"),
            (1, "1.0 s ago"),
            (12, "12 s ago"),
            (119, "119 s ago"),
            (120, "2 min ago"),
            (7199, "120 min ago"),
            (7200, "2 h ago"),
            (3 * 86400, "3 days ago"),
            (1e300, "115741 days ago"),
        ],
    )
    def test_age_is_readable(self, seconds: float, text: str) -> None:
        assert bucket_command.ago(seconds) == text

    @pytest.mark.parametrize(
        ("seconds", "text"), [(0, "0 ms"), (0.0123, "12 ms"), (0.5, "500 ms"), (1.5, "1.5 s"), (9.96, "10 s")]
    )
    def test_short_duration_is_readable(self, seconds: float, text: str) -> None:
        assert bucket_command.span(seconds) == text
