"""Try the server's page in a headless browser: what it shows, sends and keeps, with answers of the demo and with made-up ones.

    python -m scripts.try_page --browser /usr/bin/chromium --pictures pictures/

Requires ``pip install playwright``; the browser may be the system's.
"""

import argparse
import json
import sys
import tempfile
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.support.server_process import serve_here

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
Shot = Callable[..., None]
CHAT = "**/v1/chat/completions"
BEGINNING = """\
def is_even(n):
    \"\"\"Return whether a number is even.\"\"\"
    return n % 2 == 0


def is_odd(n):
"""
ENDLESS = "import os\nimport sys\nimport re\n\nimport os\nimport sys\n"
MARKDOWN = """\
## Two ways to read a file

**Short** answer with `code`, a [link](https://example.org) and a list:

1. with a loop

```python
def read(path: str) -> list[str]:
    return [line.rstrip() for line in open(path)]
```

| way | lines |
|---|---|
| loop | 3 |
"""
HOSTILE = """\
<script>document.title = "owned"</script><img src=x onerror="document.title='owned'">
<svg onload="document.title='owned'"><iframe srcdoc="<script>parent.document.title='owned'</script>"></iframe></svg>

[run](javascript:document.title='owned') [data](data:text/html,<script>1</script>) ![picture](https://example.org/?secret)

<form action="https://example.org"><input name="key"></form><style>body { display: none }</style><a id="turns" name="x">id</a>

```"><img/src=x/onerror=document.title='owned'>
<b>code</b>
```
"""
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAFklEQVR42mNk+M9AEmAc1TCqYVQDAwMAHpoBEcTzbkEAAAAASUVORK5CYII="


