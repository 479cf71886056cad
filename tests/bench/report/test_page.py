"""Pages in a real browser, on a phone and at a desk: nothing loads, nothing scrolls sideways, nothing of a text is markup."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, Page

from flashstep.bench.ledger import Entry, append
from flashstep.bench.report.page import ToldClaim, ToldVerdict, read_claim, render
from flashstep.bench.report.rows import figures, grouped
from flashstep.bench.report.serving import pareto
from flashstep.cli import main
from tests.bench.report.entries import entry, ledger
from tests.server.browser import chromium

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> $\\frac{1}{0}$ & \"q'"
CLAIM = ToldClaim(
    "different", "B is 7.4% faster.", (ToldVerdict("one run per arm", "claim"), ToldVerdict("fine"))
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def whole() -> str:
    """A page with everything on it."""
    return render(ledger(), [CLAIM], title="Two arms")


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens a page from a file; fails if it logged anything or asked for anything but itself."""
    told: list[str] = []
    contexts = []

    def of(html: str, *, width: int, scheme: str = "light") -> Page:
        file = tmp_path / "page.html"
        file.write_text(html, encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("console", lambda said: told.append(said.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda asked: told.append(asked.url) if asked.url != file.as_uri() else None)
        page.goto(file.as_uri())
        return page

    yield of
    for context in contexts:
        context.close()
    assert not told


def boxes(page: Page, what: str) -> list[dict[str, float]]:
    return page.evaluate(
        f"[...document.querySelectorAll('{what}')].map(e => e.getBoundingClientRect().toJSON())"
    )


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(opened: Callable[..., Page], whole: str, width: int) -> None:
    page = opened(whole, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    figures = boxes(page, "figure")
    assert len(figures) > 12
    assert all(box["left"] >= 0 and box["right"] <= width and box["height"] > 150 for box in figures)
    scrolling = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    )
    assert scrolling >= 1  # the table of entries scrolls within its own frame
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "auto"


@pytest.mark.parametrize("width", [390, 1280])
def test_text_of_pictures_stays_inside_and_is_large_enough(
    opened: Callable[..., Page], whole: str, width: int
) -> None:
    page = opened(whole, width=width)
    outside = page.evaluate(
        """[...document.querySelectorAll('figure > svg')].flatMap(svg => { const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(text => { const r = text.getBoundingClientRect();
        return r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1 })
        .map(text => text.textContent) })"""
    )
    assert outside == []
    heights = [box["height"] for box in boxes(page, "figure > svg text") if box["height"] < box["width"]]
    assert min(heights) >= 9


def test_everything_has_a_name(opened: Callable[..., Page], whole: str) -> None:
    page = opened(whole, width=1280)
    assert page.get_by_role("img", name=re.compile("Throughput against interactivity, serve")).count() == 1
    names = page.evaluate(
        """[...document.querySelectorAll('svg[role=img]')]
        .map(s => document.getElementById(s.getAttribute('aria-labelledby')).textContent)"""
    )
    assert len(set(names)) == len(names) and all(names)
    assert page.get_by_role("region", name="Entries").count() == 1
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(ids)) == len(ids)
    broken = page.evaluate(
        "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.querySelector(a.getAttribute('href'))).length"
    )
    assert broken == 0
    assert page.locator("table").first.evaluate("t => t.querySelectorAll('th[scope=col]').length > 0")


def test_dark_mode_changes_page_and_pictures(opened: Callable[..., Page], whole: str) -> None:
    colours = (
        "[getComputedStyle(document.body).backgroundColor, "
        "getComputedStyle(document.querySelector('figure svg text')).fill]"
    )
    light = opened(whole, width=390).evaluate(colours)
    dark = opened(whole, width=390, scheme="dark").evaluate(colours)
    assert light[0] != dark[0] and light[1] != dark[1]
    assert not re.search(r"#0[1-8]0[a0][0f]", whole.split("</style>")[1])  # every colour is the page's


def test_texts_are_no_markup(opened: Callable[..., Page]) -> None:
    entries = [
        msgspec.structs.replace(
            one, label=EVIL, faults=(EVIL,), job=EVIL, raw=EVIL, settings={EVIL: EVIL, "batch_size": 4}
        )
        for one in ledger()[:9]
    ]
    page = opened(
        render(entries, [ToldClaim(EVIL, EVIL, (ToldVerdict(EVIL, "claim"),))], title=EVIL), width=390
    )
    assert page.title() == EVIL.replace("&quot;", '"')
    assert page.evaluate("document.querySelectorAll('img, script').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.get_by_text(EVIL).count() > 5


def test_what_is_missing_is_said_in_words(opened: Callable[..., Page]) -> None:
    lonely = entry("eval", "A", {"right": [1.0]}, unit="question", metrics={"accuracy": 1.0})
    page = opened(render([lonely], [], title="One"), width=390)
    words = page.locator("section", has_text="Not shown").inner_text()
    assert "No entry of serve, replay or decode has both an interactivity and an output throughput." in words
    assert "Parts of a step are told by bench forward on a CUDA device" in words
    assert "none speculated, or none was told" in words and "--record-expert-loads" in words
    assert page.locator("figure").count() == 1


def test_cases_without_parts_are_drawn_whole(opened: Callable[..., Page]) -> None:
    case = {"case": "6@1024", "us": 1000.0, "floor_us": None, "parts": []}
    one = entry("forward", "cpu", {"step_us": [1000.0]}, unit="replay", detail={"cases": [case]})
    page = opened(render([one], [], title="On a CPU"), width=390)
    assert page.get_by_role("img", name="Step time by part, 6@1024").count() == 1
    assert (
        page.get_by_text("whole step").count() >= 1
        and page.get_by_text("told by bench forward on a CUDA").count() >= 1
    )


def test_provenance_is_told(opened: Callable[..., Page], whole: str) -> None:
    page = opened(whole, width=1280)
    table = page.get_by_role("region", name="Entries").inner_text()
    for words in (
        "751e707abcde+",
        "h200-node-3, 4 x NVIDIA H200",
        "580.65.06",
        "incomplete",
        "cut off",
        "synthetic acceptance",
    ):
        assert words in table
    assert "flashstep bench serve --url" in page.locator("details pre").first.text_content()
    assert (
        page.get_by_text("one run per arm").count() == 1 and page.get_by_text("fine", exact=True).count() == 0
    )


def test_a_front_has_only_what_nothing_beats() -> None:
    points = [(1.0, 9.0), (2.0, 8.0), (1.5, 7.0), (3.0, 8.0), (4.0, 1.0), (4.0, 2.0), (3.0, 8.0)]
    assert pareto(points) == [(1.0, 9.0), (3.0, 8.0), (4.0, 2.0)]
    assert pareto([]) == []


# ---- the command ---------------------------------------------------------------------------------------------------------


def kept(path: Path, entries: list[Entry]) -> str:
    for one in entries:
        append(path, one)
    return str(path)


def test_the_command_draws_ledgers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ledger()
    first, second = kept(tmp_path / "a.jsonl", found[:4]), kept(tmp_path / "b.jsonl", found[4:])
    claim = tmp_path / "claim.json"
    claim.write_bytes(msgspec.json.encode(CLAIM))
    out = tmp_path / "page.html"
    assert (
        main(["bench", "report", first, second, "--out", str(out), "--claim", str(claim), "--title", "T"])
        == 0
    )
    page = out.read_text()
    assert "27 entries of 2 arms" in page and "B is 7.4% faster." in page
    assert main(["bench", "report", first, second, "--out", str(out), "--arms", "early PDL triggers"]) == 0
    assert "13 entries of 1 arm" in out.read_text()
    assert "13 entries" in capsys.readouterr().out


def test_the_command_says_what_it_cannot_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, good = tmp_path / "empty.jsonl", kept(tmp_path / "a.jsonl", ledger()[:1])
    empty.touch()
    bad = tmp_path / "claim.json"
    bad.write_text(json.dumps({"says": 1}))
    for arguments, told in (
        ([str(empty)], "there is no entry"),
        ([str(tmp_path / "no.jsonl")], "there is no such ledger"),
        ([good, "--arms", "x"], "no entry has that label; there are main"),
        ([good, "--out", "/nowhere/x.html"], "there is no folder /nowhere"),
        ([good, "--claim", str(bad)], "is no claim of bench compare"),
    ):
        assert main(["bench", "report", *arguments]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(ValueError, match="is no claim"):
        read_claim(tmp_path / "absent.json")


def test_a_sweep_is_one_front_whatever_its_lengths_and_seeds() -> None:
    def point(number: int) -> Entry:
        shape = {"input_len": {"low": 50, "high": 50}, "seed": number}
        load = {"max_concurrency": number, "num_prompts": 8 * number, "duration_s": None, "seed": number}
        metrics = {"output_tps": 100.0 * number, "p90_interactivity_tps": 50.0 / number}
        return entry("serve", "A", {"ttft_ms": [1.0]}, settings={"source": shape, **load}, metrics=metrics)

    points = [point(number) for number in (1, 2, 4)]
    assert list(grouped(points, swept=True)) == ["serve: input len 50"]
    assert len(grouped(points)) == 3
    other = msgspec.structs.replace(point(1), settings={"source": {"input_len": 60}, "seed": 1})
    assert list(grouped([*points, other], swept=True)) == ["serve: input len 50", "serve: input len 60"]


def test_what_differs_is_said_by_name() -> None:
    common = {"a": 1, "b": 2, "c": 3, "d": 4}
    found = [
        entry("serve", "A", {"ttft_ms": [1.0]}, settings={**common, **more})
        for more in ({"slos_ms": {"ttft": 200}}, {"slos_ms": {}}, {"slos_ms": {}, "think": True})
    ]
    assert list(grouped(found)) == [
        "serve: slos ms ttft 200, think not given, a 1, b 2",
        "serve: slos ms ttft not given, think not given, a 1, b 2",
        "serve: think yes, slos ms ttft not given, a 1, b 2",
    ]


def test_what_is_not_an_arms_is_hollow_and_says_why(opened: Callable[..., Page], whole: str) -> None:
    page = opened(whole, width=1280)
    keys = page.evaluate(
        "[...document.querySelectorAll('.legend li')].map(li => [li.innerText, li.querySelector('svg').style.fill])"
    )
    hollow = {words for words, fill in keys if fill == "none"}
    assert hollow == {
        "main (incomplete, with faults)",
        "main (synthetic acceptance, recorded routing, filled cache)",
        "early PDL triggers (synthetic acceptance, recorded routing, filled cache)",
    }
    assert {words for words, fill in keys if fill != "none"} == {"main", "early PDL triggers"}


def test_a_text_that_turns_does_not_turn_its_neighbours(opened: Callable[..., Page]) -> None:
    evil = "A\u202e\x00gpj.exe\u2066"
    found = [
        entry("probe", label, {"step_us": [1.0, 2.0]}, unit="step", job=evil, faults=(evil,))
        for label in (evil, "\u0645\u0631\u062d\u0628\u0627")
    ]
    html = render(found, [], title=evil)
    assert not set("\u202e\x00\u2066") & set(html) and "A\\u202e\\u0000gpj.exe\\u2066" in html
    page = opened(html, width=390)
    assert "\u2068\u0645\u0631\u062d\u0628\u0627\u2069" in page.inner_text("main")


def test_entries_are_cards_on_a_phone_and_faults_come_first(opened: Callable[..., Page], whole: str) -> None:
    page = opened(whole, width=390)
    cards = page.evaluate(
        "[...document.querySelectorAll('.cards')].map(e => [e.scrollWidth <= e.clientWidth, "
        "getComputedStyle(e.querySelector('td'), '::before').content])"
    )
    assert cards == [[True, '"entry: "']]
    first = page.evaluate("document.querySelector('.cards tbody tr').innerText")
    assert "3 of 120 requests failed" in first or "synthetic acceptance" in first
    wide = opened(whole, width=1280)
    assert wide.evaluate("getComputedStyle(document.querySelector('.cards td')).display") == "table-cell"


def test_very_many_entries_are_a_page_still() -> None:
    many = [
        entry("eval", "A", {"right": [1.0]}, metrics={"accuracy": 1.0}, round=number)
        for number in range(3000)
    ]
    html = render(many, [], title="many")
    assert "500 of 3,000 entries" in html and "The first 40 of 3,000 runs" in html
    assert "(1,000 of 3,000 rows)" in html and len(html) < 3_000_000


def test_units_are_not_said_twice() -> None:
    one = entry("probe", "A", {"step_us": [1.0]}, metrics={"acceptance_length": 1.0, "step_us": 2.0})
    assert figures(one) == ["step time 2 us", "tokens a step 1"]


def test_a_long_name_does_not_push_figures_off_the_page(opened: Callable[..., Page]) -> None:
    found = entry("probe", "L" * 400, {"step_us": [1.0, 2.0]}, unit="step", metrics={"step_us": 1.5})
    page = opened(render([found], [], title="long"), width=1280)
    assert page.evaluate("document.querySelector('.cards td.wide').getBoundingClientRect().left") < 800
    # whole words are not broken: an identifier stays on one line
    assert page.evaluate("document.querySelector('.cards td').getBoundingClientRect().width") > 90
