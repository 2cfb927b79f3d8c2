"""Chromium without a window, driven by selenium."""

import shutil
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
]


def missing() -> str | None:
    """Return what the machine lacks; None if it has all."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium"
    return next((name for name in ("chromium", "chromedriver") if shutil.which(name) is None), None)


def open_chromium(profile: Path, *flags: str) -> Any:
    """Return a selenium driver that records the browser's console.

    Args:
        profile: an empty folder.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in [*FLAGS, *flags, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
