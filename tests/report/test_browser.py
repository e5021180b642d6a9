"""The page in a real browser; skipped where there is no Playwright or no Chromium."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from report_tools import HOSTILE, make_run
from tools import HUNG

from lastlayer import report

api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DASH = "\u2013"


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    with api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip("needs Chromium")
        try:
            browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        except api.Error as error:
            pytest.skip(f"Chromium does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@contextmanager
def opened(browser, path, *, width=1280, height=900, scheme="light", context=None):
    """A page that must not complain, ask the network for anything, or run what is in the data."""
    context = context or browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(1000 * HUNG)
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]")
    yield page
    assert said == []
    page.close()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return report.write(make_run(folder / "a", rows=80, labels=40), folder / "report.html")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    runs = [make_run(folder / name, noise=noise) for name, noise in (("good", 0.1), ("fair", 0.4), ("bad", 0.9))]
    return report.write(runs, folder / "report.html")


def column(page, number):
    return [cell.strip() for cell in page.locator(f"#label-table tbody tr > :nth-child({number})").all_inner_texts()]


def test_every_plot_is_drawn(browser, three):
    with opened(browser, three) as page:
        for name in ("recall-plot", "precision-plot", "best-plot", "all-plot", "gain-plot", "pair-plot", "heat-plot"):
            assert page.locator(f"#{name} .slot > svg").count() == 1, name
        assert page.locator("#recall-plot .slot path.line").count() == 3
        assert page.locator("#recall-plot .slot path.band").count() == 3
        assert page.locator("#forest svg").count() == 5
        assert page.locator("#history-plots .slot > svg").count() == 4
        page.locator("#recall-plot .slot svg").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#tip").inner_text().startswith("k 1\ngood: ")
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
        page.locator("#recall-plot summary").click()
        assert page.locator("#recall-plot details tbody tr").count() == 8


def test_the_label_table_sorts_and_searches_by_keyboard(browser, one):
    with opened(browser, one) as page:
        heads = page.locator("#label-table thead th")
        assert page.locator("#label-table thead th[aria-sort=descending]").inner_text() == "Support"
        support = [int(v) for v in column(page, 2)]
        assert len(support) == 25
        assert support == sorted(support, reverse=True)
        heads.nth(1).locator("button").focus()
        page.keyboard.press("Enter")
        support = [int(v) for v in column(page, 2)]
        assert support == sorted(support)
        assert heads.nth(1).get_attribute("aria-sort") == "ascending"
        page.keyboard.press("Shift+Tab")  # the focus stayed on the header
        page.keyboard.press("Space")
        names = column(page, 1)
        assert names == sorted(names)
        assert heads.nth(0).get_attribute("aria-sort") == "ascending"
        assert heads.nth(1).get_attribute("aria-sort") is None
        page.locator("#label-pager button", has_text="Next").click()
        assert page.locator("#label-pager span").inner_text() == f"26{DASH}40 of 40"
        page.locator("#label-search").fill("LABEL3")
        assert set(column(page, 1)) == {"label3", *(f"label3{i}" for i in range(10))}
        page.locator("#label-search").fill("no such label")
        assert page.locator("#label-pager span").inner_text() == "nothing found"
        page.locator("#label-search").fill("label39")
        page.locator("#label-rule").select_option("half_")
        assert column(page, 4) == [DASH]  # no precision is stored for the last label, and none is invented


def test_the_explorer_filters_searches_and_orders(browser, one):
    with opened(browser, one) as page:
        total = page.locator("#example-count").inner_text()
        assert total == "80 of 80 rows"
        for value, chips in (("misses", ".missed"), ("alarms", ".wrong")):
            page.locator("#example-kind").select_option(value)
            shown = int(page.locator("#example-count").inner_text().split()[0])
            assert 0 < shown <= 80
            assert page.locator(f'#example-kind option[value="{value}"]').inner_text().endswith(f"({shown})")
            for article in page.locator("article").all():
                assert article.locator(chips).count() > 0
        page.locator("#example-kind").select_option("kind-0")
        for article in page.locator("article").all():
            assert article.locator('[title$=": confusion"]').count() >= 2
        page.locator("#example-kind").select_option("all")
        page.locator("#example-order").select_option("errors")
        counts = [int(t.split("·")[1].split()[0]) for t in page.locator("article h3 span").all_inner_texts()]
        assert counts == sorted(counts, reverse=True)
        page.locator("#example-order").select_option("row")
        page.locator("#example-search").fill("ROW 77")
        assert page.locator("article").count() == 1
        assert page.locator("article mark").inner_text() == "row 77"
        assert "id77" in page.locator("article h3").inner_text()
        page.locator("#example-search").fill("")
        page.locator("#example-pager button", has_text="Next").click()
        assert page.locator("#example-pager span").inner_text() == f"11{DASH}20 of 80"


def test_runs_are_chosen_and_compared(browser, three):
    with opened(browser, three) as page:
        assert page.locator("#run").input_value() == "0", "the best run comes first"
        before = column(page, 3)
        page.locator("#run").select_option("2")
        assert page.locator("#h-labels").inner_text() == "Labels: bad"
        assert column(page, 3) != before
        page.locator("#example-all").check()
        assert page.locator("article").first.locator(".row").count() == 4
        assert page.locator("#difference-table tbody th").all_inner_texts() == ["fair", "bad"]
        assert "▼" in page.locator("#difference-table tbody").inner_text()
        page.locator("#reference").select_option("2")
        assert page.locator("#difference-table tbody th").all_inner_texts() == ["good", "fair"]
        assert "▲" in page.locator("#difference-table tbody").inner_text()


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_theme_follows_the_system_and_remembers_a_choice(browser, one):
    context = browser.new_context(color_scheme="dark")
    with opened(browser, one, context=context) as page:
        dark = background(page)
        page.locator("#theme label", has_text="Light").click()
        light = background(page)
        assert light != dark
        page.reload()
        page.wait_for_selector("html[data-ready]")
        assert background(page) == light
        assert page.locator("#theme input[value=light]").is_checked()
        page.locator("#theme label", has_text="Auto").click()
        assert background(page) == dark
    with opened(browser, one) as page:
        assert background(page) == light


CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const texts = "h1, h2, p, th, td, a, label, .chip, .ci, .what, .count, summary, .up, .down, .same, svg text, button";
  return [...document.querySelectorAll(texts)].filter((node) => {
    if (!node.textContent.trim() || node.disabled || node.closest("[hidden], .hidden, noscript, .skip")) return false;
    const style = getComputedStyle(node), b = light(behind(node));
    const a = light(parse(node.namespaceURI.includes("svg") ? style.fill : style.color));
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
  }).map((node) => `${node.tagName} ${node.textContent.slice(0, 40)}`);
}"""
SMALL = "[...document.querySelectorAll('svg.plot text')].filter((t) => t.getBoundingClientRect().height < 9).length"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser, three, scheme):
    with opened(browser, three, scheme=scheme) as page:
        assert page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("width", [320, 390])
