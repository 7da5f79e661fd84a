"""The page of a report in a real browser, without a head: what it asks for, shows, and lets a keyboard reach."""

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from fedtta_flwr.reports.report import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="needs pip install -e '.[browser-test]'")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

NARROW = 400  # CSS pixels
ESCAPES = """address => {
  const add = (tag, more) => document.body.append(Object.assign(document.createElement(tag), more));
  add('img', {src: address + '/image'});
  add('link', {rel: 'stylesheet', href: address + '/style'});
  add('iframe', {src: address + '/frame'});
  add('iframe', {name: 'away'});
  add('script', {src: address + '/script'});
  fetch(address + '/fetch', {mode: 'no-cors'}).catch(() => 0);
  const form = Object.assign(document.createElement('form'), {action: address + '/form', target: 'away'});
  document.body.append(form);
  form.submit();
}"""
FOCUSED = """() => {
  const e = document.activeElement;
  return e === document.body ? null : [...document.querySelectorAll('*')].indexOf(e);
}"""
REACHABLE = """() => [...document.querySelectorAll('a[href], input, summary, [tabindex="0"]')]
  .filter(e => e.checkVisibility()).map(e => [...document.querySelectorAll('*')].indexOf(e))"""


@pytest.fixture(scope="module")
def run(run_local: Callable[..., Any]) -> Path:
    """A real run of 4 clients, but the groups are not of neighbours, and W is far from symmetric."""
    path: Path = run_local(scores="tta,post", **{"slots-per-corruption": 3, "shift-length": 3}).path
    for name, key in (("timeline.npz", "domain"), ("collaboration.npz", "weights")):
        with np.load(path / name) as file:
            arrays = dict(file)
        if key == "domain":
            arrays[key] = arrays[key][:, [0, 2, 1, 3]]
        else:
            arrays[key] = np.random.default_rng(0).dirichlet([0.5] * 4, arrays[key].shape[:2]).astype(np.float32)
        np.savez_compressed(path / name, **arrays)
    return path


@pytest.fixture(scope="module")
def report(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page, faults = write_report(run, tmp_path_factory.mktemp("report"))
    assert faults == []
    return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=root)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Callable[..., Any]]:
    """Open the report; whatever it asks for or complains of in the end fails the test."""
    contexts, asked, said = [], [], []

    def open_(**options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(report.as_uri(), wait_until="load")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert {url for url in asked if not url.startswith("data:")} == {report.as_uri()}
    assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(opened: Callable[..., Any], scheme: str) -> None:
    page = opened(color_scheme=scheme)
    paper, ink = (_colour(page, "body", key) for key in ("backgroundColor", "color"))
    assert (_luminance(paper) > 0.5) == (scheme == "light")
    assert _contrast(ink, paper) > 7
    for selector in (".note", "figcaption", "a", "dt"):  # WCAG 2.2, 1.4.3: 4.5 at least
        assert _contrast(_colour(page, selector, "color"), paper) > 4.5, selector
    head = _colour(page, "thead th", "backgroundColor")
    assert _contrast(_colour(page, "thead th", "color"), head) > 4.5
    shown = page.eval_on_selector_all("img", "all => all.map(e => [e.currentSrc, e.naturalWidth, e.alt])")
    assert len(shown) == 3
    for source, width, alternative in shown:
        assert width > 0
        assert len(alternative) > 20
        # The ink of a figure is what the text of the page is: light on dark or dark on light.
        opaque = np.array(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGBA"))
        grey = opaque[(opaque[..., 3] > 250) & (np.ptp(opaque[..., :3].astype(int), axis=-1) < 12)][:, :3]
        assert (np.median(grey) > 128) == (scheme == "dark")


def test_the_slider_shows_w_round_by_round(opened: Callable[..., Any], run: Path) -> None:
    page = opened()
    with np.load(run / "collaboration.npz") as file:
        rounds, weights = file["rounds"], file["weights"]
    lines = map(json.loads, (run / "rounds.jsonl").read_text().splitlines())
    within = [line["collaboration"]["within_group"] for line in lines]
    order = [0, 2, 1, 3]  # group by group
    slider, canvas = page.get_by_role("slider"), page.locator("canvas[role=img]")
    assert canvas.get_attribute("aria-labelledby") in slider.get_attribute("aria-labelledby").split()
    cell, output = page.locator("output.cell"), page.locator("output:not(.cell)")
    slider.focus()
    seen = []
    for k, number in enumerate(rounds):
        if k:
            page.keyboard.press("ArrowRight")
        w = weights[k][np.ix_(order, order)]
        seen.append(drawn(canvas))
        colours = np.frombuffer(seen[-1], dtype=np.uint8).reshape(4, 4, 3)
        scale = colormaps["viridis"](np.sqrt(w / weights.max()))[..., :3]  # one for all rounds
        assert np.abs(colours - 255 * scale).max() < 20  # the page has nine stops of it
        bright = colours[..., 1]  # green grows with the weight
        assert (np.argsort(bright.ravel(), kind="stable")[-1]) in np.flatnonzero(w.ravel() > w.max() - 0.01)
        for i in range(16):
            for j in range(16):
                if w.flat[i] > w.flat[j] + 0.02:
                    assert bright.flat[i] > bright.flat[j]
        text = f"round {number}, largest weight {w.max():.3f}, within groups {within[k]:.3f}"
        assert text == output.text_content()
        assert slider.get_attribute("aria-valuetext") == output.text_content()
    assert len(set(seen)) > 1
    page.keyboard.press("Home")
    assert drawn(canvas) == seen[0]
    page.keyboard.press("End")
    assert drawn(canvas) == seen[-1]
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 0.375 * box["width"], box["y"] + 0.875 * box["height"])  # 2nd from the left, 4th row

    def told() -> tuple[str, float, str]:
        receiver, weight, giver = re.fullmatch(r"(.+): (.+) of (.+)", cell.text_content()).groups()
        return receiver, float(weight), giver

    assert told() == ("client-03", pytest.approx(weights[-1, 3, 2], abs=0.01), "client-02")
    canvas.focus()
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):  # no further than the edge
        page.keyboard.press(key)
    assert told() == ("client-01", pytest.approx(weights[-1, 1, 0], abs=0.01), "client-00")
    slider.focus()
    page.keyboard.press("Home")
    assert told() == ("client-01", pytest.approx(weights[0, 1, 0], abs=0.01), "client-00")
    assert "client-00, client-02 | client-01, client-03" in page.locator("figure.heatmap .note").text_content()


