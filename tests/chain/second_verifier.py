"""Verify a run in a directory by PROTOCOL.md: run.json, all commits, signatures, and the hashes of all files."""

import json
import os
import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import file_digest, sha256
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

MIB, NUMBERED, BAD_INPUT = 2**20, "[0-9]" * 20 + ".json", (OSError, ValueError, RecursionError)
Check = Callable[..., Any]  # of a JSON value; or a function that makes such a check
integer: Check = lambda v: type(v) is int and abs(v) < 2**53  # True and 2.0 are not integers
natural: Check = lambda v: integer(v) and v >= 0
number: Check = lambda v: type(v) in (int, float) and isfinite(v)
maybe: Check = lambda check: lambda v: v is None or check(v)
match: Check = lambda pattern: lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None
text, hex32, hex64, state = map(match, (r"(?s)[^\ud800-\udfff]*", "[0-9a-f]{32}", "[0-9a-f]{64}", "([0-9a-f]{64})?"))
list_of: Check = lambda check, most=2**53: lambda v: isinstance(v, list) and len(v) <= most and all(map(check, v))
map_of: Check = lambda check: lambda v: isinstance(v, dict) and all(text(name) and check(v[name]) for name in v)
fields: Check = lambda rules: lambda v: isinstance(v, dict) and all(field(v, name, rules[name]) for name in rules)
field: Check = lambda v, key, check: demand(check(v.get(key.strip("*"))) or not (key in v or "*" in key), f"bad {key}")
key_list: Check = lambda v: list_of(hex64, 16)(v) and len({*v}) == len(v)
dtype = match("BOOL|[UI](8|16|32|64)|B?F16|F32|[FC]64|F8_(E4M3|E5M2)(FNUZ)?|F8_E8M0|F6_(E2M3|E3M2)|F4")
fits: Check = lambda name, shape: prod(shape) * int(re.sub("_.*|[A-Z]", "", name) or 8) in range(0, 2**56, 8)
pair: Check = lambda v: isinstance(v, list) and len(v) == 2 and dtype(v[0]) and list_of(natural, 64)(v[1])
side_name = match(r"(?!.*\.safetensors(\.index\.json)?$)[^./\\][^/\\]*(/[^./\\][^/\\]*)*")  # no part begins with a dot
RECORD = {"format*": match("weightwire/1"), "run*": hex32, "time": number}  # a star marks a required field
HEAD, STATES = {"size*": natural, "sha256*": hex64}, {"before": state, "after": state}
FILE, STAGE = {"path*": text, "size*": natural, "sha256*": hex64}, {"seconds*": number, "bytes": natural, "at": number}
RUN = RECORD | {"time*": number, "mode*": match("strict|single-writer"), "aliases": map_of(text), "keys": key_list}
RUN |= {"tensors*": map_of(lambda v: pair(v) and fits(*v)), "files": list_of(fields(FILE | {"name*": side_name}))}
COMMIT = RECORD | {"version*": natural, "epoch*": natural, "write_id*": hex32, "parent*": hex64, "back": list_of(hex64)}
COMMIT |= STATES | {"kind*": match("fence|base|anchor|delta"), "keys": key_list, "keys_from": maybe(natural)}
COMMIT |= {"files": list_of(fields(FILE | {"rank": natural, "head": maybe(fields(HEAD))})), "changed": natural}
COMMIT |= {"source": text, "step": maybe(integer), "metrics": map_of(maybe(number)), "stages": map_of(fields(STAGE))}
EMPTY: Any = {"aliases": {}, "keys": [], "files": [], "back": [], "before": "", "after": "", "keys_from": None}


class Refused(ValueError): ...


class Verified(NamedTuple):
    run: str
    version: int
    commit: str  # hash of the newest commit
    state: str  # its `after`


def demand(condition: object, rule: str) -> bool:
    if not condition:
        raise Refused(rule)
    return True


def parse(data: bytes, rules: dict[str, Check]) -> Any:  # int() refuses NaN; 20 digits are too many for any field
    value = json.loads(data.decode(), parse_int=lambda n: int(n[:20]), parse_constant=int)
    return demand(fields(rules)(value), "not a JSON object") and EMPTY | value