class Fake:
    """A chat model's answers in place of the server's. Keeps the bodies of the requests."""

    def __init__(self, page: Page):
        self.page, self.bodies, self.status, self.parts = page, [], 200, []
        page.route(CHAT, self._answer)
        models = {"data": [{"id": "org/name"}, {"id": "/a/folder", "takes_images": False}]}
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        page.reload()
        expect(page.locator("#model option")).to_have_text(["org/name", "folder"])

    def _answer(self, route: Route) -> None:
        self.bodies.append(route.request.post_data_json)
        if self.status != 200:
            return route.fulfill(status=self.status, json={"error": {"message": "The model has no room."}})
        body = "".join(f"data: {json.dumps(part)}\n\n" for part in self.parts) + "data: [DONE]\n\n"
        return route.fulfill(status=200, content_type="text/event-stream", body=body)

    def say(self, text: str, finish: str = "stop", thoughts: str = "") -> None:
        """The next answers."""
        self.status = 200
        sources, size = ["model", "head", "copies", "grammar"], max(1, len(text) // 12)
        deltas: list[Any] = [{"reasoning": thoughts}] if thoughts else []
        deltas += [{"content": text[i : i + size]} for i in range(0, len(text), size)]
        choices = [{"delta": d, "sources": [sources[i % 4]], "finish_reason": None} for i, d in enumerate(deltas)]
        choices.append({"delta": {}, "sources": [], "finish_reason": finish})
        drafts = {"accepted_drafted_tokens": 4, "drafted_tokens": 5, "accepted_copied_tokens": 0, "copied_tokens": 2}
        cached = {"cached_tokens": 8}
        usage = {"prompt_tokens": 20, "prompt_tokens_details": cached, "completion_tokens_details": drafts}
        self.parts = [{"choices": [choice]} for choice in choices] + [{"choices": [], "usage": usage}]


def send(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")


def ask(page: Page, question: str) -> None:
    send(page, question)
    wait(page)


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).click()
    wait(page)


def wait(page: Page) -> None:
    """Until the answer is complete."""
    expect(page.locator("#send")).to_be_visible(timeout=120_000)


def set_fields(page: Page, **fields: str) -> None:
    """In the settings, which stay open."""
    page.click("#show-settings")
    for name, value in fields.items():
        page.fill(f"#{name.replace('_', '-')}", value)


def show_as(page: Page, view: str) -> None:
    page.get_by_role("radio", name=view, exact=True).check()


def answer_of_the_demo(page: Page, shot: Shot) -> None:
    expect(page.locator("#description")).to_have_text("Demo model: completes Python only")
    shot("welcome")
    page.click("#example")
    wait(page)
    expect(page.locator(".answer > .text")).to_contain_text("Return the position of a value")
    shot("example")  # docs/pictures/page.png
    expect(page.locator("#welcome")).to_be_hidden()
    page.click("#new-chat")
    expect(page.locator("#welcome")).to_be_visible()
    set_fields(page, max_tokens="30")
    page.click("#show-settings")
    ask(page, BEGINNING)
    figures = page.locator("footer")
    for words in ("30 tokens", "tokens/s", "drafted", "drafts)", "copied", "prompt"):
        expect(figures).to_contain_text(words)
    for source in ("model", "green", "yellow"):
        expect(page.locator(f".answer .text .{source}").first).to_be_visible()
    expect(page.locator(".answer .buttons")).to_contain_text("Stopped at the limit of 30 tokens:Continue")
    shot("demo")
    press(page, "Continue")
    expect(page.locator(".answer .text").last).to_contain_text("return True")
    assert page.locator(".answer .buttons", has_text="Stopped").count() == 0
    set_fields(page, max_tokens="2000")
    send(page, ENDLESS)
    page.click("#stop")
    expect(page.locator(".answer .buttons").nth(1)).to_contain_text("Stopped.")
    wait(page)


def rendered_text(page: Page, shot: Shot) -> None:
    fake = Fake(page)
    fake.say(MARKDOWN, thoughts="The question asks for two ways.")
    ask(page, "How do I read a file?")
    assert page.locator("details").get_attribute("open") is None
    expect(page.locator("summary")).to_have_text("Thoughts")
    for label in ("model", "drafted", "copied", "forced"):
        expect(page.locator("#legend")).to_contain_text(label)
    for figure in ("(4 of 5 drafts)", "(0 of 2 drafts)"):
        expect(page.locator("footer")).to_contain_text(figure)
    shot("tokens")
    show_as(page, "Text")
    expect(page.locator(".rendered h2")).to_have_text("Two ways to read a file")
    expect(page.locator(".rendered .hljs-keyword").first).to_have_text("def")
    expect(page.locator(".rendered a")).to_have_attribute("rel", "noopener noreferrer")
    page.get_by_role("button", name="Copy the code").click()
    assert page.evaluate("navigator.clipboard.readText()").startswith("def read(path")
    shot("text")
    show_as(page, "Tokens")
    expect(page.locator(".answer .text .magenta").first).to_be_visible()


def hostile_answer(page: Page, shot: Shot) -> None:
    fake = Fake(page)
    fake.say(HOSTILE, thoughts=HOSTILE)
    ask(page, HOSTILE)
    for view in ("Tokens", "Text"):
        show_as(page, view)
        bad = "script, svg, iframe, form, input, style, img, [onerror], [id], [name], [src], a:not([href^=http])"
        bad += ", [style]"
        assert page.locator(f"article .text :is({bad})").count() == 0, f"hostile elements as {view}"
        assert page.title() == "mlx_mtp", "a hostile answer ran a script"
    expect(page.locator(".answer > .text")).to_contain_text('<script>document.title = "owned"</script>')
    shot("hostile")
    sets_html = "() => { try { document.body.innerHTML += '<b>x</b>'; return true; } catch { return false; } }"
    assert not page.evaluate(sets_html), "the policy lets a script set HTML that DOMPurify has not seen"


def failed_question(page: Page, shot: Shot) -> None:
    fake = Fake(page)
    fake.status = 500
    send(page, "This one fails.")
    expect(page.get_by_role("alert").filter(has_text="The model has no room.")).to_be_visible()
    shot("error")
    fake.say("Fine.")
    ask(page, "This one works.")
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": "This one works."}]
    press(page, "Try again")
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": "This one fails."}]
    fake.status = 401
    send(page, "With no key.")
    expect(page.locator("#key")).to_be_focused()
    expect(page.locator("#notice")).to_contain_text("API key")


def turns(page: Page, shot: Shot) -> None:
    """Continue, regenerate, edit and resend, with a system prompt and fields."""
    fake = Fake(page)
    set_fields(page, system="Be brief.", temperature="0.7", top_p="0.9", max_tokens="4")
    page.uncheck("#thinking")
    fake.say("one two ", finish="length", thoughts="hm")
    ask(page, "Count.")
    body = fake.bodies[-1]
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["enable_thinking"]) == (0.7, 0.9, 4, False)
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]
    assert body["messages"] == start
    fake.say("three")
    press(page, "Continue")
    assert fake.bodies[-1]["messages"] == [*start, {"role": "assistant", "content": "one two ", "reasoning": "hm"}]
    expect(page.locator(".answer > .text")).to_have_text("one two three")
    press(page, "Regenerate")
    assert fake.bodies[-1]["messages"] == start
    expect(page.locator(".answer > .text")).to_have_text("three")
    ask(page, "More.")
    more = [{"role": "assistant", "content": "three"}, {"role": "user", "content": "More."}]
    assert fake.bodies[-1]["messages"] == [*start, *more]
    page.get_by_role("button", name="Edit the question").first.click()
    expect(page.locator("#question")).to_have_value("Count.")
    expect(page.locator("#editing")).to_be_visible()
    shot("edit")
    ask(page, "Count down.")
    assert fake.bodies[-1]["messages"] == [start[0], {"role": "user", "content": "Count down."}]
    assert page.locator(".question").count() == 1
    page.fill("#temperature", "3")
    send(page, "Too warm.")
    assert page.locator(".question").count() == 1, "a field that is not valid was sent"
    expect(page.locator("#temperature")).to_be_focused()
    shot("settings")


