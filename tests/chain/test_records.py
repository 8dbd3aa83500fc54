"""Records are decoded strictly."""

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
from weightwire.chain.record_paths import (
    commit_path,
    data_path,
    epoch_path,
    gc_path,
    heartbeat_path,
    replica_name_of,
    side_path,
)
from weightwire.chain.records import (
    Commit,
    Epoch,
    Gc,
    HeadHint,
    Heartbeat,
    Record,
    Run,
    Shortcut,
    SideFile,
    StageTiming,
    seal,
    shortcut_path,
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


class TestRecordBytes:
    @EVERY
    def test_record_survives_a_round_trip(self, record: Record) -> None:
        sealed = seal(record)
        assert unseal(sealed.data, type(record), "").record == record

    @EVERY
    def test_record_bytes_are_deterministic(self, record: Record) -> None:
        again = read(fields_of(record), type(record))
        assert seal(record).data == seal(again).data

    def test_record_bytes_are_pinned(self) -> None:
        """Changing these bytes changes the protocol."""
        assert seal(Gc(run=RUN_ID, below=3, time=1.5)).data == (
            b'{"format":"weightwire/1","run":"%s","below":3,"time":1.5}' % RUN_ID.encode()
        )

    def test_the_hash_is_of_the_stored_bytes(self) -> None:
        """A re-encoding could differ: another implementation may order its fields differently."""
        record = RECORDS["commit"]
        other = json.dumps(fields_of(record), sort_keys=True).encode()
        read_back = unseal(other, Commit, "")
        assert read_back.record == record
        assert read_back.data == other
        assert read_back.sha256 == sha(other.decode()) != seal(record).sha256

    def test_nan_metrics_become_null(self) -> None:
        given = {"loss": 0.25, "reward": math.nan, "kl": math.inf, "steps": 3.0}
        sealed = seal(msgspec.structs.replace(chain_of(3)[2].record, metrics=given))
        assert unseal(sealed.data, Commit, "").record.metrics == {
            "loss": 0.25,
            "reward": None,
            "kl": None,
            "steps": 3.0,
        }

    def test_stages_are_stored(self) -> None:
        given = {"upload": StageTiming(0.125, 4096), "encode": StageTiming(2.0)}
        sealed = seal(msgspec.structs.replace(chain_of(3)[2].record, stages=given))
        assert unseal(sealed.data, Commit, "").record.stages == given


class TestRecordDecoding:
    @EVERY
    def test_fields_without_a_default_are_required(self, record: Record) -> None:
        whole = fields_of(record)
        for name in required(type(record)):
            refused({key: value for key, value in whole.items() if key != name}, type(record))

    @EVERY
    @pytest.mark.parametrize("value", [[[1]], {"a": [1]}, True, "", -7, 0.5, 2**70, None], ids=str)
    def test_every_field_has_a_type(self, record: Record, value: Any) -> None:
        """Any other value is refused or has the field's type."""
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
    def test_unknown_fields_are_ignored(self, record: Record) -> None:
        later = fields_of(record) | {"signature": "ed25519:00", "nested": {"a": [1, {"b": None}]}}
        assert read(later, type(record)) == record

    @EVERY
    @pytest.mark.parametrize("text", ["weightwire/2", "weightwire/10", "weightwire/0"])
    def test_a_record_of_another_protocol_version_is_refused(self, record: Record, text: str) -> None:
        """This is checked first: all other fields may differ."""
        with pytest.raises(UnsupportedFormat, match=text.partition("/")[2]) as caught:
            read({"format": text, "run": 5}, type(record))
        assert caught.value.hint == "upgrade weightwire"

    @pytest.mark.parametrize("text", ["", "other/1", "weightwire", "weightwire/", "weightwire/x", "weightwire/1 "])
    def test_a_record_of_another_format_is_refused(self, text: str) -> None:
        assert "not a weightwire record" in refused(fields_of(RECORDS["gc"]) | {"format": text}, Gc)

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
    def test_malformed_record_bytes_are_refused(self, data: bytes) -> None:
        with pytest.raises(BrokenChain):
            unseal(data, Gc, "memory://b/gc")

    @EVERY
    def test_flipped_bytes_are_refused_or_valid(self, record: Record) -> None:
        """Any changed byte gives a valid record or one of two errors."""
        data = bytearray(seal(record).data)
        for place, value in zip(below(1, 3000, len(data)), below(2, 3000, 256), strict=True):
            kept, data[place] = data[place], int(value)
            with suppress(BrokenChain, UnsupportedFormat):
                unseal(bytes(data), type(record), "")
            data[place] = kept

    @EVERY
    def test_truncated_bytes_are_refused(self, record: Record) -> None:
        data = seal(record).data
        for end in range(len(data)):
            with pytest.raises(BrokenChain):
                unseal(data[:end], type(record), "")

    @pytest.mark.parametrize("run", ["", "x" * 32, RUN_ID.upper(), RUN_ID[:-1], RUN_ID + "0", RUN_ID + "\n"])
    def test_a_run_id_must_have_32_hex_digits(self, run: str) -> None:
        refused(fields_of(RECORDS["gc"]) | {"run": run}, Gc)

    def test_a_record_of_another_run_is_refused(self) -> None:
        check_run(RECORDS["gc"], RUN_ID, "memory://b/gc")
        with pytest.raises(ForeignRun, match="two runs are mixed"):
            check_run(RECORDS["gc"], token("other"), "memory://b/gc")


class TestCommit:
    @pytest.mark.parametrize("name", ["version", "epoch", "changed"])
    @pytest.mark.parametrize("value", [-1, 2**53, 2**64, 1.0, "3"])
    def test_numbers_outside_the_safe_range_of_json_are_refused(self, name: str, value: Any) -> None:
        refused(fields_of(RECORDS["commit"]) | {name: value}, Commit)

    def test_the_largest_safe_number_is_accepted(self) -> None:
        assert commit_with(changed=2**53 - 1).changed == 2**53 - 1

    @pytest.mark.parametrize("name", ["parent", "before", "after"])
    @pytest.mark.parametrize("value", ["0", "g" * 64, sha("x").upper(), sha("x") + "\n", sha("x")[:-1]])
    def test_hashes_must_have_64_hex_digits(self, name: str, value: str) -> None:
        refused(fields_of(RECORDS["commit"]) | {name: value}, Commit)

    def test_a_write_id_must_have_32_hex_digits(self) -> None:
        refused(fields_of(RECORDS["commit"]) | {"write_id": sha("x")}, Commit)

    @pytest.mark.parametrize("kind", ["merge", "", "Delta", None])
    def test_an_unknown_kind_of_commit_is_refused(self, kind: str | None) -> None:
        refused(fields_of(RECORDS["commit"]) | {"kind": kind}, Commit)

    @pytest.mark.parametrize("count", [0, 2, 40])
    def test_a_wrong_number_of_back_hashes_is_refused(self, count: int) -> None:
        message = refused(fields_of(RECORDS["commit"]) | {"back": [sha("x")] * count}, Commit)
        assert "the number of its back hashes is wrong" in message

    def test_an_empty_back_hash_is_refused(self) -> None:
        refused(fields_of(RECORDS["commit"]) | {"back": [""]}, Commit)

    def test_files_of_a_commit_must_be_of_its_version(self) -> None:
        other = msgspec.to_builtins(file_of("delta", 4))
        assert "another version" in refused(fields_of(RECORDS["commit"]) | {"files": [other]}, Commit)

    def test_files_of_a_commit_must_be_of_its_kind(self) -> None:
        other = msgspec.to_builtins(file_of("anchor", 3))
        assert "another kind" in refused(fields_of(RECORDS["commit"]) | {"files": [other]}, Commit)

    def test_files_of_a_commit_must_be_of_its_epoch(self) -> None:
        other = msgspec.to_builtins(file_of("delta", 3, epoch=2))
        assert "another epoch" in refused(fields_of(RECORDS["commit"]) | {"files": [other]}, Commit)

    @pytest.mark.parametrize("change", [{"rank": 1}, {"sha256": sha("another file")}])
    def test_the_path_of_a_file_must_name_its_rank_and_hash(self, change: Fields) -> None:
        other = msgspec.to_builtins(file_of("delta", 3)) | change
        assert "its rank or hash differs" in refused(fields_of(RECORDS["commit"]) | {"files": [other]}, Commit)

    @pytest.mark.parametrize("name", ["commit", "shortcut"])
    def test_a_rank_has_one_file(self, name: str) -> None:
        fields = fields_of(RECORDS[name])
        assert "two files of one rank" in refused(fields | {"files": fields["files"] * 2}, type(RECORDS[name]))

    def test_nbytes_of_a_commit_is_the_size_of_its_files(self) -> None:
        files = (file_of("delta", 3, 10), file_of("delta", 3, 32, rank=1))
        assert msgspec.structs.replace(chain_of(4)[3].record, files=files).nbytes == 42


class TestKinds:
    """Version 3 has a previous state: its `before` is the `after` of version 2."""

    def test_a_fence_changes_nothing(self) -> None:
        fence: Fields = {"kind": "fence", "files": [], "after": state(2)}
        commit_with(**fence)
        commit_with(**fence | {"before": "", "after": ""})
        refused(fields_of(RECORDS["commit"]) | fence | {"after": state(3)}, Commit)
        refused(fields_of(RECORDS["commit"]) | fence | {"files": fields_of(RECORDS["commit"])["files"]}, Commit)

    def test_a_base_must_be_the_first_state(self) -> None:
        base: Fields = {"kind": "base", "files": [], "before": ""}
        commit_with(**base, source="hf://model")
        refused(fields_of(RECORDS["commit"]) | base | {"before": state(2)}, Commit)
        refused(fields_of(RECORDS["commit"]) | base | {"after": ""}, Commit)
        refused(fields_of(RECORDS["commit"]) | base | {"files": fields_of(RECORDS["commit"])["files"]}, Commit)

    def test_an_anchor_must_have_files(self) -> None:
        anchor: Fields = {"kind": "anchor", "files": [msgspec.to_builtins(file_of("anchor", 3))]}
        commit_with(**anchor)
        commit_with(**anchor | {"before": ""})
        refused(fields_of(RECORDS["commit"]) | anchor | {"files": []}, Commit)
        refused(fields_of(RECORDS["commit"]) | anchor | {"after": ""}, Commit)

    def test_a_delta_must_have_a_state_to_start_from(self) -> None:
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
    def test_a_side_file_name_outside_its_directory_is_refused(self, name: str) -> None:
        side = msgspec.to_builtins(SIDE) | {"name": name}
        refused(fields_of(RECORDS["run"]) | {"files": [side]}, Run)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer/vocab.txt", "ünï.txt", "a b", "LICENSE"])
    def test_plain_side_file_names_are_accepted(self, name: str) -> None:
        side = SideFile(name, side_path(name, sha("x")), 7, sha("x"))
        assert read(fields_of(a_run(files=(side,))), Run) == a_run(files=(side,))

    @pytest.mark.parametrize("name", ["model.safetensors", "more/x.safetensors"])
    def test_a_weights_file_is_not_a_side_file(self, name: str) -> None:
        side = msgspec.to_builtins(SIDE) | {"name": name}
        assert "is a weights file, not a side file" in refused(fields_of(RECORDS["run"]) | {"files": [side]}, Run)

    @pytest.mark.parametrize("last", [*HOSTILE, "x/y"])
    def test_a_side_file_path_outside_the_run_is_refused(self, last: str) -> None:
        for path in (last, f"files/{last}", f"files/0123456789abcdef/{last}"):
            side = msgspec.to_builtins(SIDE) | {"path": path}
            refused(fields_of(RECORDS["run"]) | {"files": [side]}, Run)

    @pytest.mark.parametrize("what", [{"size": -1}, {"size": 2**53}, {"sha256": ""}, {"sha256": "x" * 64}])
    def test_malformed_file_sizes_and_hashes_are_refused(self, what: Fields) -> None:
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
    def test_a_data_path_must_be_that_of_a_delta_or_anchor(self, path: str) -> None:
        data = msgspec.to_builtins(file_of("delta", 3)) | {"path": path}
        refused(fields_of(RECORDS["commit"]) | {"files": [data]}, Commit)


class TestRun:
    def test_run_has_a_schema_and_its_sizes(self) -> None:
        run = a_run(tensors={"a": ("BF16", (4, 8)), "b": ("F32", ())})
        assert run.schema == {"a": (DTYPES["BF16"], (4, 8)), "b": (DTYPES["F32"], ())}
        assert (run.parameters, run.nbytes) == (33, 68)

    def test_nbytes_of_a_run_is_the_size_of_all_weights(self) -> None:
        tensors = {"a": ("BF16", (4, 8)), "b": ("F32", ()), "c": ("F4", (6,)), "d": ("U8", (0, 5))}
        assert a_run(tensors=tensors).nbytes == 64 + 4 + 3

    @pytest.mark.parametrize(
        "tensor",
        [["BF17", [1]], ["BF16", [-1]], ["BF16", [2**53]], ["F4", [3]], ["BF16", 3], ["BF16"], "BF16"],
        ids=str,
    )
    def test_invalid_tensors_are_refused(self, tensor: Any) -> None:
        refused(fields_of(RECORDS["run"]) | {"tensors": {"w": tensor}, "aliases": {}}, Run)

    def test_an_alias_must_name_a_tensor(self) -> None:
        assert "names an unknown tensor" in refused(fields_of(RECORDS["run"]) | {"aliases": {"head": "gone"}}, Run)

    @pytest.mark.parametrize("mode", ["", "relaxed", None])
    def test_an_unknown_mode_of_a_run_is_refused(self, mode: str | None) -> None:
        refused(fields_of(RECORDS["run"]) | {"mode": mode}, Run)


class TestShortcut:
    def test_shortcut_must_have_a_version_and_files(self) -> None:
        refused(fields_of(RECORDS["shortcut"]) | {"files": []}, Shortcut)
        refused(fields_of(RECORDS["shortcut"]) | {"after": ""}, Shortcut)
        refused(fields_of(RECORDS["shortcut"]) | {"version": -1}, Shortcut)
        refused(fields_of(RECORDS["shortcut"]) | {"version": 4}, Shortcut)
        refused(fields_of(RECORDS["shortcut"]) | {"kind": "delta"}, Shortcut)
        refused(fields_of(RECORDS["shortcut"]) | {"files": fields_of(RECORDS["shortcut"])["files"] * 2}, Shortcut)

    def test_files_of_a_shortcut_must_be_anchors(self) -> None:
        other = msgspec.to_builtins(file_of("delta", 3))
        refused(fields_of(RECORDS["shortcut"]) | {"files": [other]}, Shortcut)


class TestHeartbeat:
    @pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "..", "a b", "x" * 101, "a\n"])
    def test_a_malformed_replica_name_is_refused(self, name: str) -> None:
        refused(fields_of(RECORDS["heartbeat"]) | {"name": name}, Heartbeat)

    def test_heartbeat_path_names_the_replica(self) -> None:
        assert replica_name_of(heartbeat_path("gpu-7")) == "gpu-7"
        assert [replica_name_of(path) for path in ("replicas/a/b.json", "replicas/a", "commits/a.json")] == [None] * 3