def test_the_page_does_not_scroll_sideways(browser, one, three, width):
    for path in (one, three):
        with opened(browser, path, width=width, height=844) as page:
            for details in page.locator("details > summary").all():
                details.click()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(SMALL) == 0


def test_hostile_strings_are_shown_and_not_run(browser, tmp_path):
    names = [HOSTILE, '"><svg onload=window.hacked=1>', "x" * 400, *(f"label{i}" for i in range(5))]
    folders = [
        make_run(tmp_path / name, names=names, text=HOSTILE) for name in ("<img src=x onerror=window.hacked=1>", "b")
    ]
    path = report.write(folders, tmp_path / "report.html")
    with opened(browser, path, width=390) as page:
        page.locator("#example-search").fill("<IMG")
        page.locator("#label-search").fill("onerror")
        for plot in ("#heat-plot rect", "#pair-plot g", "#gain-plot rect"):
            page.locator(plot).first.hover(force=True)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        assert page.locator("#label-table tbody th").inner_text() == HOSTILE
        assert HOSTILE in page.locator("article p.text").first.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_run_with_little_in_it(browser, tmp_path):
    """No predictions, no history; then no rows."""
    bare, empty = make_run(tmp_path / "bare"), make_run(tmp_path / "empty", rows=0)
    for name in ("predictions.safetensors", "history.csv", "examples.json", "data.json", "config.yaml"):
        (bare / name).unlink()
    for runs in (bare, empty, [bare, empty], [empty, make_run(tmp_path / "whole")]):
        path = report.write(runs, tmp_path / "report.html")
        with opened(browser, path) as page:
            assert page.locator("#label-table tbody tr").count() == 8
