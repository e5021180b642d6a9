"""The report in a real browser; skipped, with a word why, where there is no Playwright or no Chromium."""

import csv
import itertools
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from browser_tools import chromium, serious
from report_tools import HOSTILE, make_run
from tools import HUNG

from lastlayer import report
from lastlayer.report import numbers
from lastlayer.runs.contents import read

pytestmark = pytest.mark.slow  # a browser takes a minute of processor time
DASH = "\u2013"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


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
        page.locator("#recall-plot details tbody tr").first.wait_for()  # which are written once the table is open
        assert page.locator("#recall-plot details tbody tr").count() == 8


def test_a_legend_switches_a_run_off_and_on(browser, three):
    with opened(browser, three) as page:
        for plot, shapes in (("#recall-plot", "path.line"), ("#gain-plot", "rect")):
            before = page.locator(f"{plot} .slot {shapes}").count()
            key = page.locator(f"{plot} .keys button", has_text="fair")
            key.focus()
            page.keyboard.press("Enter")
            assert key.get_attribute("aria-pressed") == "false"
            assert page.locator(f"{plot} .slot {shapes}").count() == before * 2 // 3
            assert page.evaluate("document.activeElement.textContent") == "fair"
            page.keyboard.press("Enter")
            assert page.locator(f"{plot} .slot {shapes}").count() == before


def test_the_slider_counts_exactly(browser, one):
    """At each position: rows with the label at this threshold, and how many of them are right."""
    run = read([one.parent / "a"])[0]
    with opened(browser, one) as page:
        page.locator("#label-table .pick-label").nth(2).click()
        name = page.locator("#threshold-label").inner_text()
        label = run.labels.index(name)
        score, true = run.held.probability[:, label], numbers.hot(run.held, 40)[:, label]
        slider = page.locator("#threshold-slider")
        assert int(slider.get_attribute("max")) == min(len(np.unique(score[true])), 41) - 1
        for key in ("Home", "ArrowRight", "End"):
            slider.press(key)
            text = page.locator("#threshold-now").inner_text()
            words = re.match(r"Threshold (\S+): (\d+) rows? gets? the label, (\d+) rightly; precision (\S+),", text)
            said = int(words[2])
            taken = np.argsort(-score, kind="stable")[:said]
            assert float(words[1]) == pytest.approx(score[taken].min(), rel=1e-2)
            assert int(words[3]) == true[taken].sum()
            assert float(words[4]) == pytest.approx(100 * true[taken].mean(), abs=0.06)


def saved(page, button):
    with page.expect_download() as download:
        button.click()
    with open(download.value.path(), encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file))


def test_tables_are_saved_as_csv(browser, tmp_path):
    names = ["=HYPERLINK(1)", 'a "b", c', *(f"label{i}" for i in range(6))]
    folders = [make_run(tmp_path / name, names=names, noise=noise) for name, noise in (("a", 0.1), ("b", 0.9))]
    path = report.write(folders, tmp_path / "report.html")
    found = report.summary(folders)["runs"]
    with opened(browser, path) as page:
        rows = saved(page, page.locator("#label-pager .save"))
        assert rows[0][:2] == ["Label", "Support"]
        table = {row[0]: row for row in rows[1:]}
        assert set(table) == {"'=HYPERLINK(1)", *names[1:]}, "a name is no formula"
        place = rows[0].index("F1")
        for i, name in enumerate(names[1:], 1):
            assert float(table[name][place]) == pytest.approx(found[0]["labels"]["f1"][i], abs=1e-4)
        rows = saved(page, page.locator("#change-pager .save"))
        assert rows[0] == ["Label", "Difference", "a", "b", "Support"]
        a, b = (one["labels"]["f1"] for one in found)
        assert {row[0]: float(row[1]) for row in rows[1:]}[names[1]] == pytest.approx(a[1] - b[1], abs=2e-4)
        steps = [abs(float(row[1])) for row in rows[1:]]
        assert steps == sorted(steps, reverse=True)
        rows = saved(page, page.locator("#set-metrics >> xpath=../following-sibling::button[1]"))
        assert rows[1][1].split()[0] == f"{100 * found[0]['sets']['predicted']['set_f1']:.1f}"


def test_differences_by_label(browser, three):
    with opened(browser, three) as page:
        assert page.locator("#change-table thead th").all_inner_texts()[1:4] == ["Difference", "good", "fair"]
        page.locator("#change-b").select_option("2")
        page.locator("#change-order").select_option("worse")
        shown = page.locator("#change-table tbody td:nth-child(2)").all_inner_texts()
        values = [float(text.strip("▲▼ ±").replace("\u2212", "-").replace("+", "")) for text in shown]
        assert values == sorted(values)
        assert "good is better in" in page.locator("#change-count").inner_text()
        page.locator("#change-least").fill("1000")
        assert page.locator("#change-pager span").inner_text() == "nothing found"


