"""The first pages of the site, in a browser as wide as a phone: no table is wider."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.browser import chromium
from tests.support.documentation import FIRST_PAGES, ROOT

PHONE = {"width": 390, "height": 844}
# The tables of the page that can only be read by moving them, by their first header.
WIDE = """() => [...document.querySelectorAll(".md-content table")].filter(table => {
    const frame = table.closest(".md-typeset__scrollwrap") || table.parentElement;
    return frame.scrollWidth > frame.clientWidth + 1;
}).map(table => table.textContent.trim().slice(0, 60))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environ, check=True)
    return folder


def test_tables_of_first_pages_need_no_scrolling(site: Path) -> None:
    """Nor does a page itself; the check sees a table that is wide."""
    with chromium() as browser:
        page = browser.new_page(viewport=PHONE)
        for name in FIRST_PAGES:
            path = name.replace("README.md", "index.md").removesuffix(".md")
            page.goto(f"file://{site / path}.html")
            assert page.locator("h1").count() == 1
            page.wait_for_timeout(200)  # until tables have their frames
            assert page.evaluate(WIDE) == [], name
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
        page.goto(f"file://{site}/docs/vllm-routes.html")
        page.wait_for_timeout(200)
        assert page.evaluate(WIDE)
