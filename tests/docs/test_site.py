"""The built pages: complete, on their own, and linked without gaps."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser_tools import chromium, serious

pytest.importorskip("sphinx")
pytest.importorskip("furo")
from filelock import FileLock  # comes with torch

pytestmark = pytest.mark.slow  # `make docs` builds the pages too

DOCS = Path(__file__).parents[2] / "docs"
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}


class Page(HTMLParser):
    """What a page loads, links to and can be linked at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads, self.links, self.anchors = [], [], {""}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = dict(given)
        self.anchors |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        if tag in LOADS and attributes.get(LOADS[tag]):
            self.loads.append(attributes[LOADS[tag]])
        if attributes.get("srcset"):
            self.loads.append(attributes["srcset"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from nothing but the figures, which are drawn when their source is newer.

    `SITE` names one that `make docs` has just built, as in CI.
    """
    if "SITE" in os.environ:
        return Path(os.environ["SITE"]).resolve()
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers of a run share what the first has built
        folder = folder.parent
    out, done = folder / "site", folder / "site.done"
    with FileLock(folder / "site.lock"):
        if not done.exists():
            command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(out)]
            built = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            assert built.returncode == 0, built.stderr[-3000:]
            done.touch()
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_pages_load_nothing_from_another_host(site, pages):
    for path, page in pages.items():
        for target in page.loads:
            assert not re.match(r"(https?:)?//", target), f"{path.name} loads {target}"
            if not target.startswith("data:"):
                assert (path.parent / unquote(urlsplit(target).path)).exists(), f"{path.name} loads {target}"
    for path in [*site.rglob("*.css"), *site.rglob("*.html")]:
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", path.read_text("utf-8")), path.name


def test_links_inside_the_site_lead_somewhere(pages):
    known = {path.resolve(): page for path, page in pages.items()}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            assert target.exists(), f"{path.name} links to {link}"
            found = known.get(target)
            # Sphinx's own links from a listing back to its page take the package for the module.
            if parts.fragment and found and "_modules" not in path.parts:
                assert unquote(parts.fragment) in found.anchors, f"{path.name} links to {link}"


def test_pictures_have_words(site):
    for path in site.rglob("*.html"):
        for picture in re.findall(r"<img [^>]*>", path.read_text("utf-8")):
            ours = "toggler" not in picture  # of the index, by Sphinx
            assert not ours or re.search(r'alt="[^"]{15,}"', picture), f"{path.name}: {picture}"


def test_a_page_has_a_version_a_description_an_icon_and_its_source(site):
    text = (site / "index.html").read_text("utf-8")
    assert re.search(r"<title>lastlayer \d", text)
    assert 'name="description"' in text
    assert "_sources/index.md" in text
    assert (site / "_static" / "favicon.svg").exists()


def test_the_report_of_the_demo_is_part_of_the_site(site, pages):
    assert {"summary", "labels", "examples"} <= pages[site / "demo.html"].anchors
    for name in ("index.html", "report.html"):
        assert "demo.html" in pages[site / name].links


SEARCHED = {
    "BCEWithLogits": ("from/bce", "loss"),
    "class imbalance": ("from/bce", "loss"),
    "missing labels": ("loss", "guides/tags"),
    "threshold": ("decode", "from/bce"),
    "calibration": ("metrics", "guides/tags"),
}


@pytest.mark.parametrize("query", SEARCHED)
def test_the_search_finds_the_words_that_people_have(site, query):
    """As the page's script does it: a page has every word, stemmed, or a longer word that contains it."""
    from sphinx.search.en import SearchEnglish

    text = (site / "searchindex.js").read_text("utf-8")
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    stem = SearchEnglish({}).stem
    places = None
    for word in query.lower().split():
        hits = set()
        for part in ("terms", "titleterms"):
            for term, pages in index[part].items():
                if stem(word) in term.lower():
                    hits |= {pages} if isinstance(pages, int) else set(pages)
        places = hits if places is None else places & hits
    assert set(SEARCHED[query]) <= {index["docnames"][place] for place in places}


def test_the_search_page_lists_the_page_for_people_who_use_bce(site):
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{(site / 'search.html').as_uri()}?q=BCEWithLogits")
        page.wait_for_selector("#search-results li a")
        assert "from/bce.html" in " ".join(a.get_attribute("href") for a in page.locator("#search-results li a").all())


def test_axe_finds_nothing_serious(site):
    with chromium() as browser:
        for name, scheme in (("index", "light"), ("index", "dark"), ("playground", "light"), ("loss", "dark")):
            page = browser.new_page(color_scheme=scheme)
            page.goto((site / f"{name}.html").as_uri())
            assert serious(page) == [], f"{name}, {scheme}"
            page.close()


def test_every_public_name_can_be_linked(site):
    from sphinx.util.inventory import InventoryFile

    sys.path.insert(0, str(DOCS / "_ext"))
    import reference

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    known = {name for kind in inventory for name in inventory[kind] if kind.startswith("py:")}
    paths = {path for names in reference.public_names().values() for path in names.values()}
    assert paths - known == set()
