"""Records: read strictly, and believed in nothing that they cannot prove."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from support.records import RUN_ID, a_run, chain_of, file_of, sha, shortcut_to, state, token
from support.samples import below
from weightwire.chain.records import (
    Commit,
    DataFile,
    Epoch,
    Gc,
    HeadHint,
    Heartbeat,
    Record,
    Run,
    Shortcut,
    SideFile,
    StageTiming,
    commit_path,
    data_path,
    epoch_path,
    gc_path,
    heartbeat_path,
    replica_name_of,
    seal,
    shortcut_path,
    side_path,
    unseal,
)
from weightwire.chain.rules import check_run
from weightwire.errors import BrokenChain, ForeignRun, UnsupportedFormat
from weightwire.weights import DTYPES

Fields = dict[str, Any]

SIDE = SideFile("config.json", side_path("config.json", sha("config")), 7, sha("config"))
RECORDS: dict[str, Record] = {
    "run": a_run(aliases={"head": "w"}, files=(SIDE,)),
    "epoch": Epoch(run=RUN_ID, epoch=1, write_id=token("claim"), time=2.5, host="trainer-7"),
    "commit": chain_of(4)[3].record,
    "shortcut": shortcut_to(chain_of(4)[3]),
    "head": HeadHint(run=RUN_ID, version=3, anchor="shortcuts/3/anchor-0123456789abcdef.json", time=1.0),
    "gc": Gc(run=RUN_ID, below=3, time=1.0),
    "heartbeat": Heartbeat(run=RUN_ID, name="gpu-1", version=-1, head=4, lease=60.0, trouble="", host="h"),
}


def fields_of(record: Record) -> Fields:
    fields: Fields = json.loads(seal(record).data)
    return fields


def read(fields: Fields, kind: type[Record]) -> Record:
    return unseal(json.dumps(fields).encode(), kind, "memory://b/record").record


def commit_with(**fields: Any) -> Commit:
    """Version 3 of a chain, with some fields replaced."""
    record = read(fields_of(RECORDS["commit"]) | fields, Commit)
    assert isinstance(record, Commit)
    return record


def refused(fields: Fields, kind: type[Record]) -> str:
    with pytest.raises(BrokenChain) as caught:
        read(fields, kind)
    assert caught.value.message.startswith("memory://b/record: ")
    assert caught.value.hint
    return caught.value.message


def required(kind: type[Record]) -> set[str]:
    return {one.name for one in msgspec.structs.fields(kind) if one.required} | {"format"}


EVERY = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


class TestBytes:
    @EVERY
    def test_what_is_read_is_what_was_written(self, record: Record) -> None:
        sealed = seal(record)
        assert unseal(sealed.data, type(record), "").record == record

    @EVERY
    def test_are_the_same_every_time(self, record: Record) -> None:
        again = read(fields_of(record), type(record))
        assert seal(record).data == seal(again).data

    def test_are_pinned(self) -> None:
        """A change of these bytes is a change of the protocol."""
        assert seal(Gc(run=RUN_ID, below=3, time=1.5)).data == (
            b'{"format":"weightwire/1","run":"%s","below":3,"time":1.5}' % RUN_ID.encode()
        )

    def test_the_hash_is_that_of_the_bytes_as_they_lie_there(self) -> None:
        """Never of a re-encoding: another implementation may write its fields in another order."""
        record = RECORDS["commit"]
        other = json.dumps(fields_of(record), indent=1, sort_keys=True).encode()
        read_back = unseal(other, Commit, "")
        assert read_back.record == record
        assert read_back.data == other
        assert read_back.sha256 == sha(other.decode()) != seal(record).sha256

    def test_metrics_that_are_no_numbers_become_nothing(self) -> None:
        given = {"loss": 0.25, "reward": math.nan, "kl": math.inf, "steps": 3.0}
        sealed = seal(msgspec.structs.replace(chain_of(3)[2].record, metrics=given))
        assert unseal(sealed.data, Commit, "").record.metrics == {
            "loss": 0.25,
            "reward": None,
            "kl": None,
            "steps": 3.0,
        }

    def test_stages_travel_along(self) -> None:
        given = {"upload": StageTiming(0.125, 4096), "encode": StageTiming(2.0)}
        sealed = seal(msgspec.structs.replace(chain_of(3)[2].record, stages=given))
        assert unseal(sealed.data, Commit, "").record.stages == given


class TestReading:
    @EVERY
    def test_every_field_that_has_no_default_is_needed(self, record: Record) -> None:
        whole = fields_of(record)
        for name in required(type(record)):
            refused({key: value for key, value in whole.items() if key != name}, type(record))

    @EVERY
    @pytest.mark.parametrize("value", [[[1]], {"a": [1]}, True, "", -7, 0.5, 2**70, None], ids=str)
    def test_every_field_has_a_type(self, record: Record, value: Any) -> None:
        """Whatever is written there instead: it is refused, or it is of the field's own type."""
        whole, kind = fields_of(record), type(record)
        for one in msgspec.structs.fields(kind):
            try:
                made = read(whole | {one.name: value}, kind)
            except BrokenChain:
                continue
            taken = getattr(made, one.name)
            assert taken == value or (not taken and not value), one.name
            assert not isinstance(value, bool)

    @EVERY
    def test_fields_that_nobody_knows_are_ignored(self, record: Record) -> None:
        later = fields_of(record) | {"signature": "ed25519:00", "nested": {"a": [1, {"b": None}]}}
        assert read(later, type(record)) == record

    @EVERY
    @pytest.mark.parametrize("text", ["weightwire/2", "weightwire/10", "weightwire/0"])
    def test_another_version_of_the_protocol(self, record: Record, text: str) -> None:
        """Said before anything else: the rest may be quite different there."""
        with pytest.raises(UnsupportedFormat, match=text.partition("/")[2]) as caught:
            read({"format": text, "run": 5}, type(record))
        assert caught.value.hint == "upgrade weightwire"

    @pytest.mark.parametrize("text", ["", "other/1", "weightwire", "weightwire/", "weightwire/x", "weightwire/1 "])
    def test_another_format(self, text: str) -> None:
        assert "is no record of weightwire" in refused(fields_of(RECORDS["gc"]) | {"format": text}, Gc)

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"[]",
            b"null",
            b'"weightwire/1"',
            b"{",
            b"\xff\xfe{}",
            b'{"format": "weightwire/1"',
            b"[" * 100_000,
            b'{"x": ' * 100_000,
            b'{"format": "weightwire/1", "run": "\xff"}',
            b'{"format": "weightwire/1", "below": ' + b"9" * 10_000 + b"}",
        ],
        ids=lambda data: repr(data[:30]),
    )
    def test_bytes_that_are_no_record(self, data: bytes) -> None:
        with pytest.raises(BrokenChain):
            unseal(data, Gc, "memory://b/gc")

    @EVERY
    def test_bytes_that_rot(self, record: Record) -> None:
        """Any byte becomes any other: a record that fits, or one of two errors, and nothing else."""
        data = bytearray(seal(record).data)
        for place, value in zip(below(1, 3000, len(data)), below(2, 3000, 256), strict=True):
            kept, data[place] = data[place], int(value)
            with suppress(BrokenChain, UnsupportedFormat):
                unseal(bytes(data), type(record), "")
            data[place] = kept

    @EVERY
    def test_bytes_that_were_cut_off(self, record: Record) -> None:
        data = seal(record).data
        for end in range(len(data)):
            with pytest.raises(BrokenChain):
                unseal(data[:end], type(record), "")

    @pytest.mark.parametrize("run", ["", "x" * 32, RUN_ID.upper(), RUN_ID[:-1], RUN_ID + "0", RUN_ID + "\n"])
    def test_a_run_has_32_hex_digits(self, run: str) -> None:
        refused(fields_of(RECORDS["gc"]) | {"run": run}, Gc)

    def test_a_record_of_another_run(self) -> None:
        check_run(RECORDS["gc"], RUN_ID, "memory://b/gc")
        with pytest.raises(ForeignRun, match="two runs were mixed"):
            check_run(RECORDS["gc"], token("other"), "memory://b/gc")