class TestPaths:
    def test_paths_of_records_are_pinned(self) -> None:
        assert commit_path(42) == "commits/00000000000000000042.json"
        assert epoch_path(3) == "epochs/00000003.json"
        assert gc_path(40) == "gc/00000000000000000040.json"
        assert heartbeat_path("gpu-1") == "replicas/gpu-1.json"

    def test_paths_of_data_are_pinned(self) -> None:
        assert data_path("delta", 42, 3, 1, sha("x")) == f"deltas/42/e3-r1-{sha('x')[:16]}.safetensors"
        assert data_path("anchor", 0, 1, 0, sha("x")) == f"anchors/0/e1-r0-{sha('x')[:16]}.safetensors"
        assert side_path("tokenizer/vocab.txt", sha("x")) == f"files/{sha('x')[:16]}/vocab.txt"

    def test_a_data_file_has_the_version_of_its_path(self) -> None:
        assert file_of("delta", 1234).version == 1234

    def test_a_shortcut_path_contains_its_hash(self) -> None:
        commit = chain_of(4)[3]
        path = shortcut_path(seal(shortcut_to(commit)))
        assert path == f"shortcuts/3/anchor-{seal(shortcut_to(commit)).sha256[:16]}.json"
        assert path != shortcut_path(seal(shortcut_to(commit, size=5)))

    def test_commit_paths_sort_by_version(self) -> None:
        paths = [commit_path(version) for version in (0, 9, 10, 99, 100, 2**53 - 1)]
        assert paths == sorted(paths)


def test_sealed_records_are_compared_by_value() -> None:
    one = chain_of(3)[2]
    assert one == chain_of(3)[2]
    assert one != replace(one, data=one.data + b" ")