def test_long_names_keep_both_ends(browser, tmp_path):
    names = [f"a very long name that begins like the others {'and goes on ' * 6}{i}" for i in range(8)]
    path = report.write(make_run(tmp_path / "a", names=names), tmp_path / "report.html")
    with opened(browser, path) as page:
        shown = page.locator("#heat-plot text.name").all_text_contents()
        assert len(set(shown)) == 8, "names that begin alike stay apart"
        assert all("…" in text for text in shown)
        chip = page.locator("article .chip").first
        assert "…" in chip.inner_text()
        assert chip.get_attribute("title").startswith("a very long name")
    with opened(browser, path, width=390) as page:
        lines = "(n) => n.offsetHeight / parseFloat(getComputedStyle(n).lineHeight)"
        found = page.evaluate(f"[...document.querySelectorAll('.chip small')].map({lines})")
        assert max(found) < 1.5, "a probability is not broken over two lines"


def test_the_focus_is_kept_and_headings_are_in_order(browser, three):
    with opened(browser, three) as page:
        forward = page.locator("#example-pager button", has_text="Next")
        forward.focus()
        for _ in range(5):  # 60 rows, ten at a time
            page.keyboard.press("Enter")
        assert forward.is_disabled()
        assert page.evaluate("document.activeElement.textContent") == "Previous"
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map((h) => +h.tagName[1])")
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b <= a + 1 for a, b in itertools.pairwise(levels))