class TestCommit:
    @pytest.mark.parametrize("name", ["version", "epoch", "changed"])
    @pytest.mark.parametrize("value", [-1, 2**53, 2**64, 1.0, "3"])
    def test_numbers_are_counts_that_every_json_reader_keeps(self, name: str, value: Any) -> None:
        refused(fields_of(RECORDS["commit"]) | {name: value}, Commit)

    def test_the_largest_number(self) -> None:
        assert commit_with(changed=2**53 - 1).changed == 2**53 - 1

    @pytest.mark.parametrize("name", ["parent", "before", "after"])
    @pytest.mark.parametrize("value", ["0", "g" * 64, sha("x").upper(), sha("x") + "\n", sha("x")[:-1]])
    def test_hashes_are_64_hex_digits(self, name: str, value: str) -> None:
        refused(fields_of(RECORDS["commit"]) | {name: value}, Commit)

    def test_a_write_id_has_32_hex_digits(self) -> None:
        refused(fields_of(RECORDS["commit"]) | {"write_id": sha("x")}, Commit)

    @pytest.mark.parametrize("kind", ["merge", "", "Delta", None])
    def test_a_kind_that_nobody_knows(self, kind: str | None) -> None:
        refused(fields_of(RECORDS["commit"]) | {"kind": kind}, Commit)

    @pytest.mark.parametrize("count", [0, 2, 40])
    def test_it_names_neither_more_nor_fewer_commits_further_back(self, count: int) -> None:
        message = refused(fields_of(RECORDS["commit"]) | {"back": [sha("x")] * count}, Commit)
        assert "too few or too many" in message

    def test_back_has_no_empty_hash(self) -> None:
        refused(fields_of(RECORDS["commit"]) | {"back": [""]}, Commit)

    def test_its_files_are_its_own(self) -> None:
        other = msgspec.to_builtins(file_of("delta", 4))
        assert "another version" in refused(fields_of(RECORDS["commit"]) | {"files": [other]}, Commit)

    def test_its_files_are_of_its_kind(self) -> None:
        other = msgspec.to_builtins(file_of("anchor", 3))
        assert "another kind" in refused(fields_of(RECORDS["commit"]) | {"files": [other]}, Commit)

    def test_there_is_so_much_to_fetch(self) -> None:
        files = (file_of("delta", 3, 10), replace_rank(file_of("delta", 3, 32), 1))
        assert msgspec.structs.replace(chain_of(4)[3].record, files=files).nbytes == 42


