"""The page: sections in order, the table of entries with where each comes from, and claims, as one HTML file without a script.

Takes entries and claims; gives HTML that loads nothing. All text of others is escaped. Needs matplotlib.
"""

import datetime
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from flashstep.bench.ledger import Entry
from flashstep.bench.report import behaviour, plain, serving, steps
from flashstep.bench.report.charts import SERIES, VARIABLES, Look, Picture
from flashstep.bench.report.rows import arm, doubts, figures, looks, marks, several
from flashstep.bench.report.section import Grid, Section

STYLE = Path(__file__).with_name("page.css")
MOST_ENTRIES, MOST_ROWS = 500, 1000  # of tables; pictures are of everything
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
GLYPHS = {
    "o": '<circle cx="16" cy="6" r="4"/>',
    "s": '<rect x="12" y="2" width="8" height="8"/>',
    "D": '<path d="M16 1l5 5-5 5-5-5z"/>',
    "^": '<path d="M16 1l5 10H11z"/>',
    "v": '<path d="M16 11l5-10H11z"/>',
    "P": '<path d="M14 1h4v3h3v4h-3v3h-4V8h-3V4h3z"/>',
    "X": '<path d="M12 1l4 3 4-3 1 2-3 3 3 3-1 2-4-3-4 3-1-2 3-3-3-3z"/>',
    "*": '<path d="M16 0l2 4 4 1-3 3 1 4-4-2-4 2 1-4-3-3 4-1z"/>',
}
LINES = {"-": "", "--": "6 4", "-.": "6 3 2 3", ":": "2 3"}


class ToldVerdict(msgspec.Struct, frozen=True):
    """What one rule of the design says."""

    why: str = ""
    stops: str = "nothing"


class ToldClaim(msgspec.Struct, frozen=True):
    """What a page shows of a claim of bench compare; its file has more."""

    says: str
    paragraph: str
    verdicts: tuple[ToldVerdict, ...] = ()