def test_what_is_left_out_is_said(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("lastlayer.report.page.EXAMPLES", 50)
    monkeypatch.setattr("lastlayer.report.thresholds.LABELS", 3)
    path = report.write(make_run(tmp_path / "a", rows=80, labels=40), tmp_path / "report.html")
    with opened(browser, path) as page:
        assert page.locator("#example-count").inner_text() == "50 of 50 rows; the page holds 50 of the 80 held-out rows"
        assert "The 16 most frequent of 40 labels are shown." in page.locator("#heat-plot .how").inner_text()
        page.locator("#label-table .pick-label").nth(5).click()
        assert "the 3 most frequent of 40 labels; this is none of them" in page.locator("#threshold-note").inner_text()


@pytest.mark.parametrize(
    ("runs", "scheme", "width"), [("one", "light", 390), ("three", "light", 1280), ("three", "dark", 1280)]
)
def test_axe_finds_nothing_serious(browser, runs, scheme, width, request):
    with opened(browser, request.getfixturevalue(runs), scheme=scheme, width=width) as page:
        assert serious(page) == []


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
  const texts = "h1, h2, h3, p, th, td, a, label, .chip, .ci, .what, .count, summary, .up, .down, .same, .soft, small, "
    + "svg text, button";
  return [...document.querySelectorAll(texts)].filter((node) => {
    if (!node.textContent.trim() || node.disabled || node.closest("[hidden], .hidden, noscript, .skip")) return false;
    const style = getComputedStyle(node), b = light(behind(node));
    const back = behind(node), front = parse(node.namespaceURI.includes("svg") ? style.fill : style.color);
    const a = light(front.slice(0, 3).map((v, i) => style.opacity * v + (1 - style.opacity) * back[i]));
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


# ---- labels to look at: ticks, and the corrected file
SUGGESTED = {  # in the first row `fruit` is wrong and `red` missing, in the third `blue` is wrong
    "a.tsv": "text\tlabels\nan apple\tfruit,round\na 'tomato\tred\nthe sky \U0001f600\tblue\n",
    "b.csv": '\ufeffid,text,tags\r\n7,"an, apple","fruit; round"\r\n8,"two\nlines",red\r\n9,the sky,blue\r\n',
    "c.csv": "text,fruit,round,red,blue\nan apple here,1,1,0,0\na tomato here,0,0,1,0\nthe sky here,0,0,0,1\n",
    "d.jsonl": '{"text": "an apple", "labels": ["fruit", "round"], "n": 1.0}\n{"text":"x","labels":["red"]}\n'
    '{"text": "the sky", "labels": "blue"}\n',
    "e.json": '[{"labels": ["fruit", "round"], "text": "an apple"}, {"text": "x", "labels": ["red"]},\n'
    '{"text": "the sky", "labels": ["blue"]}]',
    "f.txt": "__label__fruit __label__round an apple\n__label__red a tomato\n__label__blue the sky\n",
    "g.svm": "fruit,round 1:0.5 2:1\nred 1:1\nblue 3:2\n",
    "h.tsv": "text\tlabels\nan äpple\t['fruit', 'round']\na tomato\t['red']\nthe sky\t['blue']\n",
}


def suggested(path):
    """Rows of a file, what is suggested for them, and the page's data."""
    import torch

    from lastlayer.data import read
    from lastlayer.decode.suggest import LabelSuggestions
    from lastlayer.train.suggest_sheet import sheet

    data = read(path)
    label = torch.tensor([data.label_names.index(name) for name in ("red", "fruit", "blue")])
    sure, rates = torch.tensor([0.9, 0.8, 0.7]), torch.full((data.n_labels,), 0.8)
    found = LabelSuggestions(torch.tensor([0, 0, 2]), label, torch.tensor([True, False, False]), sure, rates, 0.8, 3)
    return data, sheet(str(path), data, found)


@pytest.mark.parametrize("name", sorted(SUGGESTED))
def test_the_corrected_file_of_the_page_is_that_of_the_command(browser, tmp_path, name, monkeypatch):
    from lastlayer.data.rewrite import Change, rewrite
    from lastlayer.report.suggestions import suggestions_page
    from lastlayer.train import suggest_sheet

    path = tmp_path / name
    path.write_bytes(SUGGESTED[name].encode())
    if picked := name.startswith("b"):
        monkeypatch.setattr(suggest_sheet, "PART", 10)
    data, found = suggested(path)
    (tmp_path / "page.html").write_text(suggestions_page(found))
    changes = {0: Change(frozenset({"red"}), frozenset({"fruit"})), 2: Change(drop=frozenset({"blue"}))}
    with opened(browser, tmp_path / "page.html") as page:
        save = page.locator("#suggest-corrected")
        assert save.is_disabled()
        page.locator("#suggest-all").click()
        if picked:  # too large to be a part of the page: the file is chosen, and another one is refused
            (tmp_path / "other.csv").write_text("text,labels\n")
            page.locator("#suggest-file").set_input_files(tmp_path / "other.csv")
            page.wait_for_selector("text=not the file")
            assert save.is_disabled()
            page.locator("#suggest-file").set_input_files(path)
            page.wait_for_selector("text=This is the file")
        with page.expect_download() as download:
            save.click()
        made = rewrite(path, tmp_path / "by_command", data, changes)
        assert download.value.suggested_filename == f"corrected{made.suffix}"
        assert Path(download.value.path()).read_bytes() == made.read_bytes()


def test_ticks_are_searched_kept_and_saved_for_the_command(browser, tmp_path, monkeypatch):
    from lastlayer.cli import main

    path, run = tmp_path / "a.tsv", make_run(tmp_path / "run", rows=20, labels=6)
    path.write_text(SUGGESTED["a.tsv"])
    _, found = suggested(path)
    from lastlayer.runs import RunFolder

    RunFolder(run).write_json("suggestions.json", found)
    written = report.write(run, tmp_path / "report.html")
    context = browser.new_context()
    with opened(browser, written, context=context) as page:
        section = page.locator("#suggestions")
        assert "1 labels are probably missing and 2 probably wrong" in section.inner_text()
        page.locator("#suggest-search").fill("apple")
        assert section.locator("#suggest-table tbody tr").count() == 2
        page.locator("#suggest-kind").select_option("wrong")
        section.locator("#suggest-table input").first.check()
        assert "1 of 3 suggestions; 1 ticked" in page.locator("#suggest-count").inner_text()
        page.reload()
        page.wait_for_selector("html[data-ready]")
        assert "3 of 3 suggestions; 1 ticked" in page.locator("#suggest-count").inner_text()
        with page.expect_download() as download:
            page.locator("#suggest-ticks").click()
        download.value.save_as(tmp_path / "ticks.csv")
        section.locator("summary").click()
        assert "about 80 %" in page.locator("#rate-table").inner_text()
    monkeypatch.chdir(tmp_path)
    assert main(["suggest", "a.tsv", "--accept", "ticks.csv", "--out", "done"]) == 0
    assert (tmp_path / "done/corrected.tsv").read_text() == SUGGESTED["a.tsv"].replace("fruit,round", "round")


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_axe_finds_nothing_serious_in_suggestions(browser, tmp_path, scheme, width):
    from lastlayer.report.suggestions import suggestions_page

    (tmp_path / "a.tsv").write_text(SUGGESTED["a.tsv"])
    (tmp_path / "page.html").write_text(suggestions_page(suggested(tmp_path / "a.tsv")[1]))
    with opened(browser, tmp_path / "page.html", scheme=scheme, width=width) as page:
        assert serious(page) == []
        page.locator("summary").first.click()  # the rates
        page.locator("#suggest-all").click()
        page.locator("#suggest-search").fill("nothing like it")
        assert serious(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_why_a_row_gets_a_label_and_what_speaks_for_one(browser, tmp_path):
    run, why = make_run(tmp_path / "run", rows=20, labels=6), [[["sun", 1.5], [HOSTILE, 0.5]], [["rain", -2.0]]]
    from lastlayer.runs import RunFolder

    rows = {str(row): {str(label): why for label in range(6)} for row in range(20)}
    RunFolder(run).write_json("reasons.json", {"exact": True, "rows": rows, "labels": {"0": why}})
    with opened(browser, report.write(run, tmp_path / "report.html")) as page:
        article = page.locator("#example-list article").nth(4)
        article.locator("summary").click()
        assert "sun +1.5" in article.inner_text()
        assert "rain \u22122" in article.inner_text()
        assert "Largest weights. For: sun +1.5" in page.locator("#label-words").inner_text()