def replace_rank(file: DataFile, rank: int) -> DataFile:
    return DataFile(file.path, file.size, file.sha256, rank)


class TestKinds:
    """Version 3 follows a state, and its `before` is that of version 2."""

    def test_a_fence_changes_nothing(self) -> None:
        fence: Fields = {"kind": "fence", "files": [], "after": state(2)}
        commit_with(**fence)
        commit_with(**fence | {"before": "", "after": ""})
        refused(fields_of(RECORDS["commit"]) | fence | {"after": state(3)}, Commit)
        refused(fields_of(RECORDS["commit"]) | fence | {"files": fields_of(RECORDS["commit"])["files"]}, Commit)

    def test_a_base_is_the_first_state(self) -> None:
        base: Fields = {"kind": "base", "files": [], "before": ""}
        commit_with(**base, source="hf://model")
        refused(fields_of(RECORDS["commit"]) | base | {"before": state(2)}, Commit)
        refused(fields_of(RECORDS["commit"]) | base | {"after": ""}, Commit)
        refused(fields_of(RECORDS["commit"]) | base | {"files": fields_of(RECORDS["commit"])["files"]}, Commit)

    def test_an_anchor_has_files(self) -> None:
        anchor: Fields = {"kind": "anchor", "files": [msgspec.to_builtins(file_of("anchor", 3))]}
        commit_with(**anchor)
        commit_with(**anchor | {"before": ""})
        refused(fields_of(RECORDS["commit"]) | anchor | {"files": []}, Commit)
        refused(fields_of(RECORDS["commit"]) | anchor | {"after": ""}, Commit)

    def test_a_delta_has_a_state_to_start_from(self) -> None:
        refused(fields_of(RECORDS["commit"]) | {"before": ""}, Commit)
        refused(fields_of(RECORDS["commit"]) | {"after": ""}, Commit)

    def test_a_delta_without_files_changes_nothing(self) -> None:
        commit_with(files=[], after=state(2))
        refused(fields_of(RECORDS["commit"]) | {"files": []}, Commit)


