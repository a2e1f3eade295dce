"""Try the server's page in a headless browser: ask, and look at the answer, its colours and its figures.

    python -m scripts.try_page --browser /usr/bin/chromium --picture page.png

Requires ``pip install playwright``; the browser may be the system's.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.support.server_process import serve

QUESTION = "import os\nimport sys\nimport re\n\nimport os\nimport sys\n"


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def failures(page: Page, url: str) -> list[str]:
    """What is wrong with the page."""
    errors: list[str] = []
    page.on("pageerror", lambda e: errors.append(f"an error of the script: {e}"))
    page.on("request", lambda r: errors.append(f"it asks {r.url}") if not r.url.startswith(url) else None)
    page.goto(url)
    page.fill("#tokens", "80")
    ask(page, QUESTION)
    figures = page.locator("footer").first
    expect(figures).to_contain_text("drafts accepted", timeout=60_000)
    expect(figures).to_contain_text("tokens/s")
    for source in ("model", "head", "copies"):
        if page.locator(f"article .{source}").count() == 0:
            errors.append(f"no token of {source}")
    ask(page, "<b>bold</b><script>alert(1)</script>")
    expect(page.locator("footer").nth(1)).to_contain_text("tokens/s", timeout=60_000)
    if page.locator("article b, article script").count() > 0:
        errors.append("text of the chat is HTML")
    page.fill("#tokens", "2000")
    ask(page, QUESTION)
    page.wait_for_selector("#stop:visible")
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    page.click("#clear")
    if page.locator("article").count() > 0:
        errors.append("a new chat is not empty")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description="Try the server's page in a headless browser.")
    parser.add_argument("--browser", help="The path to Chromium (default: playwright's own).")
    parser.add_argument("--picture", type=Path, help="Write a picture of an answer to this file.")
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp()) / "server.log"
    with serve(log, "--mtp") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        page, url = browser.new_page(), server.url.removesuffix("v1")
        found = failures(page, url)
        if args.picture is not None:
            page.fill("#tokens", "80")
            ask(page, QUESTION)
            expect(page.locator("footer").first).to_contain_text("drafts accepted", timeout=60_000)
            page.screenshot(path=args.picture, full_page=True)
        browser.close()
    print(*found, f"{len(found)} failures ({log})", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