def test_a_keyboard_reaches_everything_in_the_order_of_the_page(opened: Callable[..., Any]) -> None:
    page = opened()
    summary = page.locator("summary")
    assert not page.get_by_role("region", name="Accuracy in % by client").is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("region", name="Accuracy in % by client").is_visible()
    page.evaluate("() => { document.body.tabIndex = -1; document.body.focus(); }")  # back to the top
    expected, reached = page.evaluate(REACHABLE), []
    for _ in expected:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
        outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"  # and one sees where one is
    assert reached == expected
    assert len(expected) > 10


@pytest.mark.parametrize("unfolded", [False, True])
def test_a_narrow_screen_scrolls_down_only(opened: Callable[..., Any], unfolded: bool) -> None:
    page = opened(viewport={"width": NARROW, "height": 700})
    if unfolded:
        page.locator("summary").click()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= NARROW
    assert page.evaluate("() => getComputedStyle(document.body).overflowX") == "visible"  # nothing is cut off
    boxes = page.eval_on_selector_all("section > *, header > *", "all => all.map(e => e.getBoundingClientRect().right)")
    assert max(boxes) <= NARROW
    wide = page.locator(".scroll").first
    assert wide.evaluate("e => e.scrollWidth > e.clientWidth")
    wide.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.activeElement.scrollLeft > 0")


def test_structure(opened: Callable[..., Any]) -> None:
    page = opened()
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("h1").count() == page.locator("main").count() == 1
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).locator("h2").text_content() == link.text_content()
    for table in page.locator("table").all():
        assert table.locator("caption").text_content()
        assert table.locator("thead th:not([scope=col]), tbody th:not([scope=row])").count() == 0
    assert page.locator("canvas[role=img]").evaluate(
        "e => document.getElementById(e.getAttribute('aria-labelledby')).textContent"
    )


@pytest.mark.parametrize("kept", [True, False])
def test_the_policy_lets_nothing_out(browser: Any, report: Path, tmp_path: Path, kept: bool) -> None:
    """Whatever got into the page could not reach anything, either; without the policy it could."""
    path = tmp_path / "report.html"
    text = report.read_text()
    path.write_text(text if kept else re.sub(r"<meta http-equiv=[^>]*>", "", text))
    with listening() as (address, asked):
        page = browser.new_page()
        page.goto(path.as_uri(), wait_until="load")
        page.evaluate(ESCAPES, address)
        everything = {"/image", "/style", "/frame", "/fetch", "/script", "/form"}
        for _ in range(20 if kept else 100):
            if asked != everything:
                page.wait_for_timeout(100)
        page.close()
    assert asked == (set() if kept else everything)


@contextmanager
def listening() -> Iterator[tuple[str, set[str]]]:
    """Serve HTTP on this machine; give the address and the paths that were asked for."""
    asked: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.add(self.path.partition("?")[0])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def drawn(canvas: Any) -> bytes:
    """Return the pixels in the middle of the squares of a map of 4 clients, [4, 4, 3]."""
    png = canvas.evaluate("c => c.toDataURL()").partition(",")[2]
    picture = np.array(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))
    step = len(picture) // 4
    return picture[step // 2 :: step, step // 2 :: step].tobytes()


def _colour(page: Any, selector: str, key: str) -> list[float]:
    text = page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{key}")
    red, green, blue, *alpha = map(float, re.findall(r"[\d.]+", text))
    assert alpha in ([], [1.0]), f"{selector}: {key} is {text}"
    return [red / 255, green / 255, blue / 255]


def _luminance(colour: list[float]) -> float:
    """Return the relative luminance of WCAG 2.2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)
