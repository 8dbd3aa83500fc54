"""Targets for JSON: the records of a run, and the small files of checkpoints, replicas and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from fuzz.json_mutations import mutate_json
from fuzz.target import Target, demand, verdict_of
from support.records import RUN_ID, a_run, chain_of, sha, shortcut_to, token
from weightwire.chain.record_paths import commit_path, number_of, side_path
from weightwire.chain.records import (
    Commit,
    Epoch,
    Gc,
    HeadHint,
    Heartbeat,
    PassedVersion,
    Record,
    Run,
    Shortcut,
    SideFile,
    SignOfLife,
    StageTiming,
    seal,
    unseal,
)
from weightwire.server.completion_request import ChatRequest, CompletionRequest, parse_chat, parse_completion

Seeds = tuple[bytes, ...]

STAGES = {"fetch": StageTiming(0.25, 100, 3.5), "apply": StageTiming(1.5)}


def side_file(name: str) -> SideFile:
    return SideFile(name, side_path(name, sha(name)), 3, sha(name))


def runs() -> list[Run]:
    tensors = {"w": ("BF16", (4, 8)), "é": ("F4", (2,)), "s": ("I64", ())}
    files = (side_file("config.json"), side_file("tokenizer/vocab.txt"))
    return [a_run(), a_run(mode="single-writer", tensors=tensors, aliases={"head": "w"}, files=files)]


def commits() -> list[Commit]:
    chain = [one.record for one in chain_of(5)] + [chain_of(2, "base")[1].record]
    timed = msgspec.structs.replace(chain[-1], step=7, source="s3://b/x", stages=STAGES, metrics={"a": 0.5, "b": None})
    return [*chain, timed]


def shortcuts() -> list[Shortcut]:
    return [shortcut_to(chain_of(4)[3])]


def heartbeats() -> list[Heartbeat]:
    recent = (PassedVersion(3, STAGES), PassedVersion(4, {}))
    first = Heartbeat(run=RUN_ID, name="gpu-0", version=4, head=5, lease=30.0)
    return [first, msgspec.structs.replace(first, host="h", trouble="t", stages=STAGES, served=-1, recent=recent)]


RECORDS: dict[str, tuple[type[Record], Callable[[], Iterable[Record]]]] = {
    "run": (Run, runs),
    "commit": (Commit, commits),
    "epoch": (Epoch, lambda: [Epoch(run=RUN_ID, epoch=3, write_id=token("w"), time=1.5, host="trainer")]),
    "shortcut": (Shortcut, shortcuts),
    "head": (HeadHint, lambda: [HeadHint(run=RUN_ID, version=3, anchor="shortcuts/3/anchor-0123456789abcdef.json")]),
    "alive": (SignOfLife, lambda: [SignOfLife(run=RUN_ID, epoch=2, version=3, commit=sha("c"), time=1.5)]),
    "gc": (Gc, lambda: [Gc(run=RUN_ID, below=9, time=1.5)]),
    "heartbeat": (Heartbeat, heartbeats),
}


def fields_of(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))


def check_record(kind: type[Record], data: bytes) -> str:
    """A record that is accepted survives being written and read again."""

    def decode() -> None:
        record = unseal(data, kind, "record").record
        demand(unseal(seal(record).data, kind, "record").record == record, "a record does not round-trip")
        use_record(record)

    return verdict_of(decode)


def use_record(record: Record) -> None:
    """What readers compute from a record must not fail for any that was accepted."""
    if isinstance(record, Run):
        demand(len(record.schema) == len(record.tensors) and record.nbytes >= 0 and record.parameters >= 0, "sizes")
    elif isinstance(record, Commit):
        demand(number_of(commit_path(record.version)) == record.version and record.nbytes >= 0, "the path of a commit")
    elif isinstance(record, Shortcut):
        demand(record.nbytes >= 0, "sizes")
    elif isinstance(record, Heartbeat):
        demand(record.alive_until(1.0) >= 1.0 and record.reached <= record.version, "a heartbeat's lease")
        demand(record.stopped == (record.lease == 0), "a stopped follower")


def record_target(name: str) -> Target:
    kind, made = RECORDS[name]
    words = tuple(dict.fromkeys((*fields_of(kind), *fields_of(SideFile), *fields_of(StageTiming), "anchor", "delta")))
    return Target(
        f"record-{name}",
        partial(check_record, kind),
        lambda data, rng: mutate_json(data, rng, words),
        lambda: [seal(record).data for record in made()],
        words,
    )


# --- completions -------------------------------------------------------------------------------------------------

REQUESTS = (
    b'{"prompt":"hi"}',
    b'{"prompt":["a","b"],"n":2,"max_tokens":5,"temperature":0.5,"top_p":0.9,"stop":["x"],"seed":1,"logprobs":2}',
    b'{"prompt":[1,2,3],"stop":"\\n","return_token_ids":true,"stream":false,"echo":null,"model":"m"}',
    b'{"prompt":[[1,2],[3]],"temperature":0}',
    b'{"prompt":"a","top_k":5,"min_p":0.1,"repetition_penalty":1.2,"presence_penalty":-1,"user":"u","best_of":1}',
)
CHATS = (
    b'{"messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}',
    b'{"messages":[{"role":"system","content":[{"type":"text","text":"a"}],"name":"b","refusal":null}],"n":2,'
    b'"logprobs":true,"top_logprobs":3,"max_completion_tokens":5,"chat_template_kwargs":{"x":[1]},"tools":[]}',
)


def check_completion(data: bytes) -> str:
    def decode() -> None:
        ask = parse_completion(data)
        demand(parse_completion(msgspec.json.encode(ask)) == ask, "a request does not round-trip")
        demand(1 <= len(ask.prompts) * (ask.n or 1) <= 4096 and all(ask.stops), "the limits of a request")

    return verdict_of(decode)


def check_chat(data: bytes) -> str:
    def decode() -> None:
        ask = parse_chat(data)
        demand(parse_chat(msgspec.json.encode(ask)) == ask, "a request does not round-trip")
        demand(1 <= ask.count <= 4096 and bool(ask.messages) and all(ask.stops), "the limits of a request")

    return verdict_of(decode)


def request_target(name: str, check: Callable[[bytes], str], kind: type[msgspec.Struct], seeds: Seeds) -> Target:
    words = fields_of(kind)
    return Target(name, check, lambda data, rng: mutate_json(data, rng, words), lambda: seeds, words)


REQUEST_TARGETS = [
    request_target("completion", check_completion, CompletionRequest, REQUESTS),
    request_target("chat", check_chat, ChatRequest, CHATS),
]

TARGETS = [*(record_target(name) for name in RECORDS), *REQUEST_TARGETS]
