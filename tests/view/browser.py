"""A real browser without a window, or a reason why there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--force-device-scale-factor=1",
)  # fmt: skip


@contextmanager
def browser(profile: Path, width: int = 1280, height: int = 1280) -> Iterator[Any]:
    """A Selenium driver of Chromium with an empty profile. Skips the test where either is missing."""
    pytest.importorskip("selenium", reason="needs selenium: pip install selenium")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver: scripts/browser.sh installs them, as root, with apt-get")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chrome.set_page_load_timeout(60)
        yield chrome
    finally:
        chrome.quit()
