"""Attacks of a store, or of what is between it and its client: a server that answers anything."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from faults.proxy import Reply, Send, Trouble, truncate
from hostile.attacks import BAD, Attack, StoreRun
from support.followers import ALWAYS
from support.memory_s3 import listing
from support.stores import NOWHERE
from weightwire.errors import BrokenChain, BucketError, CorruptDelta, Unavailable, WeightwireError

__all__ = ["STORE_ATTACKS"]

COMMIT, DATA, LIST = f"commits/0+{BAD}.json", f"deltas/{BAD}/", "list-type=2"
_OBJECT = [("ETag", '"x"'), ("Last-Modified", "Tue, 01 Jan 2030 00:00:00 GMT")]
_HTML = Reply(200, [("Content-Type", "text/html"), *_OBJECT], b"<!DOCTYPE html><html>Please log in</html>" * 50)
_LAUGHS = b"".join(b'<!ENTITY l%d "%s">' % (one, b"&l%d;" % (one - 1) * 10) for one in range(1, 10))
_LAUGHS = b'<!DOCTYPE x [<!ENTITY l0 "x">' + _LAUGHS + b"]><ListBucketResult><Contents><Key>&l9;</Key>"


def changed(change: Callable[[Reply], Reply]) -> Trouble:
    """Changes the answer of an honest store."""
    return lambda send: change(send())


def answer(reply: Reply) -> Trouble:
    return lambda send: reply


def header(name: str, value: str) -> Trouble:
    """Sets a header. Removes it if the value is empty."""

    def change(reply: Reply) -> Reply:
        others = [one for one in reply.headers if one[0] != name]
        return replace(reply, headers=[*others, (name, value)] if value else others)

    return changed(change)


def flipped(reply: Reply) -> Reply:
    return replace(reply, body=reply.body[:-1] + bytes([reply.body[-1] ^ 1]))


def flapping() -> Trouble:
    """Every second answer is damaged, from the first on."""
    number = count()
    return lambda send: send() if next(number) % 2 else flipped(send())


def new_tags() -> Trouble:
    number = count()
    return lambda send: header("ETag", f'"{next(number)}"')(send)


def pages(of: Callable[[int], list[str]]) -> Trouble:
    """A listing without end."""
    number = count()

    def trouble(send: Send) -> Reply:
        page = next(number)
        return listing([(f"run/shortcuts/{BAD}/{name}", 5) for name in of(page)], more=f"page-{page}")

    return trouble


def keys(*names: str, size: int = 5) -> Trouble:
    return answer(listing([(name, size) for name in names]))


def attack(
    name: str,
    path: str,
    trouble: Trouble,
    error: type[WeightwireError] | None = None,
    says: str = "",
    *,
    method: str = "GET",
    waits: bool = False,
) -> Attack:
    def plant(run: StoreRun) -> None:
        run.store.trouble(method, path, trouble, ALWAYS)

    return Attack(name, plant, error, says, in_store=True, waits=waits)


SLOW = changed(lambda reply: replace(reply, pause=0.02))
SHORT = changed(lambda reply: replace(reply, missing=-100))
LONG = changed(lambda reply: replace(reply, body=reply.body + bytes(1 << 20)))
FLOOD = changed(lambda reply: replace(reply, headers=[*reply.headers, *((f"x-{i}", "x" * 1000) for i in range(3000))]))
ITSELF = f"/weights/run/commits/{BAD:020}.json"
BOMB = Reply(200, [("Content-Encoding", "gzip"), *_OBJECT], gzip.compress(bytes(17 << 20), 1))

STORE_ATTACKS = [
    attack("a slow commit", COMMIT, SLOW, Unavailable, "timed out", waits=True),
    attack("slow data", DATA, SLOW, Unavailable, "timed out", waits=True),
    attack("a slow listing", LIST, SLOW, waits=True),
    # lengths and ranges
    attack("a commit that is cut off", COMMIT, truncate, Unavailable, "body error"),
    attack("data that is cut off", DATA, truncate, Unavailable, "body error"),
    attack("a commit longer than announced", COMMIT, SHORT, BrokenChain, "it is not JSON"),
    attack("data longer than announced", DATA, SHORT, Unavailable, "closed during the download"),
    attack("more data than requested", DATA, LONG, Unavailable, "more bytes than were requested"),
    attack("another range", DATA, header("Content-Range", "bytes 5-100/200"), Unavailable, "got 5..101"),
    attack("no range", DATA, header("Content-Range", ""), Unavailable, "Content-Range header not present"),
    attack(
        "a range beyond 64 bits", DATA, header("Content-Range", f"bytes 0-{10**20}/5"), Unavailable, "Failed to parse"
    ),
    attack("status 200 for a range", DATA, changed(lambda one: replace(one, status=200)), Unavailable, "non-partial"),
    # redirects
    attack(
        "a redirect to a file",
        COMMIT,
        answer(Reply(302, [("Location", "file:///etc/hostname")], b"")),
        Unavailable,
        "302",
    ),
    attack("a redirect to itself", COMMIT, answer(Reply(302, [("Location", ITSELF)], b"")), Unavailable, "redirect"),
    attack(
        "a redirect elsewhere", DATA, answer(Reply(302, [("Location", f"{NOWHERE}/x")], b"")), Unavailable, "refused"
    ),
    attack("a redirect to nothing", COMMIT, answer(Reply(302, [], b"")), BucketError, "without LOCATION"),
    # pages instead of objects
    attack("a page for every object", "", answer(_HTML), BrokenChain, "it is not JSON"),
    attack("a page for data", DATA, answer(_HTML), Unavailable, "non-partial"),
    attack("a page for a listing", LIST, answer(_HTML)),
    attack("every object exists", "", answer(_HTML), method="HEAD"),
    attack("an empty answer", COMMIT, answer(Reply(204, _OBJECT, b"")), BrokenChain, "it is not JSON"),
    attack("a compressed bomb", COMMIT, answer(BOMB), BrokenChain, "it is not JSON"),
    attack("a flood of headers", COMMIT, FLOOD, Unavailable, "error sending request"),
    attack("a date that is none", COMMIT, header("Last-Modified", "never"), Unavailable, "Invalid last modified"),
    # objects that change
    attack("a commit that changes", COMMIT, flapping(), BrokenChain, "it is not JSON"),
    attack("data that changes", DATA, flapping(), CorruptDelta, "its hash does not match"),
    attack("tags that change", "", new_tags()),
    # listings
    attack("the same page again and again", LIST, pages(lambda page: [str(one) for one in range(300)])),
    attack("pages without end", LIST, pages(lambda page: [f"{page}-{one}" for one in range(300)])),
    attack("empty pages without end", LIST, pages(lambda page: []), waits=True),
    attack("a key with dots", LIST, keys("run/shortcuts/../../escape")),
    attack("a key with an empty part", LIST, keys("run/shortcuts//x")),
    attack("a key with an escape sequence", LIST, keys("run/shortcuts/\x9b2Jx")),
    attack("keys of another prefix", LIST, keys("run2/commits/x", "x")),
    attack("a negative size", LIST, keys("run/x", size=-5)),
    attack("a size beyond 64 bits", LIST, keys("run/x", size=10**30)),
    attack("a billion laughs", LIST, answer(Reply(200, [], _LAUGHS))),
]
