"""A headless Chromium for tests of the status page: Debian's, from PATH, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PATIENCE_MS = 20_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test that asks where there is no Chromium."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on PATH (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS.split())
        yield browser
        browser.close()
