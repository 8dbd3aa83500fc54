"""The page in a real browser: it shows the run's true numbers, and hostile names as text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from support.chromium import DESKTOP, PHONE, Chromium, Tab
from support.clocked_bucket import Arrays, finish_background, run
from support.run_contents import commits_in
from weightwire.bucket.registry import open_bucket
from weightwire.chain.record_paths import heartbeat_path
from weightwire.chain.records import Commit, Heartbeat, StageTiming, seal
from weightwire.follower.follower import Follower
from weightwire.page import export_page
from weightwire.page.page_server import PageServer
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event
from weightwire.telemetry.stages import STAGES

pytestmark = pytest.mark.slow

SCRIPT = "<script>window.hacked = 1</script>"
IMAGE = "<img src=x onerror='hacked = 2'><b>bold</b> %{x} &amp;"
NAMES = ["model.embed_tokens.weight", "model.layers.0.w", "model.layers.1.w", "model.norm.weight", "lm_head.weight"]


def quiet(event: Event) -> None:
    pass


class Training:
    """A run with a real publisher and real followers. Their engine swaps are only reported, not performed."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self.url, self._directory = directory / "run", directory
        random = np.random.default_rng(5)
        self.weights: Arrays = {name: random.normal(0, 0.02, (64, 32)).astype(np.float16) for name in names}
        self._publisher = Publisher(self.url, anchor_every=4, threads=1, on_event=quiet)
        self._followers: dict[str, Follower] = {}
        self._step = 0

    def publish(self, **metrics: float) -> None:
        publication = self._publisher.publish(self.weights, step=self._step, metrics=metrics)
        publication.wait()
        finish_background(self._publisher)
        self._step += 1
        self.weights = {name: array.copy() for name, array in self.weights.items()}
        for index, array in enumerate(self.weights.values()):
            array.view(np.uint16).reshape(-1)[self._step % 5 :: 40 + index] ^= 1

    def follow(self, name: str, pause: float, trouble: str = "") -> None:
        """Catches up and reports a swap."""
        if name not in self._followers:
            into = self._directory / name
            self._followers[name] = Follower(self.url, into=into, name=name, threads=1, on_event=quiet)
        follower = self._followers[name]
        version = follower.once()
        stages = {"stage": StageTiming(0.002, 10, time.time() - pause), "swap": StageTiming(pause, 10, time.time())}
        follower.report_served(version, trouble, stages)
        follower.once()

    def stop(self, name: str) -> None:
        self._followers.pop(name).close()

    def commits(self) -> list[Commit]:
        return commits_in(open_bucket(self.url))

    def close(self) -> None:
        for name in [*self._followers]:
            self.stop(name)
        self._publisher.close()


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """Versions 0 to 12 and two replicas. One of them is three versions behind."""
    training = Training(tmp_path_factory.mktemp("training"), NAMES)
    for step in range(12):
        training.publish(reward=step / 10, loss=1 / (step + 1))
        if step in (4, 8, 11):
            training.follow("near", 0.004)
        if step in (2, 8):
            training.follow("far", 0.012)
    yield training
    training.close()


