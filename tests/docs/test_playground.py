"""The playground's numbers are those of the package, in node and in a browser."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from browser_tools import chromium, serious
from tools import HUNG

import lastlayer as ll

DOCS = Path(__file__).parents[2] / "docs"
MATHS = DOCS / "_static" / "playground" / "maths.js"
METHODS = {
    "sigmoid": lambda x, k, t: (x / t).sigmoid(),
    "softmax": lambda x, k, t: (x / t).softmax(-1),
    "cappedSoftmax": lambda x, k, t: ll.capped_softmax(x, k, temperature=t),
    "cappedSparsemax": lambda x, k, t: ll.capped_sparsemax(x, k, temperature=t),
    "lml": lambda x, k, t: ll.lml(x, k, temperature=t),
}


def states():
    generator = torch.Generator().manual_seed(0)
    for n in range(3, 9):
        for k in (0, 0.35, 1, 1.5, 2, n - 0.4, n - 1, n):
            for temperature in (0.05, 1, 7):
                x = (3 * torch.randn(n, generator=generator)).clamp(-5, 5).double()
                yield {"x": x.tolist(), "k": k, "temperature": temperature, "label": n // 2}
    yield {"x": [1.0, 1.0, 1.0], "k": 2, "temperature": 1, "label": 0}
    yield {"x": [5.0, 5.0, -5.0, -5.0], "k": 2, "temperature": 0.05, "label": 2}


def assert_same(state, found):
    x, k, t, label = (state[key] for key in ("x", "k", "temperature", "label"))
    x = torch.tensor(x, dtype=torch.float64)
    close = {"atol": 1e-6, "rtol": 1e-6}
    for name, project in METHODS.items():
        given = torch.tensor(found["y"][name], dtype=torch.float64)
        torch.testing.assert_close(given, project(x, k, t), **close)
        jacobian = torch.autograd.functional.jacobian(lambda x, project=project: project(x, k, t), x)
        given = torch.tensor(found["gradients"][name], dtype=torch.float64)
        torch.testing.assert_close(given, jacobian[:, label], **close)
    if 0 < k < len(x):
        leaf = x.clone().requires_grad_()
        loss = ll.lml_loss(leaf[None], torch.tensor([[label]]), k, temperature=t)
        loss.backward()
        torch.testing.assert_close(torch.tensor(found["loss"], dtype=torch.float64), loss.detach(), **close)
        torch.testing.assert_close(torch.tensor(found["pushes"], dtype=torch.float64), -leaf.grad, **close)
        nu = ll.lml_threshold(x, k, temperature=t).item()
        assert found["nu"] == pytest.approx(nu, abs=1e-6, rel=1e-9)
        low, high = found["bounds"]
        assert low - 1e-9 <= nu <= high + 1e-9
        assert len(found["iterates"]) <= 7
        assert found["iterates"][-1] == found["nu"]


def node(code, *arguments):
    program = shutil.which("node") or shutil.which("nodejs")
    if not program:
        pytest.skip("node is not installed")
    command = [program, "--input-type=module", "-e", code.replace("MATHS", MATHS.as_uri()), *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_numbers_in_node():
    cases = list(states())
    code = 'import { evaluate } from "MATHS"; console.log(JSON.stringify(JSON.parse(process.argv[1]).map(evaluate)))'
    for state, found in zip(cases, node(code, json.dumps(cases)), strict=True):
        assert_same(state, found)


def test_budgets_in_node():
    generator = torch.Generator().manual_seed(0)
    code = (
        'import { balanced, weighted } from "MATHS"; const [x, cost, budget, matrix, k] = JSON.parse(process.argv[1]);'
        "console.log(JSON.stringify([weighted(x, cost, budget), balanced(matrix, k)]))"
    )
    for share, k in ((0.0, 0.0), (0.1, 0.5), (0.45, 1.0), (0.9, 3.4), (1.0, 4.0)):
        x, matrix = (3 * torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((5,), (4, 4)))
        cost = torch.tensor([4.0, 0.0, 2.0, 0.5, 3.0], dtype=torch.float64)
        budget = share * cost.sum().item()
        found = node(code, json.dumps([x.tolist(), cost.tolist(), budget, matrix.tolist(), k]))
        expected = ll.lml(x, budget, weight=cost), ll.lml_balanced(matrix, k)
        for given, right in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(given, dtype=torch.float64), right, atol=1e-8, rtol=0)


def test_the_polygon_is_a_triangle_then_a_hexagon():
    cuts = [0.5, 1, 1.5, 2, 2.5]
    code = 'import { polygon } from "MATHS"; console.log(JSON.stringify(JSON.parse(process.argv[1]).map(polygon)))'
    found = node(code, json.dumps(cuts))
    assert [len(corners) for corners in found] == [3, 3, 6, 3, 3]
    for k, corners in zip(cuts, found, strict=True):
        assert all(sum(corner) == pytest.approx(k) and min(corner) >= 0 and max(corner) <= 1 for corner in corners)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    sys.path.insert(0, str(DOCS / "_ext"))
    pytest.importorskip("sphinx")
    import playground

    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{playground.bundle()}", "utf-8")
    with chromium() as browser:
        view = browser.new_page()
        view.set_default_timeout(1000 * HUNG)
        view.complaints = []
        view.on("console", lambda message: view.complaints.append(message.text))
        view.on("pageerror", lambda error: view.complaints.append(str(error)))
        view.on("request", lambda r: r.url.startswith("file:") or view.complaints.append(r.url))
        view.goto(path.as_uri())
        yield view
        assert view.complaints == []


def shown(page):
    page.wait_for_function("document.getElementById('play').state")
    return page.evaluate("document.getElementById('play').state")


@pytest.mark.slow
def test_numbers_in_a_browser(page):
    for state in list(states())[::5]:
        words = ",".join(map(str, state["x"]))
        page.evaluate("hash => { location.hash = hash }", f"x={words}&k={state['k']}&t={state['temperature']}")
        moved = "x => String(document.getElementById('play').state.x) === String(x)"
        page.wait_for_function(moved, arg=state["x"])
        found = shown(page)
        assert_same({**state, "label": found["label"]}, found)
        cells = page.evaluate(
            "[...document.querySelectorAll('[data-part=numbers] tr')].map(r => r.lastChild.textContent)"
        )[1:-1]
        expected = ll.lml(torch.tensor(state["x"]).double(), state["k"], temperature=state["temperature"])
        assert [float(cell) for cell in cells] == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.slow
def test_keyboard_and_pointer_move_the_logits(page):
    page.evaluate("location.hash = 'x=1,0,-1&k=1&t=1&label=0'")
    page.wait_for_function("document.getElementById('play').state.x.join() === '1,0,-1'")
    slider = page.locator("#play .slider").nth(1)
    slider.focus()
    for key in ("ArrowUp", "ArrowUp", "PageUp", "ArrowDown"):
        page.keyboard.press(key)
    assert shown(page)["x"][1] == pytest.approx(1.1)
    assert slider.get_attribute("aria-valuenow") == "1.1"
    box = slider.locator(".track").bounding_box()
    page.mouse.move(box["x"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"], box["y"] + 0.25 * box["height"])
    page.mouse.up()
    assert shown(page)["x"][1] == pytest.approx(2.5, abs=0.1)
    page.locator("[data-part=k]").focus()
    page.keyboard.press("ArrowRight")
    assert shown(page)["k"] == pytest.approx(1.05)
    page.locator("#play input[type=radio]").nth(2).check()
    assert shown(page)["label"] == 2


@pytest.mark.slow
def test_budgets_in_a_browser(page):
    page.locator("#play input[aria-label='cost b']").fill("0")
    page.locator("#play input[aria-label='score of row 2, column 3']").fill("-2.5")
    page.locator("[data-part=share]").focus()
    page.keyboard.press("ArrowRight")
    found = page.evaluate("document.getElementById('play').budgets")
    assert found["k"] == pytest.approx(1.05)
    assert found["matrix"][1][2] == -2.5
    x, cost, matrix = (torch.tensor(found[key], dtype=torch.float64) for key in ("scores", "cost", "matrix"))
    y = torch.tensor(found["weighted"], dtype=torch.float64)
    torch.testing.assert_close(y, ll.lml(x, found["budget"], weight=cost), atol=1e-8, rtol=0)
    table = torch.tensor(found["balanced"], dtype=torch.float64)
    torch.testing.assert_close(table, ll.lml_balanced(matrix, found["k"]), atol=1e-8, rtol=0)
    shown_cells = page.evaluate(
        "[...document.querySelectorAll('[data-part=matrix] .cell span')].map(s => s.textContent)"
    )
    assert [float(cell) for cell in shown_cells] == pytest.approx(table.flatten().tolist(), abs=6e-4)


@pytest.mark.slow
def test_a_finger_moves_the_logits_and_not_the_page(page):
    """Real touch events: without `touch-action` on the svg the browser scrolls and cancels the pointer."""
    session = page.context.new_cdp_session(page)
    session.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    page.set_viewport_size({"width": 390, "height": 500})
    page.evaluate("location.hash = 'x=1,0,-1&k=1&t=1&label=0'")
    page.wait_for_function("document.getElementById('play').state.x.join() === '1,0,-1'")
    slider = page.locator("#play .slider").nth(1)
    slider.scroll_into_view_if_needed()
    box, before = slider.locator(".track").bounding_box(), page.evaluate("scrollY")
    x, y = box["x"], box["y"] + 0.5 * box["height"]
    touch = {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]}
    session.send("Input.dispatchTouchEvent", touch)
    for step in range(1, 11):
        points = [{"x": x, "y": y - 0.025 * step * box["height"]}]
        session.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": points})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert shown(page)["x"][1] == pytest.approx(2.5, abs=0.2)
    assert page.evaluate("scrollY") == before
    session.send("Emulation.setTouchEmulationEnabled", {"enabled": False})


@pytest.mark.slow
def test_headings_follow_the_title(page):
    """The page's title is the only heading above those of the app."""
    assert set(page.evaluate("[...document.querySelectorAll('#play :is(h1, h2, h3, h4)')].map(h => h.tagName)")) == {
        "H2"
    }


@pytest.mark.slow
def test_axe_finds_nothing_serious(page):
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 844})
        assert serious(page, "#play") == []


@pytest.mark.slow
def test_it_fits_on_a_phone(page):
    page.set_viewport_size({"width": 390, "height": 844})
    for n in (3, 8):
        page.evaluate(f"location.hash = 'x={','.join(['1'] * n)}&k=2&t=1'")
        page.wait_for_function(f"document.getElementById('play').state.x.length === {n}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for text in page.evaluate("[...document.querySelectorAll('#play section p')].map(p => p.textContent)"):
        assert not re.search(r"NaN|undefined", text)