def images(page: Page, shot: Shot) -> None:
    fake = Fake(page)
    fake.say("Grey.")
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": b64decode(PIXEL)}
    page.select_option("#model", "/a/folder")
    expect(page.get_by_text("Add image")).to_be_hidden()
    page.set_input_files("#files", picture)
    send(page, "Which colour?")
    expect(page.locator("#notice")).to_have_text("This model takes no images: remove them from the question.")
    assert not fake.bodies
    page.get_by_role("button", name="Remove image 1").click()
    page.select_option("#model", "org/name")
    expect(page.get_by_text("Add image")).to_be_visible()
    page.set_input_files("#files", picture)
    expect(page.locator("#images img")).to_have_count(1)
    page.evaluate(
        """(data) => {
          const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), clipboardData = new DataTransfer();
          clipboardData.items.add(new File([bytes], "b.png", { type: "image/png" }));
          document.querySelector("#question").dispatchEvent(new ClipboardEvent("paste", { clipboardData }));
        }""",
        PIXEL,
    )
    expect(page.locator("#images img")).to_have_count(2)
    shot("images")
    page.get_by_role("button", name="Remove image 1").click()
    ask(page, "Which colour?")
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    question = [picture, {"type": "text", "text": "Which colour?"}]
    assert fake.bodies[-1]["messages"] == [{"role": "user", "content": question}]
    expect(page.locator(".question img")).to_be_visible()
    expect(page.locator("#images")).to_be_hidden()