@pytest.fixture(scope="module")
def exported(training: Training, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("exported") / "page.html"
    path.write_bytes(run(export_page(open_bucket(training.url))))
    return path.as_uri()


@pytest.fixture
def tab(browser: Chromium) -> Iterator[Callable[[str], Tab]]:
    """Opens pages. None of them may report an error."""
    tabs: list[Tab] = []

    def open_tab(url: str) -> Tab:
        tabs.append(browser.tab())
        tabs[-1].open(url)
        return tabs[-1]

    yield open_tab
    for one in tabs:
        one.close()
    assert [problem for one in tabs for problem in one.problems] == []


@pytest.fixture(scope="module")
def shown(browser: Chromium, exported: str) -> Iterator[Tab]:
    """One page for all tests that do not change it."""
    tab = browser.tab()
    tab.open(exported)
    yield tab
    tab.close()
    assert tab.problems == []


class TestNumbers:
    def test_cards_show_the_newest_version_and_lag(self, shown: Tab, training: Training) -> None:
        last = training.commits()[-1]
        cards = shown.text("#cards")
        assert f"Newest version\n{last.version}\n" in cards
        assert f"{100 * last.changed / (5 * 64 * 32):.2f}%" in cards
        assert "2 of 2\nalive, at most 3 versions behind" in cards
        assert "Last pause\n4.0 ms\nlongest of 5 swaps: 12 ms" in cards

    def test_timeline_shows_the_recorded_stage_times(self, shown: Tab, training: Training) -> None:
        plot = shown.plot("timeline")
        commits = training.commits()
        for stage in ("capture", "encode", "upload"):
            recorded = [(one.version, one.stages[stage].seconds) for one in commits if stage in one.stages]
            assert [(version, seconds) for version, seconds, _ in plot[stage]["customdata"]] == recorded
            assert plot[stage]["x"] == pytest.approx([seconds * 1000 for _, seconds in recorded])
        ends = [one.stages["upload"].at for one in commits if "upload" in one.stages]
        begins = [
            base / 1000 + length / 1000
            for base, length in zip(plot["upload"]["base"], plot["upload"]["x"], strict=True)
        ]
        assert begins == pytest.approx(ends, abs=0.002)
        assert plot["commit"]["customdata"] == [one.version for one in commits]
        assert plot["swap"]["customdata"] == [
            [3, 0.012, 10],
            [9, 0.012, 10],
            [5, 0.004, 10],
            [9, 0.004, 10],
            [12, 0.004, 10],
        ]
        assert plot["swap"]["y"] == [2, 2, 3, 3, 3]
        assert shown.evaluate("document.querySelectorAll('#timeline .ytick').length") == 4
        assert {"fetch", "verify", "apply"} <= set(plot)
        assert shown.text("#timeline .legend").splitlines() == [
            stage.label for stage in STAGES if stage.name in plot and stage.name != "commit"
        ]

    def test_a_stage_added_to_the_table_is_drawn(self, tab: Callable[[str], Tab], exported: str) -> None:
        shown = tab(exported)
        shown.evaluate("""
            snapshot.stages.push({ name: "warmup", side: "engine", label: "warm up" });
            snapshot.replicas[0].spans.push({ ...snapshot.replicas[0].spans[0], stage: "warmup", nbytes: 7 });
            drawCharts();
        """)
        assert shown.text("#timeline .legend").splitlines()[-1] == "warm up"
        assert [nbytes for _, _, nbytes in shown.plot("timeline")["warmup"]["customdata"]] == [7]
        assert shown.evaluate("colours().warmup === colours().faint")

    def test_the_pause_is_red(self, shown: Tab) -> None:
        assert shown.plot("timeline")["swap"]["marker"]["color"] == "rgb(209, 37, 63)"

    def test_staircase_shows_when_versions_were_reached(self, shown: Tab, training: Training) -> None:
        plot = shown.plot("stairs")
        commits = training.commits()
        assert plot["trainer"]["y"] == [*(one.version for one in commits), 12]
        assert [at / 1000 for at in plot["trainer"]["x"]][:-1] == pytest.approx(
            [one.time for one in commits], abs=0.002
        )
        assert plot["near"]["y"] == [5, 9, 12, 12]
        assert plot["far"]["y"] == [3, 9, 9]
        assert plot["far"]["line"]["shape"] == "hv"

    def test_staircase_is_dotted_after_the_last_heartbeat(self, shown: Tab) -> None:
        later = "stairs({ ...snapshot, at: snapshot.at + 60 }, colours()).traces"
        found = {trace["name"]: trace for trace in shown.evaluate(later)}
        for name, version in (("far", 9), ("near", 12)):
            since = found[f"{name}, after its last heartbeat"]
            assert (since["y"], since["line"]["dash"]) == ([version, version], "dot")
            assert since["x"] == [found[name]["x"][-1], found["trainer"]["x"][-1]]

    def test_only_a_long_pause_is_marked_on_the_card(self, tab: Callable[[str], Tab], exported: str) -> None:
        shown = tab(exported)
        assert not shown.evaluate("document.querySelectorAll('.figure.pause').length")
        shown.evaluate(
            "snapshot.replicas.forEach((one) => one.spans.forEach((span) => { span.seconds = 2; })); writeTexts()"
        )
        assert shown.evaluate("document.querySelectorAll('.figure.pause').length") == 1

    def test_replica_without_an_engine_serves_nothing(self, tab: Callable[[str], Tab], exported: str) -> None:
        shown = tab(exported)
        cells = "[...document.querySelectorAll('#replicas [data-name=serves]')].map((one) => one.textContent)"
        assert shown.evaluate(cells) == ["9", "12"]
        shown.evaluate("snapshot.replicas[0].served = null; snapshot.replicas[1].served = -1; writeTexts()")
        assert shown.evaluate(cells) == ["\u2013", "none"]

    def test_footer_tells_who_signs(self, tab: Callable[[str], Tab], exported: str) -> None:
        shown = tab(exported)
        assert "not signed: anyone who can write to the bucket can publish weights" in shown.text("#foot")
        shown.evaluate("snapshot.keys = ['ed25519:one', 'ed25519:two']; writeTexts()")
        assert "signed by ed25519:one, ed25519:two" in shown.text("#foot")

    def test_commits_close_in_time_share_a_label(self, shown: Tab) -> None:
        times = "[0, 0.1, 5, 9.9, 10].map((time, version) => ({ time, version }))"
        assert shown.evaluate(f"[...apart({times}, 1)]") == [4, 2, 1]

    def test_version_of_0_bytes_is_at_the_bottom(self, shown: Tab) -> None:
        made = """(() => {
            const versions = snapshot.versions.map((one) => one.version === 12 ? { ...one, nbytes: 0 } : one);
            const { traces, layout } = bytesPerVersion({ ...snapshot, versions }, colours());
            const delta = traces.find((one) => one.name === "delta");
            const names = traces.map((one) => one.name);
            return { x: delta.x, y: delta.y, axis: layout.yaxis, legend: layout.showlegend, names };
        })()"""
        found = shown.evaluate(made)
        assert found["x"][-1] == 12
        assert found["y"][-1] == min(found["y"]) == found["axis"]["tickvals"][0]
        assert found["axis"]["ticktext"][0] == "0\u00a0B"
        assert 10 ** found["axis"]["range"][0] < found["y"][-1]
        assert (found["legend"], found["names"]) == (True, ["delta", "anchor"])

    def test_bytes_are_those_of_the_commits(self, shown: Tab, training: Training) -> None:
        plot = shown.plot("bytes")
        deltas = [one for one in training.commits() if one.kind == "delta"]
        assert (plot["delta"]["x"], plot["delta"]["y"]) == (
            [one.version for one in deltas],
            [one.nbytes for one in deltas],
        )
        layout = shown.evaluate("document.querySelector('#bytes .plot').layout")
        assert (layout["yaxis"]["type"], layout["shapes"][0]["y0"]) == ("log", 5 * 64 * 32 * 2)

    def test_saving_compares_deltas_with_a_full_sync(self, shown: Tab, training: Training) -> None:
        plot = shown.plot("saving")
        commits = training.commits()
        assert plot["sent"]["y"][-1] == sum(one.nbytes for one in commits)
        assert plot["full sync"]["y"][-1] == 12 * 5 * 64 * 32 * 2
        beside = sum(path.stat().st_size for path in training.url.glob("anchors/*/*"))
        first = commits[1].nbytes  # the first anchor is a commit, not beside the chain
        assert plot["sent + anchors"]["y"][-1] == plot["sent"]["y"][-1] + beside - first

    def test_heat_map_shows_the_changed_fractions(self, shown: Tab, training: Training) -> None:
        trace = shown.plot("heat")["changed"]
        commits = training.commits()
        for version, fractions in zip(trace["x"], zip(*trace["z"], strict=True), strict=True):
            if commits[version].kind == "delta":
                assert sum(fractions) * 64 * 32 == pytest.approx(commits[version].changed, rel=1e-4)
            else:
                assert set(fractions) == {None}
        ticks = shown.evaluate("[...document.querySelectorAll('#heat .ytick text')].map((one) => one.textContent)")
        assert ticks == ["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]

    def test_chain_shows_kinds_anchors_and_replicas(self, shown: Tab, training: Training) -> None:
        plot = shown.plot("chain")
        kinds = {
            kind: [one.version for one in training.commits() if one.kind == kind]
            for kind in ("delta", "anchor", "fence")
        }
        assert {kind: plot[kind]["x"] for kind in kinds} == kinds
        assert plot["beside"]["x"] == sorted({int(path.parent.name) for path in training.url.glob("anchors/*/*")} - {1})
        assert (plot["near"]["customdata"][0], plot["far"]["customdata"][0]) == (12, 9)

    def test_the_selected_metric_is_drawn(self, shown: Tab) -> None:
        assert shown.plot("metrics")["reward"]["y"] == pytest.approx([step / 10 for step in range(12)])
        shown.evaluate("document.querySelector('#metric').value = 'loss'")
        shown.evaluate("document.querySelector('#metric').dispatchEvent(new Event('change'))")
        assert shown.plot("metrics")["loss"]["y"] == pytest.approx([1 / (step + 1) for step in range(12)])

    def test_table_lists_replicas_with_their_lag(self, shown: Tab) -> None:
        rows = [line.split("\t")[:5] for line in shown.text("#replicas table").splitlines()]
        assert rows == [
            ["replica", "status", "version", "serves", "behind"],
            ["far", "catching up", "9", "9", "3"],
            ["near", "up to date", "12", "12", "0"],
        ]

    def test_an_exported_page_makes_no_requests(self, shown: Tab, exported: str) -> None:
        assert {url for url in shown.requests if not url.startswith(("data:", "blob:"))} == {exported}

    def test_a_larger_timeline_window_shows_more_time(self, shown: Tab) -> None:
        widths = []
        for choice in ("Newest", "10 versions", "All"):
            buttons = "[...document.querySelectorAll('#timeline button')]"
            shown.evaluate(f"{buttons}.find((one) => one.textContent === {json.dumps(choice)}).click()")
            widths.append(
                shown.evaluate(
                    "(([from, to]) => to - from)(document.querySelector('#timeline .plot').layout.xaxis.range)"
                )
            )
        assert widths == sorted(widths)
        assert widths[0] < widths[1]


class TestAppearance:
    @pytest.fixture(autouse=True)
    def restore_the_look(self, shown: Tab) -> Iterator[None]:
        yield
        shown.look()

    @pytest.mark.parametrize("size", [DESKTOP, PHONE, (320, 600)], ids=["desktop", "phone", "small"])
    def test_page_does_not_scroll_sideways(self, shown: Tab, size: tuple[int, int]) -> None:
        shown.look(size)
        plots = "[...document.querySelectorAll('.main-svg')].map((one) => one.getBoundingClientRect().right)"
        shown.wait_for(f"Math.max(...{plots}) <= {size[0]}")
        assert shown.evaluate("innerWidth") == size[0]
        assert shown.evaluate("document.documentElement.scrollWidth") == size[0]

    def test_theme_follows_the_system_until_the_reader_chooses(self, shown: Tab) -> None:
        background = "getComputedStyle(document.body).backgroundColor"
        ink = "document.querySelector('#bytes .plot').layout.hoverlabel.font.color"
        assert (shown.evaluate(background), shown.evaluate(ink)) == ("rgb(245, 246, 248)", "rgb(24, 33, 44)")

        shown.look(dark=True)
        shown.wait_for(f"{ink} === 'rgb(231, 236, 242)'")
        assert shown.evaluate(background) == "rgb(14, 19, 25)"

        shown.evaluate("document.querySelector('#theme').click()")
        assert shown.text("#theme") == "Light"
        assert (shown.evaluate(background), shown.evaluate(ink)) == ("rgb(245, 246, 248)", "rgb(24, 33, 44)")
        shown.evaluate("document.querySelector('#theme').click(); document.querySelector('#theme').click()")
        assert shown.text("#theme") == "Auto"

    def test_times_are_in_the_time_zone_of_the_reader(self, shown: Tab) -> None:
        here = shown.plot("timeline")["commit"]["x"]
        shown.look(zone="Asia/Kolkata")
        shown.evaluate("drawCharts()")
        there = shown.plot("timeline")["commit"]["x"]
        assert [b - a for a, b in zip(here, there, strict=True)] == pytest.approx([5.5 * 3600e3] * len(here))


class TestLive:
    def test_an_open_page_follows_the_run(
        self, tab: Callable[[str], Tab], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("weightwire.follower.follower._LAST_HEARTBEAT", 60.0)  # this machine may be busy
        (tmp_path / "run").mkdir()
        with PageServer(tmp_path / "run", port=0) as page:
            shown = tab(page.address)
            assert "Nothing has been published here yet." in shown.text("#welcome")

            training = Training(tmp_path, NAMES)
            training.publish()
            shown.wait_for("snapshot.versions.length === 2")
            assert "No delta yet" in shown.text("#bytes")
            assert "No delta yet" in shown.text("#heat")
            assert "has published no metrics" in shown.text("#metrics")
            assert "No replica follows this run yet" in shown.text("#replicas")
            assert "none\nno replica follows this run yet" in shown.text("#cards")

            training.publish(reward=0.5)
            training.follow("one", 0.005)
            shown.wait_for("snapshot.replicas[0]?.reached === 2")
            assert shown.plot("stairs")["one"]["y"][-1] == 2
            assert shown.plot("metrics")["reward"]["y"] == [0.5]
            assert "1 of 1\nalive" in shown.text("#cards")
            training.close()
            shown.wait_for("snapshot.replicas[0].lease === 0")
            assert "stopped" in shown.text("#replicas")
            assert "0 of 1\nnone is alive" in shown.text("#cards")

            run_json = (tmp_path / "run" / "run.json").read_bytes()
            (tmp_path / "run" / "run.json").write_bytes(b"nonsense")
            shown.wait_for("snapshot.trouble !== ''")
            assert "Cannot read the bucket" in shown.text("#alerts")
            assert "Newest version\n2\n" in shown.text("#cards")
            (tmp_path / "run" / "run.json").write_bytes(run_json)
            shown.wait_for("snapshot.trouble === ''")
            assert shown.text("#alerts") == ""

    def test_page_says_when_its_server_has_stopped(self, browser: Chromium, training: Training) -> None:
        shown = browser.tab()
        with PageServer(training.url, port=0) as page:
            shown.open(page.address)
            assert shown.problems == []
        shown.wait_for("document.querySelector('#alerts').textContent.includes('Not live.')")
        assert "Newest version\n12\n" in shown.text("#cards")
        shown.close()

    def test_a_drawing_error_is_reported_and_polling_continues(self, browser: Chromium, training: Training) -> None:
        shown = browser.tab()
        with PageServer(training.url, port=0) as page:
            shown.open(page.address)
            shown.evaluate("window.right = heatMap; heatMap = () => { throw Error('no paint') }; tag = null")
            shown.wait_for("document.querySelector('#alerts').textContent.includes('no paint')")
            assert "has stopped" not in shown.text("#alerts")
            assert shown.text("#state") == "not live"
            shown.evaluate("heatMap = window.right")
            shown.wait_for("document.querySelector('#state').textContent === 'live'")
            assert "no paint" not in shown.text("#alerts")
        shown.close()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run in which every free text is an attempt to inject HTML or script."""
    training = Training(
        tmp_path_factory.mktemp("hostile"), [f"{SCRIPT}.weight", f"{IMAGE}.weight", "a\u202eb\n.weight"]
    )
    for step in range(3):
        training.publish(**{IMAGE: step, SCRIPT: 1.0, "__proto__": 2.0, "reward": (1e308, -1e300, 1e300)[step]})
    training.follow("one", 0.005, trouble=IMAGE)
    run_id = json.loads((training.url / "run.json").read_bytes())["run"]
    beat = Heartbeat(run=run_id, name="two", version=3, head=3, lease=60.0, host=SCRIPT, trouble=SCRIPT)
    (training.url / heartbeat_path("two")).write_bytes(seal(beat).data)
    (training.url / "replicas" / f"{SCRIPT.replace('/', '')}.json").write_bytes(seal(beat).data)
    yield training.url
    training.close()


class TestHostileNames:
    @pytest.mark.parametrize("way", ["live", "exported"])
    def test_hostile_names_are_shown_as_text(
        self, tab: Callable[[str], Tab], hostile: Path, tmp_path: Path, way: str
    ) -> None:
        (tmp_path / "page.html").write_bytes(run(export_page(open_bucket(hostile))))
        with PageServer(hostile, port=0) as page:
            shown = tab(page.address if way == "live" else (tmp_path / "page.html").as_uri())
            assert shown.evaluate("document.querySelector('#metrics .plot').data[0].y") == [None, -1e300, 1e300]
            assert shown.evaluate("document.querySelectorAll('[d*=NaN], [transform*=NaN]').length") == 0
            shown.evaluate(f"view.metric = {json.dumps(IMAGE)}; drawCharts()")

            ticks = shown.evaluate("[...document.querySelectorAll('#heat .ytick text')].map((one) => one.textContent)")
            assert any(tick.startswith("<script>window") for tick in ticks)
            assert any(tick.startswith("<img src=x onerror") for tick in ticks)
            assert any("\\u202e" in tick for tick in ticks)
            options = shown.evaluate("[...document.querySelectorAll('#metric option')].map((one) => one.textContent)")
            assert {SCRIPT, IMAGE, "reward", "__proto__"} == set(options)
            assert shown.evaluate("document.querySelector('#metrics .plot').data[0].y") == [0, 1, 2]
            assert SCRIPT in shown.text("#replicas")
            assert IMAGE in shown.text("#alerts")
            for section, point in (("metrics", "1"), ("heat", "[0, 3]")):
                plot = f"document.querySelector('#{section} .plot')"
                shown.evaluate(f"Plotly.Fx.hover({plot}, [{{ curveNumber: 0, pointNumber: {point} }}])")
            shown.wait_for("document.querySelector('#metrics .hovertext') !== null")
            assert IMAGE in shown.evaluate("document.querySelector('#metrics .hovertext').textContent")
            assert shown.evaluate("document.querySelectorAll('img, #alerts b b, svg a').length") == 0
            assert shown.evaluate("typeof hacked") == "undefined"


LONG = """
const last = snapshot.versions[snapshot.versions.length - 1];
const many = (length, make) => Array.from({ length }, (_, index) => make(index));
const made = (version) => ({ ...last, version, time: 1.7e9 + version, metrics: { reward: version } });
snapshot.versions = many(2000, made);
const spans = (stages) => many(300 * stages.length, (index) => ({
  stage: stages[index % stages.length], version: 1700 + Math.floor(index / stages.length),
  start: 1.7e9 + 1700 + index / stages.length, seconds: 0.05, nbytes: 5,
}));
const on = (...sides) => snapshot.stages.filter((one) => sides.includes(one.side)).map((one) => one.name);
snapshot.spans = spans(on("publisher"));
const passed = spans(on("follower", "engine"));
snapshot.replicas = many(8, (index) => ({ ...snapshot.replicas[0], name: `r${index}`, spans: passed }));
const began = performance.now();
show(snapshot);
performance.now() - began;
"""


def test_a_long_run_is_drawn_quickly(tab: Callable[[str], Tab], exported: str) -> None:
    """2,000 versions and eight replicas. The limit is ten times the usual duration: it catches a wrong complexity."""
    shown = tab(exported)
    # Several times: the browser may have been stopped meanwhile.
    assert any(shown.evaluate(f"{{{LONG}}}") < 20_000 for _ in range(3))
    assert shown.plot("stairs")["trainer"]["y"][-1] == 1999