def read(bucket: Path, path: str, limit: int, keep: bool = True) -> tuple[bytes, str, int]:
    with open(bucket / path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        demand(os.path.isfile(fd := stream.fileno()) and os.path.getsize(fd) <= limit, "not a file, or too large")
        data = stream.read(limit) if keep else b""
        return data, file_digest(stream, lambda: sha256(data)).hexdigest(), stream.tell()


def check_run(run: dict[str, Any]) -> None:
    demand(set(run["aliases"].values()) <= run["tensors"].keys(), "alias of an unknown tensor")
    sizes, names = [file["size"] for file in run["files"]], sorted(file["name"] + "/" for file in run["files"])
    demand(max(sizes, default=0) <= 64 * MIB and sum(sizes) <= 1024 * MIB, "side files are too large")
    demand(not any(map(str.startswith, names[1:], names)), "a side file occurs twice or is a folder of another")
    paths = [f"files/{file['sha256'][:16]}/{file['name'].rpartition('/')[2]}" for file in run["files"]]
    demand("".join(names).isprintable() and paths == [file["path"] for file in run["files"]], "path of a side file")


def check_commit(commit: dict[str, Any], previous: dict[str, Any], version: int, hashes: dict[int, str]) -> None:
    kind, epoch, before, after, files = (commit[field] for field in ("kind", "epoch", "before", "after", "files"))
    expected = {"run": previous["run"], "version": version, "parent": hashes[version - 1], "before": previous["after"]}
    expected["back"] = [hashes[version - 2**k] for k in range(1, version.bit_length())]
    expected["keys_from"] = version - 1 if previous["keys"] else previous["keys_from"]
    demand(not (bad := [name for name in expected if commit[name] != expected[name]]), f"does not fit the chain: {bad}")
    demand(epoch > previous["epoch"] if kind == "fence" else epoch == previous["epoch"] > 0, "epoch")
    rules = {"fence": before == after and not files, "base": after and not before and not files}
    rules |= {"anchor": after and files, "delta": before and after and (files or before == after)}
    demand(rules[kind] and (kind == "fence" or not commit["keys"]), f"before, after, files or keys of kind {kind}")
    ranked = {f.get("rank", 0): f["sha256"][:16] for f in files}
    paths = [f"{kind}s/{version}/e{epoch}-r{rank}-{digest}.safetensors" for rank, digest in ranked.items()]
    demand(all(0 < f["head"]["size"] <= f["size"] for f in files if f.get("head")), "size of a head")
    demand(paths == [f["path"] for f in files], "path of data, or two files of one rank")


def signer(stored: bytes) -> str | None:  # None if no signature is valid
    record, newline, line = stored.partition(b"\n")
    signed = re.fullmatch(rb'{"key":"([0-9a-f]{64})","signature":"([0-9a-f]{128})"}', line) if newline else None
    demand(signed or not newline, "the second line is not a signature")
    with suppress(InvalidSignature, ValueError):  # without a signature, unpacking fails
        key, signature = [bytes.fromhex(part.decode()) for part in (signed.groups() if signed else ())]
        return Ed25519PublicKey.from_public_bytes(key).verify(signature, b"weightwire/1 commit\n" + record) or key.hex()
    return None


def gone_below(bucket: Path, run: str, newest: int) -> int:  # data below this version may be gone
    for path in sorted((bucket / "gc").glob(NUMBERED), reverse=True):
        with suppress(*BAD_INPUT):
            record = parse(read(bucket, f"gc/{path.name}", 2**16)[0], RECORD | {"below*": natural})
            if record["run"] == run and record["below"] == int(path.stem) <= newest:
                return int(path.stem)
    return 0


def verify(bucket: Path, trusted: Collection[str] = ()) -> Verified:
    try:
        stored, digest, _ = read(bucket, where := "run.json", 64 * MIB)
        check_run(run := parse(stored, RUN))
        hashes, keys, trust = {-1: digest}, dict[Any, Any]({None: run["keys"]}), dict[Any, Any]({None: False})
        commit, where = EMPTY | {"run": run["run"], "epoch": 0}, "commits"  # what commit 0 must follow, as a fence
        names = sorted(path.name for path in (bucket / where).glob(NUMBERED))
        demand(names and names == [f"{version:020}.json" for version in range(len(names))], "a commit is missing")
        files = [(len(names), f["path"], f["size"], f["sha256"]) for f in run["files"]]  # the first field is for gc
        for version, name in enumerate(names):
            stored, hashes[version], _ = read(bucket, where := f"commits/{name}", MIB)
            previous, commit = commit, parse(stored.partition(b"\n")[0], COMMIT)
            check_commit(commit, previous, version, hashes)
            files += [(version, f["path"], f["size"], f["sha256"]) for f in commit["files"]]
            key, source, keys[version] = signer(stored), commit["keys_from"], commit["keys"]
            trust[version] = key in keys[source] and (key in trusted or trust[source]) and trust[source] is not None
            if trust[source] is None or (trust[source] and commit["keys"] and not trust[version]):
                trust[version] = None  # an untrusted fence after a trusted one: nothing after it is trusted
        demand(trust[version] or not trusted, "not trusted")
        gone = gone_below(bucket, run["run"], version)
        for at, path, size, digest in files:
            if at >= gone or os.path.lexists(bucket / path):
                demand(read(bucket, where := path, size, keep=False)[1:] == (digest, size), "damaged")
    except BAD_INPUT as error:
        raise Refused(f"{where}: {error}") from error
    return Verified(run["run"], version, hashes[version], commit["after"])


if __name__ == "__main__":
    try:
        print("verified:", verify(Path(*sys.argv[1:2]), sys.argv[2:]))
    except Refused as error:
        sys.exit(f"refused: {str(error)!a}")