def read_claim(path: Path) -> ToldClaim:
    """``ValueError`` if it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ToldClaim)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is no claim of bench compare: {error}") from None


def render(entries: Sequence[Entry], claims: Sequence[ToldClaim], *, title: str) -> str:
    """The whole file."""
    known = looks(entries)
    sections = [
        serving.frontier(entries, known),
        serving.latencies(entries, known),
        steps.times(entries, known),
        steps.breakdown(entries, known),
        steps.distance(entries, known),
        steps.chains(entries),
        behaviour.acceptance(entries, known),
        behaviour.balancedness(entries, known),
        behaviour.accuracy(entries, known),
    ]
    shown = [section for section in sections if section.pictures or section.tables]
    absent = [section for section in sections if not (section.pictures or section.tables)]
    parts = [
        _claims(claims),
        *(_section(section) for section in shown),
        _absent(absent),
        _entries(entries),
        _origins(entries),
    ]
    names = (
        ["Claims"] * bool(claims) + [section.title for section in shown] + ["Entries", "Where they come from"]
    )
    links = "".join(f'<li><a href="#{_anchor(name)}">{_text(name)}</a></li>' for name in names)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>\n{STYLE.read_text()}</style>\n</head>\n<body>\n'
        f"<header><h1>{_text(title)}</h1><p>{_text(_summary(entries))}</p>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>\n{"".join(parts)}'
        "<footer>Made by <code>flashstep bench report</code> from ledger entries only; figures of different machines, commits or "
        "settings stand side by side here and are no comparison: that is a claim of <code>flashstep bench compare</code>."
        "</footer>\n</main>\n</body>\n</html>\n"
    )


def _summary(entries: Sequence[Entry]) -> str:
    """Of what the page is made, in a sentence."""
    arms = list(dict.fromkeys(arm(entry) for entry in entries))
    machines = list(dict.fromkeys(f"{entry.origin.machine} ({entry.origin.device})" for entry in entries))
    revisions = list(dict.fromkeys(entry.origin.revision for entry in entries))
    days = sorted({entry.origin.date[:10] for entry in entries})
    hollow = sum(1 for entry in entries if marks(entry))
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    count = several(len(entries), "entry", "entries")
    return (
        f"{count} of {_several('arm', arms)}, from {when}, on {_several('machine', machines)}, "
        f"at {_several('commit', revisions)}."
        + (
            f" Drawn hollow, for a reason that the legend tells: {hollow} that ended early, had faults or were wrong on purpose."
            if hollow
            else ""
        )
    )


def _several(what: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"1 {what}: {names[0]}"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{len(names)} {what}s: {', '.join(names[:4])}{more}"


def _claims(claims: Sequence[ToldClaim]) -> str:
    if not claims:
        return ""
    told = "".join(
        f"<blockquote><p><strong>{_text(claim.says.capitalize())}.</strong> {_text(claim.paragraph)}</p>"
        + "".join(
            f'<p class="warn">{_text(each.why)}</p>' for each in claim.verdicts if each.stops != "nothing"
        )
        + "</blockquote>"
        for claim in claims
    )
    return f'<section><h2 id="{_anchor("Claims")}">Claims</h2>{told}</section>\n'


def _section(section: Section) -> str:
    pictures = "".join(_picture(picture) for picture in section.pictures)
    tables = "".join(_table(grid, f"{section.title}: {grid.caption}") for grid in section.tables)
    if pictures and tables:
        tables = f"<details><summary>As numbers</summary>{tables}</details>"
    missing = f'<p class="quiet">{_text(section.missing.strip())}</p>' if section.missing.strip() else ""
    return (
        f'<section><h2 id="{_anchor(section.title)}">{_text(section.title)}</h2><p>{_text(section.lead)}</p>'
        + (f'<div class="pictures">{pictures}</div>' if pictures else "")
        + f"{tables}{missing}</section>\n"
    )


def _absent(sections: Sequence[Section]) -> str:
    """In words, what the page would show of other entries."""
    if not sections:
        return ""
    told = "".join(
        f"<li>{_text(section.title)}: {_text(section.missing.strip())}</li>" for section in sections
    )
    return f'<section><h2 id="{_anchor("Not shown")}">Not shown</h2><ul class="quiet">{told}</ul></section>\n'


def _picture(picture: Picture) -> str:
    keys = "".join(f"<li>{_swatch(look)}<span>{_text(label)}</span></li>" for label, look in picture.legend)
    legend = f'<ul class="legend" aria-label="Legend">{keys}</ul>' if keys else ""
    return f"<figure>{picture.svg}{legend}<figcaption>{_text(picture.caption)}</figcaption></figure>\n"


def _swatch(look: Look) -> str:
    color = f"var({VARIABLES[SERIES[look.number % len(SERIES)]]})"
    fill, width = ("none", 0.8) if look.hollow else (color, 2)
    return (
        f'<svg viewBox="0 0 32 12" aria-hidden="true" style="stroke:{color};fill:{fill}">'
        f'<path d="M0 6h32" stroke-width="{width}" stroke-dasharray="{LINES[look.dash]}"/>{GLYPHS[look.marker]}</svg>'
    )


def _entries(entries: Sequence[Entry]) -> str:
    rows = [
        [
            entry.id,
            entry.kind,
            arm(entry),
            "; ".join([*doubts(entry), *entry.faults]) or "-",
            "; ".join(figures(entry)) or "-",
            str(entry.round),
            entry.job or "-",
            "-" if entry.seed is None else str(entry.seed),
            entry.origin.date.replace("T", " ")[:16],
            entry.origin.revision,
            f"{entry.origin.machine}, {entry.origin.device}",
            entry.origin.driver or "-",
            entry.raw or "-",
        ]
        for entry in _faulty_first(entries)[:MOST_ENTRIES]
    ]
    head = "entry,kind,arm,doubts and faults,figures,round,job,seed,date (UTC),commit,machine,driver,raw data".split(
        ","
    )
    told = "Those with faults come first. A + behind a commit: tracked files differed from it."
    grid = Grid(_capped(entries) + told, head, rows, frozenset({5, 7}))
    table = _table(grid, "Entries", wide={3, 4}, cards=True)
    return f'<section><h2 id="{_anchor("Entries")}">Entries</h2>{table}</section>\n'


def _faulty_first(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: not marks(entry))


def _capped(entries: Sequence[Entry]) -> str:
    """What a page of very many entries leaves out; the pictures are of all."""
    return (
        f"{MOST_ENTRIES:,} of {len(entries):,} entries; the others are in the ledger only. "
        if len(entries) > MOST_ENTRIES
        else ""
    )


def _origins(entries: Sequence[Entry]) -> str:
    """What was run, to run it again: command, settings and subject of each entry."""
    told = "".join(
        f"<details><summary>{_text(entry.id)}: {_text(entry.kind)}, {_text(arm(entry))}, round {entry.round}</summary>"
        f"<pre>{_text(entry.origin.command)}</pre><pre>{_text(_plain(entry))}</pre></details>"
        for entry in _faulty_first(entries)[:MOST_ENTRIES]
    )
    name = "Where they come from"
    lead = f"<p>{_capped(entries)}Commands, settings and subjects.</p>"
    return f'<section><h2 id="{_anchor(name)}">{name}</h2>{lead}{told}</section>\n'


def _plain(entry: Entry) -> str:
    origin = {
        name: value
        for name, value in msgspec.structs.asdict(entry.origin).items()
        if name not in ("command",)
    }
    fields: dict[str, Any] = {"settings": entry.settings, "subject": entry.subject, "origin": origin}
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode()


def _table(
    grid: Grid, name: str, *, wide: frozenset[int] | set[int] = frozenset(), cards: bool = False
) -> str:
    """``cards``: on a phone each row is a card, its cells below one another under the names of their columns."""

    def cell(tag: str, place: int, text: str) -> str:
        kind = "right" if place in grid.right else "wide" if place in wide else ""
        kind = f"{kind} none".strip() if tag == "td" and text == "-" else kind
        named = f' data-name="{_text(grid.head[place])}"' if cards and tag == "td" else ""
        of = f' class="{kind}"' if kind else ""
        return f"<{tag}{of}{named}{' scope=col' if tag == 'th' else ''}>{_text(text)}</{tag}>"

    head = "".join(cell("th", place, text) for place, text in enumerate(grid.head))
    body = "".join(
        f"<tr>{''.join(cell('td', place, text) for place, text in enumerate(row))}</tr>\n"
        for row in grid.rows[:MOST_ROWS]
    )
    left_out = len(grid.rows) - MOST_ROWS
    caption = f"{grid.caption} ({MOST_ROWS:,} of {len(grid.rows):,} rows)" if left_out > 0 else grid.caption
    return (
        f'<div class="scroll{" cards" if cards else ""}" tabindex="0" role="region" aria-label="{_text(name)}">'
        f"<table><caption>{_text(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _anchor(title: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in title.lower()).split())


def _text(text: object) -> str:
    """What others wrote, too: no markup, nothing that turns the text around it, nothing invisible."""
    return html.escape(plain.shown(str(text)))


def default_title(entries: Sequence[Entry]) -> str:
    """For a page that nobody named."""
    kinds = ", ".join(sorted({entry.kind for entry in entries}))
    return f"flashstep measurements: {kinds}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
