"""Chromium for the tests: the one of the machine, driven by Playwright. Tests are skipped where it is missing."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
START = 120_000  # milliseconds in which a browser that works opens its first page, also on a busy machine


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; or the test is skipped, with what to install."""
    api = pytest.importorskip("playwright.sync_api", reason='no Playwright: pip install ".[browser]"')
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("no Chromium: install it with the package manager of the machine, such as apt install chromium")
    with api.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=found, args=FLAGS, timeout=START)
            page = browser.new_page()
            page.goto("data:text/html,<p>ready", timeout=START)
            page.close()
        except api.Error as error:
            pytest.skip(f"Chromium does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


def serious(page: Any, part: str = "html") -> list[tuple[str, str]]:
    """The rules of axe-core that are broken seriously, each with the first element that breaks it."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip('no axe-core: pip install ".[browser]"')
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate((Path(found.origin).parent / "axe.min.js").read_text("utf-8"))
    broken = page.evaluate("part => axe.run(part, { resultTypes: ['violations'] })", part)["violations"]
    return [
        (rule["id"], rule["nodes"][0]["html"][:200]) for rule in broken if rule["impact"] in ("serious", "critical")
    ]
