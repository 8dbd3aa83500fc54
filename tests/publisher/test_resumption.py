"""A publisher whose first weights do not continue the run says so, once, and publishes them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from support.failing_bucket import Troubled, denied
from support.rank_circle import at_step, on_all, shard
from support.records import chain_of, file_of
from support.run_contents import commits_in, version_in
from support.small_weights import initial, state, train
from weightwire import digest
from weightwire.errors import PermissionDenied
from weightwire.publisher.publisher import Publisher
from weightwire.publisher.resumption import Resumption
from weightwire.telemetry.events import Event

WEIGHTS = 6406  # in `initial()`


def trained(steps: int) -> dict[str, Any]:
    weights = initial()
    for step in range(steps):
        train(weights, step)
    return weights


def publish(bucket: Troubled, *versions: tuple[dict[str, Any], int | None], **options: Any) -> list[str]:
    """Publishes weights and steps with a new publisher. Returns its warnings."""
    events: list[Event] = []
    with Publisher(bucket, on_event=events.append, **options) as publisher:
        for weights, step in versions:
            publisher.publish(weights, step=step).wait()
    return [event.message for event in events if event.stage == "warning"]


class TestWarning:
    def test_a_restart_from_old_weights_is_reported_once(self, bucket: Troubled) -> None:
        assert publish(bucket, (trained(0), 40), (trained(2), 41)) == []
        [warning] = publish(bucket, (trained(0), 0), (trained(1), 1))

        changed = commits_in(bucket)[4].changed
        assert 0 < changed < WEIGHTS
        assert f"{changed:,} of {WEIGHTS:,} weights ({100 * changed / WEIGHTS:.2g}%) differ" in warning
        assert "differ from version 2, the newest" in warning
        assert "the step decreases from 41 to 0" in warning
        assert "They are now version 4" in warning
        assert f"weightwire restore {bucket.url} --version 2 -o DIR" in warning
        assert version_in(bucket) == digest(trained(1))

    @pytest.mark.parametrize(("before", "now"), [(41, 41), (41, None), (None, 41), (None, None)])
    def test_other_weights_are_reported_unless_the_step_goes_forward(
        self, bucket: Troubled, before: int | None, now: int | None
    ) -> None:
        publish(bucket, (trained(2), before))
        [warning] = publish(bucket, (trained(0), now))
        assert "weights" in warning
        assert "decreases" not in warning

    def test_the_version_before_the_fences_of_other_publishers_counts(self, bucket: Troubled) -> None:
        publish(bucket, (trained(2), 41))
        bucket.trouble("put", "deltas/", denied)
        with pytest.raises(PermissionDenied), Publisher(bucket) as publisher:
            publisher.publish(trained(3), step=42)
        bucket.calm()
        [warning] = publish(bucket, (trained(0), 0))
        assert "differ from version 1, the newest" in warning

    def test_a_restart_from_old_weights_is_logged_as_a_warning(
        self, bucket: Troubled, caplog: pytest.LogCaptureFixture
    ) -> None:
        publish(bucket, (trained(2), 41))
        with Publisher(bucket) as publisher:
            publisher.publish(trained(0), step=0)
        [record] = [record for record in caplog.records if "weightwire restore" in record.getMessage()]
        assert record.levelno == logging.WARNING

    def test_a_base_does_not_hide_a_restart_from_old_weights(self, bucket: Troubled) -> None:
        """A trainer that passes the same base at every start still restarts from old weights."""
        publish(bucket, (trained(2), 41), base=initial())
        [warning] = publish(bucket, (trained(0), 0), base=initial())
        assert "decreases from 41 to 0" in warning

    def test_rank_0_reports_a_restart_from_old_weights(self, bucket: Troubled) -> None:
        on_all(bucket, 2, lambda publisher, rank: publisher.publish(shard(at_step(5), rank, 2), step=5).wait(60))
        events: list[Event] = []
        on_all(
            bucket,
            2,
            lambda publisher, rank: publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60),
            on_event=events.append,
            published=at_step(5),
        )
        [warning] = [event.message for event in events if event.stage == "warning"]
        assert "weights (" in warning
        assert "decreases from 5 to 1" in warning

    def test_ranks_that_publish_an_anchor_report_a_restart_without_a_count(self, bucket: Troubled) -> None:
        on_all(bucket, 2, lambda publisher, rank: publisher.publish(shard(at_step(5), rank, 2), step=5).wait(60))
        events: list[Event] = []
        on_all(
            bucket,
            2,
            lambda publisher, rank: publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60),
            on_event=events.append,
        )
        [warning] = [event.message for event in events if "weightwire restore" in event.message]
        assert "the newest, and the step decreases from 5 to 1" in warning


def resumption(newest: dict[str, Any], first: dict[str, Any], weights: int = 1000, resumes: bool = True) -> Resumption:
    """Of version 4 after version 2, whose fields differ from those of a chain by the given ones."""
    chain = chain_of(5)
    before, after = (replace(chain[version].record, **given) for version, given in ((2, newest), (4, first)))
    return Resumption("s3://b/run", before, after, weights, resumes)


class TestTexts:
    @pytest.mark.parametrize(
        ("changed", "percent"),
        [(5000, "50%"), (1000, "10%"), (996, "10%"), (994, "9.9%"), (1060, "11%"), (10, "0.1%"), (10_000, "100%")],
    )
    def test_share_of_changed_weights_is_rounded(self, changed: int, percent: str) -> None:
        note = resumption({"step": 1}, {"step": 2, "changed": changed}, weights=10_000).note
        difference = f"{changed:,} of 10,000 weights ({percent}) differ"
        assert note == f"s3://b/run: continues from version 2 (step 1): {difference}"

    def test_step_and_difference_are_left_out_if_unknown(self) -> None:
        assert (
            resumption({}, {"kind": "anchor", "files": (file_of("anchor", 4),)}).note
            == "s3://b/run: continues from version 2"
        )
        assert resumption({}, {"changed": 0}, weights=0).note == "s3://b/run: continues from version 2"

    def test_same_weights_have_no_difference(self) -> None:
        same = chain_of(3)[2].record.after
        assert resumption({"step": 1}, {"after": same, "changed": 3}).note == (
            "s3://b/run: continues from version 2 (step 1)"
        )

    def test_warning_about_a_checkpoint_names_both_steps(self) -> None:
        assert resumption({"step": 41}, {"step": 40}, resumes=False).warning == (
            "s3://b/run: version 2 has step 41, this checkpoint has step 40; published as version 4. If this is a "
            "mistake, run `weightwire restore s3://b/run --version 2 -o DIR` and publish DIR"
        )

    @pytest.mark.parametrize(
        ("newest", "first", "step"),
        [(41, 40, ", and the step decreases from 41 to 40"), (41, 41, ""), (41, None, ""), (None, 41, "")],
    )
    def test_warning_about_a_restart_names_the_versions(self, newest: int, first: int, step: str) -> None:
        assert resumption({"step": newest}, {"step": first, "changed": 20}).warning == (
            "s3://b/run: the first weights of this publisher differ from version 2, the newest: 20 of 1,000 weights "
            f"(2%) differ{step}. They are now version 4. To continue from version 2 instead, load its weights before "
            "you train: weightwire restore s3://b/run --version 2 -o DIR"
        )


class TestNoWarning:
    def test_newest_weights_are_continued_without_a_warning(
        self, bucket: Troubled, caplog: pytest.LogCaptureFixture
    ) -> None:
        publish(bucket, (trained(2), 41))
        with caplog.at_level(logging.INFO, "weightwire"), Publisher(bucket) as publisher:
            publisher.publish(trained(2), step=0)
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO] == [
            f"{bucket.url}: continues from version 1 (step 41)"
        ]

    def test_a_later_step_is_continued_without_a_warning(
        self, bucket: Troubled, caplog: pytest.LogCaptureFixture
    ) -> None:
        publish(bucket, (trained(2), 41))
        with caplog.at_level(logging.INFO, "weightwire"), Publisher(bucket) as publisher:
            publisher.publish(trained(3), step=42).wait()
            publisher.publish(trained(4), step=43)
        [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
        assert line.startswith(f"{bucket.url}: continues from version 1 (step 41): ")
        assert line.endswith("%) differ")

    def test_a_new_run_from_a_base_starts_without_a_warning(self, bucket: Troubled) -> None:
        assert publish(bucket, (trained(1), 1), base=initial()) == []
        assert commits_in(bucket)[1].after == state(initial())

    def test_a_base_without_versions_is_continued_without_a_warning(self, bucket: Troubled) -> None:
        with Publisher(bucket, base=initial()):
            pass
        assert publish(bucket, (trained(1), None), base=initial()) == []

    @pytest.mark.parametrize(("before", "now"), [(41, 42), (41, 41), (41, None), (None, 41), (None, None)])
    def test_checkpoints_of_any_order_are_published_with_resumes_false(
        self, bucket: Troubled, before: int | None, now: int | None
    ) -> None:
        publish(bucket, (trained(2), before))
        assert publish(bucket, (trained(0), now), resumes=False) == []

    def test_earlier_step_is_reported_with_resumes_false(self, bucket: Troubled) -> None:
        publish(bucket, (trained(2), 41))
        assert len(publish(bucket, (trained(0), 40), resumes=False)) == 1