HOSTILE = [
    "",
    "/",
    ".",
    "..",
    "../x",
    "a/../b",
    "a/./b",
    "a//b",
    "a/",
    "/etc/passwd",
    "..\\x",
    "a\\b",
    ".hidden",
    "a/.hidden",
    "a\nb",
    "a\0b",
    "a\u202eb",
]


class TestFiles:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_a_side_file_stays_in_its_directory(self, name: str) -> None:
        side = msgspec.to_builtins(SIDE) | {"name": name}
        refused(fields_of(RECORDS["run"]) | {"files": [side]}, Run)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer/vocab.txt", "ünï.txt", "a b", "LICENSE"])
    def test_plain_names_of_side_files(self, name: str) -> None:
        side = SideFile(name, side_path(name, sha("x")), 7, sha("x"))
        assert read(fields_of(a_run(files=(side,))), Run) == a_run(files=(side,))

    @pytest.mark.parametrize("name", ["model.safetensors", "more/x.safetensors"])
    def test_weights_are_no_side_file(self, name: str) -> None:
        side = msgspec.to_builtins(SIDE) | {"name": name}
        assert "weights are no side file" in refused(fields_of(RECORDS["run"]) | {"files": [side]}, Run)

    @pytest.mark.parametrize("last", [*HOSTILE, "x/y"])
    def test_a_side_files_path_stays_in_the_run(self, last: str) -> None:
        for path in (last, f"files/{last}", f"files/0123456789abcdef/{last}"):
            side = msgspec.to_builtins(SIDE) | {"path": path}
            refused(fields_of(RECORDS["run"]) | {"files": [side]}, Run)

    @pytest.mark.parametrize("what", [{"size": -1}, {"size": 2**53}, {"sha256": ""}, {"sha256": "x" * 64}])
    def test_sizes_and_hashes(self, what: Fields) -> None:
        refused(fields_of(RECORDS["run"]) | {"files": [msgspec.to_builtins(SIDE) | what]}, Run)
        data = msgspec.to_builtins(file_of("delta", 3)) | what
        refused(fields_of(RECORDS["commit"]) | {"files": [data]}, Commit)

    @pytest.mark.parametrize(
        "path",
        [
            *HOSTILE,
            "run.json",
            "deltas/3/../../run.json",
            "/deltas/3/e1-r0-0123456789abcdef.safetensors",
            "deltas/3/.e1-r0-0123456789abcdef.safetensors",
            "deltas\\3\\e1-r0-0123456789abcdef.safetensors",
            "deltas/-3/e1-r0-0123456789abcdef.safetensors",
            "deltas/٣/e1-r0-0123456789abcdef.safetensors",
            "deltas/3/e1-r0-0123456789ABCDEF.safetensors",
            "deltas/3/e1-r0-0123456789abcdef.safetensors\n",
            "commits/00000000000000000003.json",
        ],
    )
    def test_a_data_path_is_that_of_a_delta_or_anchor(self, path: str) -> None:
        data = msgspec.to_builtins(file_of("delta", 3)) | {"path": path}
        refused(fields_of(RECORDS["commit"]) | {"files": [data]}, Commit)