def history(page: Page, shot: Shot) -> None:
    fake = Fake(page)
    fake.say("First answer.")
    ask(page, "First question")
    page.click("#new-chat")
    assert page.locator("article").count() == 0
    ask(page, "Second question")
    page.reload()
    page.get_by_role("button", name="First question").click()
    expect(page.locator(".answer > .text")).to_have_text("First answer.")
    page.once("dialog", lambda d: d.accept("A better name"))
    page.get_by_role("button", name="Rename").click()
    expect(page.locator("#chats [aria-current]")).to_have_text("A better name")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename == "A-better-name.md"
    assert "First answer." in Path(download.value.path()).read_text()
    shot("history")
    page.set_viewport_size(LOOKS["narrow"]["viewport"])
    expect(page.locator("#history")).to_be_hidden()
    page.click("#show-history")
    expect(page.locator("#new-chat")).to_be_focused()
    shot("chats", ["narrow"])
    page.set_viewport_size(LOOKS["narrow"]["viewport"])
    page.mouse.click(380, 400)
    expect(page.locator("#history")).to_be_hidden()
    expect(page.locator("#show-history")).to_be_focused()
    page.set_viewport_size(LOOKS["light"]["viewport"])
    page.once("dialog", lambda d: d.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#chats li")).to_have_count(1)
    page.reload()
    expect(page.locator("#chats li")).to_have_count(1)
    page.get_by_role("button", name="Second question").click()
    ask(page, "Its next")
    assert len(fake.bodies[-1]["messages"]) == 3


def no_storage(page: Page, shot: Shot) -> None:
    """A browser that keeps nothing still has answers."""
    for name in ("localStorage", "indexedDB"):
        off = f"{{ get() {{ throw Error('{name} is off'); }} }}"
        page.add_init_script(f"Object.defineProperty(window, '{name}', {off})")
    Fake(page).say("Here.")
    expect(page.locator("#notice")).to_have_text("The browser could not save the chats: indexedDB is off")
    ask(page, "Are you there?")
    expect(page.locator(".answer > .text")).to_have_text("Here.")
    page.click("#show-settings")
    page.uncheck("#thinking")
    expect(page.locator("#notice")).to_have_text("The browser could not save the settings: localStorage is off")


def settings_of_another_form(page: Page, shot: Shot) -> None:
    for kept in ("5", "null"):
        page.evaluate(f"localStorage['mlx_mtp.settings'] = '{kept}'")
        page.reload()
        expect(page.locator("#model option")).not_to_have_count(0)
        expect(page.locator("#system")).to_have_value("")


def keyboard(page: Page, shot: Shot) -> None:
    """Every control has a name, and Tab reaches it."""
    fake = Fake(page)
    fake.say(MARKDOWN)
    show_as(page, "Text")
    ask(page, "A question")
    page.click("#show-settings")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")].filter((e) =>
          !(e.labels?.length || e.getAttribute("aria-label") || (e.matches("button") && e.textContent.trim()))).length"""
    )
    assert nameless == 0, f"{nameless} controls without a name"
    expect(page.locator("#status")).to_have_text("The answer is complete: 13 tokens")
    page.get_by_role("button", name="Regenerate").press("Enter")
    wait(page)
    expect(page.locator("#send")).to_be_focused()
    page.locator("#new-chat").focus()
    reached = set()
    for _ in range(40):
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        page.keyboard.press("Tab")
    wanted = {"model", "show-settings", "system", "temperature", "turns", "question", "files", "send", "Copy", "Edit"}
    assert wanted <= reached, f"Tab does not reach {wanted - reached}"


def progress(page: Page, shot: Shot) -> None:
    """A stream that has read a part of the prompt, and is then stopped; and one that breaks off."""
    Fake(page)
    page.evaluate(
        """() => { window.fetch = async (_, { signal }) => new Response(new ReadableStream({ start(stream) {
          const chunk = { choices: [{ delta: {} }], prompt_progress: { processed: 1024, total: 4000 } };
          stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
          signal.addEventListener("abort", () => stream.error(signal.reason));
        } })); }"""
    )
    send(page, "A long prompt")
    expect(page.locator(".reading")).to_have_text(" Processing the prompt: 1,024 of 4,000 tokens", use_inner_text=True)
    assert page.locator("progress").evaluate("(bar) => bar.value / bar.max") == 0.256
    shot("progress")
    page.keyboard.press("Escape")
    wait(page)
    expect(page.locator(".answer .buttons")).to_contain_text("Stopped.")
    page.reload()
    broken = {"content_type": "text/event-stream", "body": ": keepalive 1024/4000\n\n", "status": 200}
    page.route(CHAT, lambda r: r.fulfill(**broken))
    send(page, "One that breaks off")
    expect(page.locator(".error")).to_contain_text("closed the connection before the end")


CHECKS = [
    no_storage, settings_of_another_form, answer_of_the_demo, rendered_text, hostile_answer, failed_question, turns, images,
    history, keyboard, progress,
]  # fmt: skip
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 800}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 800}},
    "narrow": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}


@contextmanager
def opened(browser: Browser, url: str, errors: list[str], **look: Any) -> Iterator[Page]:
    """The page in a profile of its own; what goes wrong in it is added to ``errors``."""
    context: BrowserContext = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **look)
    page = context.new_page()
    page.on("pageerror", lambda e: errors.append(f"an error of a script: {e}"))
    page.on("console", lambda m: errors.append(m.text) if "Content Security Policy" in m.text else None)
    page.on("request", lambda r: errors.extend([f"it asks {r.url}"] * (not r.url.startswith((url, "data:", "blob:")))))
    page.goto(url)
    expect(page.locator("#model option")).not_to_have_count(0)
    yield page
    context.close()


def failures(browser: Browser, url: str, pictures: Path | None) -> list[str]:
    found = []
    for check in CHECKS:
        errors: list[str] = []
        with opened(browser, url, errors, **LOOKS["light"]) as page:
            try:
                check(page, _camera(page, pictures))
            except AssertionError as e:
                errors.append(str(e) or f"not true: {extract_tb(e.__traceback__)[-1].line}")
        found += [f"{check.__name__}: {error}" for error in errors]
    return found


def _camera(page: Page, pictures: Path | None) -> Shot:
    """Takes pictures, in each look unless told which."""

    def shot(name: str, looks: Iterable[str] = LOOKS) -> None:
        for look, options in [(look, LOOKS[look]) for look in looks] if pictures is not None else ():
            page.emulate_media(color_scheme=options["color_scheme"])
            page.set_viewport_size(options["viewport"])
            page.screenshot(path=pictures / f"{name}-{look}.png")
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(LOOKS["light"]["viewport"])

    return shot


def main() -> None:
    parser = argparse.ArgumentParser(description="Try the server's page in a headless browser.")
    parser.add_argument("--browser", help="The path to Chromium (default: playwright's own).")
    parser.add_argument("--pictures", type=Path, help="Write pictures to this folder: light, dark and narrow.")
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp()) / "server.log"
    flags = ("--mtp", "--num-draft-tokens", "1", "--copy-drafts", "4")
    with serve_here(log, *flags) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=FLAGS)
        found = failures(browser, server.url.removesuffix("v1"), args.pictures)
        browser.close()
    print(*found, f"{len(found)} failures ({log})", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
