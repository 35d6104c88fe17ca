"""A real browser for the console: Chromium, headless, driven by Playwright."""

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

# With it, tests leave the pictures of config/console.md there: make pictures.
PICTURES = "LMI_CONSOLE_PICTURES"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Return a Chromium of this machine: the distribution's, or one Playwright has installed."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is not None:
        return found
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    patterns = ("chromium*/chrome-linux*/chrome", "chromium*/chrome-linux*/headless_shell")
    return next((str(path) for name in patterns for path in sorted(cache.glob(name))), None)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Run a browser; skip where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make setup")
    path = find_chromium()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
    with playwright.sync_playwright() as driver:
        # Its own sandbox wants a user that is not root; the pages are ours.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page of the console, and everything that went wrong on it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "device_scale_factor": 1, **options}
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def open(self, *, until: str | None = "Ready") -> "Visit":
        """Load the console; return once its status is `until`."""
        self.page.goto(f"{self.url}/console")
        if until:
            self.page.locator("#status", has_text=until).wait_for()
        return self

    def tab(self, name: str) -> None:
        """Open one of the tabs."""
        self.page.get_by_role("tab", name=name).click()

    def polls(self) -> int:
        """Return how often the page has asked for the state."""
        return sum(url.endswith("/console/state") for url in self.requests)

    def picture(self, name: str, *, full: bool = False) -> None:
        """Keep a picture of this state, where pictures are wanted."""
        folder = os.environ.get(PICTURES)
        if folder:
            self.page.wait_for_timeout(300)  # for transitions to end
            image = Image.open(io.BytesIO(self.page.screenshot(full_page=full)))
            image.convert("RGB").quantize(256, kmeans=1).save(f"{folder}/{name}.png", optimize=True)

    def close(self) -> None:
        """Close the page; fail if it broke its own rules meanwhile."""
        self.context.close()
        foreign = [url for url in self.requests if not url.startswith(self.url)]
        assert foreign == [], "the page made a request to another host"
        assert self.complaints == []
