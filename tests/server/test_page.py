"""The status page in a real browser: figures that move, a chat that streams, stops and asks for a key, and no HTML from texts."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.e2e.serving import await_that
from tests.server.browser import PATIENCE_MS, chromium
from tests.server.conftest import MODEL, Server

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a server's page and fails if the page logged an error: a break of its policy is one."""
    wrong: list[str] = []
    contexts = []

    def opened(server: Server, *, width: int = 1280, allowed: str | None = None) -> Page:
        contexts.append(browser.new_context(viewport={"width": width, "height": 844}))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda said: (
                wrong.append(said.text)
                if said.type == "error" and not (allowed and allowed in said.text)
                else None
            ),
        )
        page.goto(server.base + "/")
        expect(page.locator("#health")).to_have_text("Healthy")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def scripted(page: Page, extra: dict[str, Any]) -> list[dict[str, Any]]:
    """Every chat of ``page`` asks the stub for a script; gives the bodies that the page itself sent."""
    bodies: list[dict[str, Any]] = []

    def change(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.continue_(post_data=json.dumps(bodies[-1] | extra))

    page.route("**/v1/chat/completions", change)
    return bodies


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def test_figures_move(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    expect(page.locator("#model")).to_have_text(MODEL)
    expect(page.locator("#context")).to_have_text("512 tokens")
    before = int(page.locator("#finished").inner_text().replace(",", ""))
    server.client.completions.create(model=MODEL, prompt="hi", max_tokens=8)
    expect(page.locator("#finished")).to_have_text(f"{before + 1:,}")
    expect(page.locator("#first")).not_to_have_text("–")
    assert "L" in page.locator('[data-graph="generated"] .line').get_attribute("d")
    paths = {url.removeprefix(server.base) for url in asked}
    assert paths == {"/", "/page/page.css", "/page/page.js", "/page/icon.svg", "/status"}, "it works offline"


def test_what_speculation_does(own_server: Callable[..., Server], open_page: Callable[..., Page]) -> None:
    server = own_server(drafts=2, tokens_per_step=2, serving={"reasoning_field": "reasoning"})
    page = open_page(server)
    expect(page.locator("#acceptance")).to_have_text("–")
    runs = [server.tokenizer.encode("I think.</think>"), server.tokenizer.encode("Yes.")[:2]]
    scripted(page, server.script("page_drafts", runs))
    ask(page, "Well?")
    expect(page.locator(".answer details .text")).to_have_text("I think.")
    expect(page.locator("#acceptance")).to_have_text("2.00")
    expect(page.locator("#positions li")).to_have_text(["1: 100%", "2: 0%"])


def test_a_chat_streams_and_remembers(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    bodies = scripted(page, server.script("page_chat", "I ponder.</think>It is 4."))
    ask(page, "2 + 2?")
    answer = page.locator(".answer")
    expect(answer.locator(".content")).to_have_text("It is 4.")
    expect(answer.locator("details .text")).to_have_text("I ponder.")
    expect(answer.locator("summary")).to_contain_text("Thought for")
    expect(answer.locator(".told")).to_contain_text("stop")
    scripted(page, server.script("page_plain", "Plain."))
    page.get_by_text("Thinking", exact=True).click()
    ask(page, "And now?")
    expect(page.locator(".answer .content").nth(1)).to_have_text("Plain.")
    assert bodies[0]["thinking"] == {"type": "enabled"}
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_the_second_turn_holds_the_first(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    bodies = scripted(page, server.script("page_turns", "hm</think>One."))
    page.get_by_role("checkbox", name="Thinking").uncheck(force=True)
    scripted_plain = server.script("page_turns", "One.")
    assert scripted_plain == {"cache_salt": "page_turns"}
    for number in range(2):
        ask(page, f"Say {number}")
        expect(page.locator('.answer[aria-busy="false"] .content').nth(number)).to_have_text("One.")
    assert bodies[1]["thinking"] == {"type": "disabled"}
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "Say 0"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Say 1"},
    ]


def test_texts_never_become_html(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    scripted(page, server.script("page_evil", f"{EVIL}</think>{EVIL}"))
    ask(page, EVIL)
    expect(page.locator(".answer .content")).to_have_text(EVIL)
    expect(page.locator(".answer details .text")).to_have_text(EVIL)
    expect(page.locator(".user .text")).to_have_text(EVIL)
    assert page.locator("#talk img, #talk script").count() == 0
    assert "owned" not in page.title()


def test_a_script_that_got_in_would_not_run(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server, allowed="Content Security Policy")
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))"
    )
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"document.title = 2\">')"
    )
    page.wait_for_function("document.images[document.images.length - 1].complete")
    assert page.title() == f"{MODEL} · flashstep"


def test_stop_ends_the_request(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server)
    runs = [[token] for token in server.tokenizer.encode("</think>" + "word " * 400)]
    scripted(page, server.script("page_stop", runs, step_s=0.02))
    aborted = server.metric("request_success_total", finished_reason="abort")
    ask(page, "Go on")
    expect(page.locator(".answer .content")).to_contain_text("word word")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".answer .told")).to_have_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    await_that(lambda: server.metric("request_success_total", finished_reason="abort") == aborted + 1)


def test_an_error_is_shown_and_the_message_kept(server: Server, open_page: Callable[..., Page]) -> None:
    page = open_page(server, allowed="400")
    ask(page, "much too long " * 400)
    expect(page.get_by_role("alert")).to_contain_text("maximum context length is 512")
    expect(page.get_by_label("Message", exact=True)).to_have_value(("much too long " * 400).strip())


def test_a_key_is_asked_for_and_kept_nowhere(
    own_server: Callable[..., Server], open_page: Callable[..., Page]
) -> None:
    server = own_server(serving={"api_key": ("sesame",)})
    page = open_page(server, allowed="401")
    expect(page.get_by_label("API key")).to_be_hidden()
    ask(page, "hello")
    expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").fill("sesame")
    page.get_by_role("button", name="Send").click()
    expect(page.locator('.answer[aria-busy="false"] .told')).to_contain_text("length")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_label("API key")).to_be_hidden()
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert kept == '[{},{},""]'


def test_a_dead_engine_is_shown(own_server: Callable[..., Server], open_page: Callable[..., Page]) -> None:
    server = own_server()
    page = open_page(server)
    server.kill_engine()
    expect(page.locator("#health")).to_have_text("The engine is gone")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen_or_without_a_name(
    server: Server, open_page: Callable[..., Page], width: int
) -> None:
    page = open_page(server, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, textarea, a')].filter(one =>
            !(one.textContent.trim() || one.labels?.length || one.ariaLabel)).map(one => one.outerHTML)"""
    )
    assert unnamed == []
