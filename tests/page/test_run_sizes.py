"""The page of an empty run, a run with one version, one with 40 replicas and one with 2,000 versions, in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from support.chromium import DESKTOP, PHONE, Chromium, Tab
from support.page_runs import RUNS, page_of

pytestmark = pytest.mark.slow

# The ratio of the brighter to the darker luminance of a text and its background, as WCAG defines it.
CONTRAST = """
((selector) => {
  const rgb = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => rgb(colour).slice(0, 3).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (one) => (rgb(getComputedStyle(one).backgroundColor)[3] === 0 ? behind(one.parentElement) : one);
  const element = document.querySelector(selector);
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind(element)).backgroundColor].map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})
"""


@pytest.fixture(scope="module")
def opened(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tab]]:
    """A tab for each run, opened once. None of them may report an error."""
    folder = tmp_path_factory.mktemp("pages")
    tabs: dict[str, Tab] = {}

    def open_run(name: str) -> Tab:
        if name not in tabs:
            tabs[name] = browser.tab()
            tabs[name].open(page_of(RUNS[name](), folder / f"{name}.html"))
        tabs[name].look()
        return tabs[name]

    yield open_run
    problems = {name: tab.problems for name, tab in tabs.items()}
    for tab in tabs.values():
        tab.close()
    assert problems == {name: [] for name in tabs}


@pytest.mark.parametrize("name", RUNS)
class TestEveryRun:
    @pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
    def test_page_of_every_run_does_not_scroll_sideways(
        self, opened: Callable[[str], Tab], name: str, size: tuple[int, int]
    ) -> None:
        tab = opened(name)
        tab.look(size)
        plots = "[...document.querySelectorAll('.main-svg')].map((one) => one.getBoundingClientRect().right)"
        tab.wait_for(f"Math.max(0, ...{plots}) <= {size[0]}")
        assert tab.evaluate("document.documentElement.scrollWidth") == size[0]

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    def test_all_texts_have_contrast(self, opened: Callable[[str], Tab], name: str, dark: bool) -> None:
        tab = opened(name)
        tab.look(dark=dark)
        tab.wait_for(f"matchMedia('(prefers-color-scheme: dark)').matches === {str(dark).lower()}")
        selectors = ["#foot", "#where", "#state", "#welcome strong", "#welcome code", "#welcome p", ".figure .more"]
        selectors += [".alert", ".alert.bad", ".caption", ".empty", "td.attention", "tr.gone td", "#theme"]
        for selector in selectors:
            if tab.evaluate(f"document.querySelector('{selector}')?.checkVisibility() ?? false"):
                assert tab.evaluate(f"{CONTRAST}('{selector}')") >= 4.5, selector

    def test_every_chart_has_a_description(self, opened: Callable[[str], Tab], name: str) -> None:
        charts = "[...document.querySelectorAll('.plot')].filter((one) => one.data && one.checkVisibility())"
        described = f"{charts}.every((one) => one.getAttribute('aria-label').length > 20)"
        assert opened(name).evaluate(described)


class TestEmptyRun:
    def test_a_bucket_without_a_run_shows_the_publish_command(self, opened: Callable[[str], Tab]) -> None:
        tab = opened("empty")
        text = tab.text("#welcome")
        assert "Nothing has been published here yet." in text
        assert f"weightwire publish DIR {tab.evaluate('snapshot.url')}" in text
        assert not tab.evaluate("document.querySelector('#cards').checkVisibility()")

    def test_a_run_with_only_a_fence_names_its_publisher(self, opened: Callable[[str], Tab]) -> None:
        text = opened("fenced").text("main")
        assert text.startswith("No weights have been published yet.")
        assert "Publisher trainer-0 (epoch 1) has opened this run." in text
        assert "weightwire publish DIR" in text
        assert "Timeline" not in text


class TestShortRun:
    def test_charts_of_deltas_wait_for_the_first_delta(self, opened: Callable[[str], Tab]) -> None:
        tab = opened("short")
        for section in ("bytes", "saving", "heat"):
            assert "No delta yet." in tab.text(f"#{section}")
        assert "Newest version\n1\n" in tab.text("#cards")
        assert tab.text("#cards").count("no delta yet") == 3

    def test_the_replica_of_a_short_run_is_up_to_date(self, opened: Callable[[str], Tab]) -> None:
        assert "rollout-0\tup to date\t1\t1\t0\t" in opened("short").text("#replicas table")


class TestFleet:
    def rows(self, tab: Tab) -> list[list[str]]:
        return [line.split("\t") for line in tab.text("#replicas tbody").splitlines()]

    def test_all_replicas_are_listed_and_those_that_need_attention_first(self, opened: Callable[[str], Tab]) -> None:
        rows = self.rows(opened("fleet"))
        assert sorted(row[0] for row in rows) == [f"rollout-{number:02}" for number in range(40)]
        assert [row[:2] for row in rows[:3]] == [
            ["rollout-38", "in trouble"],
            ["rollout-37", "no heartbeat"],
            ["rollout-36", "stale"],
        ]
        assert rows[-1][:2] == ["rollout-39", "stopped"]
        assert [row[0] for row in rows[3:-1]] == sorted(row[0] for row in rows[3:-1])
        assert {row[1] for row in rows[3:-1]} == {"up to date", "catching up"}

    def test_summary_and_alerts_name_what_needs_attention(self, opened: Callable[[str], Tab]) -> None:
        tab = opened("fleet")
        assert "38 of 40\n1 in trouble, 1 no heartbeat, 1 stale" in tab.text("#cards")
        assert "rollout-38 is in trouble: http://127.0.0.1:8000: connection refused" in tab.text("#alerts")
        assert "rollout-37 has sent no heartbeat since 14:06:40" in tab.text("#alerts")
        assert "rollout-36 is stale: 41 versions behind" in tab.text("#alerts")
        assert "30 up to date" in tab.text("#replicas .caption")

    def test_many_replicas_in_trouble_do_not_fill_the_page_with_alerts(self, opened: Callable[[str], Tab]) -> None:
        tab = opened("fleet")
        tab.evaluate(
            "window.before = structuredClone(snapshot); for (const one of snapshot.replicas) one.trouble = 'x'"
        )
        tab.evaluate("show(snapshot)")
        assert tab.evaluate("document.querySelectorAll('.alert').length") <= 5
        assert "37 more replicas in trouble" in tab.text("#alerts")
        tab.evaluate("show(before)")

    def test_every_replica_has_a_lane(self, opened: Callable[[str], Tab]) -> None:
        assert opened("fleet").evaluate("document.querySelectorAll('#timeline .ytick').length") == 42

    def test_the_chain_counts_replicas_by_version(self, opened: Callable[[str], Tab]) -> None:
        trace = opened("fleet").plot("chain")["replicas"]
        assert sum(map(int, trace["text"])) == 40
        assert dict(zip(trace["x"], trace["text"], strict=True))[120] == "31"

    def test_a_replica_whose_heartbeat_is_late_is_marked(self, opened: Callable[[str], Tab]) -> None:
        late = "statusOf({ ...snapshot.replicas[0], heard: snapshot.at - 40 }, snapshot.versions, snapshot.at)"
        assert opened("fleet").evaluate(late) == "late heartbeat"

    def test_a_fence_does_not_make_a_replica_stale(self, opened: Callable[[str], Tab]) -> None:
        versions = "[...snapshot.versions, { version: 121, kind: 'fence', time: snapshot.at - 3600 }]"
        assert opened("fleet").evaluate(f"statusOf(snapshot.replicas[0], {versions}, snapshot.at)") == "up to date"


class TestLongRun:
    def test_every_version_of_a_long_run_is_drawn(self, opened: Callable[[str], Tab]) -> None:
        tab = opened("long")
        assert tab.plot("stairs")["trainer"]["y"][-1] == 1999
        assert len(tab.plot("bytes")["delta"]["x"]) == 1998
        assert "One version in 16 is shown." in tab.text("#heat")
        assert len(tab.plot("heat")["changed"]["x"]) == 125

    def test_ticks_of_the_version_axis_do_not_overlap(self, opened: Callable[[str], Tab]) -> None:
        tab = opened("long")
        for size in (DESKTOP, PHONE):
            tab.look(size)
            tab.wait_for(f"document.querySelector('#heat .main-svg').getBoundingClientRect().right <= {size[0]}")
            for section in ("metrics", "bytes", "saving", "heat", "chain"):
                ticks = f"[...document.querySelectorAll('#{section} .xtick text')]"
                boxes = f"{ticks}.map((one) => one.getBoundingClientRect())"
                found = tab.evaluate(f"{boxes}.map((one) => [one.left, one.right]).sort((a, b) => a[0] - b[0])")
                assert len(found) >= 3
                assert all(one[1] < other[0] for one, other in pairwise(found)), section
