"""Paths that every bucket must reject, and odd names that every bucket must support."""

from __future__ import annotations

__all__ = ["BAD_PATHS", "ODD_NAMES"]

BAD_PATHS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a/..",
    "a\0b",
    "a\nb",
    "a\x7f",
    "a\\b",
    "\ud800",
    ".weightwire-1.partial",
    "a/.weightwire-1.partial",
]
ODD_NAMES = [
    " ",
    " a b ",
    "...",
    ".hidden",
    "-x",
    "~",
    "%",
    "%2F..%2F",
    "a+b&c=d;e,f",
    "a?b#c",
    "a'b\"c`d",
    "a*b<c>d|e",
    "a:b@c$d!e",
    "[a]{b}(c)^",
    "grüße",
    "e\u0301",
    "日本語",
    "🦜",
    "x" * 200,
]