class TestRun:
    def test_has_a_schema_and_its_sizes(self) -> None:
        run = a_run(tensors={"a": ("BF16", (4, 8)), "b": ("F32", ())})
        assert run.schema == {"a": (DTYPES["BF16"], (4, 8)), "b": (DTYPES["F32"], ())}
        assert (run.parameters, run.nbytes) == (33, 68)

    def test_how_much_all_weights_are(self) -> None:
        tensors = {"a": ("BF16", (4, 8)), "b": ("F32", ()), "c": ("F4", (6,)), "d": ("U8", (0, 5))}
        assert a_run(tensors=tensors).nbytes == 64 + 4 + 3

    @pytest.mark.parametrize(
        "tensor",
        [["BF17", [1]], ["BF16", [-1]], ["BF16", [2**53]], ["F4", [3]], ["BF16", 3], ["BF16"], "BF16"],
        ids=str,
    )
    def test_tensors_that_cannot_be(self, tensor: Any) -> None:
        refused(fields_of(RECORDS["run"]) | {"tensors": {"w": tensor}, "aliases": {}}, Run)

    def test_an_alias_leads_to_a_tensor(self) -> None:
        assert "leads nowhere" in refused(fields_of(RECORDS["run"]) | {"aliases": {"head": "gone"}}, Run)

    @pytest.mark.parametrize("mode", ["", "relaxed", None])
    def test_a_mode_that_nobody_knows(self, mode: str | None) -> None:
        refused(fields_of(RECORDS["run"]) | {"mode": mode}, Run)


class TestShortcut:
    def test_leads_somewhere(self) -> None:
        refused(fields_of(RECORDS["shortcut"]) | {"files": []}, Shortcut)
        refused(fields_of(RECORDS["shortcut"]) | {"after": ""}, Shortcut)
        refused(fields_of(RECORDS["shortcut"]) | {"version": -1}, Shortcut)
        refused(fields_of(RECORDS["shortcut"]) | {"version": 4}, Shortcut)
        refused(fields_of(RECORDS["shortcut"]) | {"kind": "delta"}, Shortcut)

    def test_is_made_of_anchors(self) -> None:
        other = msgspec.to_builtins(file_of("delta", 3))
        refused(fields_of(RECORDS["shortcut"]) | {"files": [other]}, Shortcut)


class TestHeartbeat:
    @pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "..", "a b", "x" * 101, "a\n"])
    def test_a_name_is_plain(self, name: str) -> None:
        refused(fields_of(RECORDS["heartbeat"]) | {"name": name}, Heartbeat)

    def test_its_path_names_the_replica(self) -> None:
        assert replica_name_of(heartbeat_path("gpu-7")) == "gpu-7"
        assert [replica_name_of(path) for path in ("replicas/a/b.json", "replicas/a", "commits/a.json")] == [None] * 3


class TestPaths:
    def test_where_records_lie(self) -> None:
        assert commit_path(42) == "commits/00000000000000000042.json"
        assert epoch_path(3) == "epochs/00000003.json"
        assert gc_path(40) == "gc/00000000000000000040.json"
        assert heartbeat_path("gpu-1") == "replicas/gpu-1.json"

    def test_where_data_lies(self) -> None:
        assert data_path("delta", 42, 3, 1, sha("x")) == f"deltas/42/e3-r1-{sha('x')[:16]}.safetensors"
        assert data_path("anchor", 0, 1, 0, sha("x")) == f"anchors/0/e1-r0-{sha('x')[:16]}.safetensors"
        assert side_path("tokenizer/vocab.txt", sha("x")) == f"files/{sha('x')[:16]}/vocab.txt"

    def test_a_file_knows_its_version(self) -> None:
        assert file_of("delta", 1234).version == 1234

    def test_a_shortcut_is_named_by_what_it_says(self) -> None:
        commit = chain_of(4)[3]
        path = shortcut_path(seal(shortcut_to(commit)))
        assert path == f"shortcuts/3/anchor-{seal(shortcut_to(commit)).sha256[:16]}.json"
        assert path != shortcut_path(seal(shortcut_to(commit, size=5)))

    def test_commits_sort_by_version(self) -> None:
        paths = [commit_path(version) for version in (0, 9, 10, 99, 100, 2**53 - 1)]
        assert paths == sorted(paths)


def test_a_sealed_record_is_a_value() -> None:
    one = chain_of(3)[2]
    assert one == chain_of(3)[2]
    assert one != replace(one, data=one.data + b" ")
