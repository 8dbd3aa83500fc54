"""Which tokens came from which version, as reported by vLLM."""

from __future__ import annotations

from weightwire.engines.vllm.sample_versions import VersionSpan, oldest_version, spans_of


def test_a_sample_across_an_update_has_two_versions() -> None:
    choice = {
        "token_ids": [5] * 64,
        "weight_versions": [{"version": "41", "start": 0, "end": 17}, {"version": "42", "start": 17, "end": 64}],
    }
    assert spans_of(choice) == [VersionSpan(41, 0, 17), VersionSpan(42, 17, 64)]
    assert oldest_version(choice) == 41


def test_unpublished_weights_have_no_version() -> None:
    choice = {"weight_versions": [{"version": "default", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]}
    assert spans_of(choice) == [VersionSpan(None, 0, 2), VersionSpan(1, 2, 3)]
    assert oldest_version(choice) is None


def test_a_server_without_version_reports_gives_no_spans() -> None:
    assert spans_of({"token_ids": [1]}) == spans_of({"weight_versions": None}) == []
    assert oldest_version({"token_ids": [1]}) is None
