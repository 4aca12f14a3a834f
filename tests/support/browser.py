"""A browser that opens pages, uses all their controls, and reads their tables."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sinkscope.html_page import Contents, write_page
from sinkscope.results.manifest import PAGE

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# opens all details, sets every choice to its last and its first value, presses every button; returns their number
USE_EVERY_CONTROL = """async () => {
    document.querySelectorAll("details").forEach((node) => { node.open = true; });
    const use = (control, isLast) => {
        const part = control.querySelector("select, input");
        if (part.tagName === "SELECT") part.selectedIndex = isLast ? part.options.length - 1 : 0;
        else if (part.type === "range") part.value = isLast ? part.max : part.min;
        else if (part.type === "checkbox") part.checked = isLast;
        else part.value = isLast ? "layer > 0" : "";
        part.dispatchEvent(new Event(["range", "search"].includes(part.type) ? "input" : "change"));
    };
    const controls = document.querySelector("main").getElementsByClassName("control");
    for (const isLast of [true, false])
        for (let at = 0; at < controls.length; at++) use(controls[at], isLast);
    document.querySelectorAll("main .several input").forEach((box) => { box.click(); box.click(); });
    document.querySelectorAll("main button:enabled").forEach((button) => button.click());
    window.dispatchEvent(new Event("beforeprint"));
    return controls.length;
}"""


def chromium() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextmanager
def launched() -> Iterator[Any]:
    """Launch a browser, or skip the test if there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    if chromium() is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, contents: Contents, folder: Path) -> Iterator[Any]:
    """Open the page of some contents, and assert that it logs no error and makes no request."""
    write_page(contents, folder)
    path = folder / PAGE
    complaints: list[str] = []
    window = browser.new_context(viewport={"width": 1280, "height": 900})
    page = window.new_page()
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
    page.on(
        "request",
        lambda asked: (
            None  # a blob is a download
            if asked.url == path.as_uri() or asked.url.startswith(("blob:", "data:"))
            else complaints.append(f"request of {asked.url}")
        ),
    )
    try:
        page.goto(path.as_uri())
        page.locator("body[data-ready]").wait_for()
        page.evaluate("document.querySelectorAll('details.fold').forEach((fold) => { fold.open = true; })")
        yield page
        assert complaints == []
    finally:
        window.close()
