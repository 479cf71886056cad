"""How a terminal shows a claim below its paragraph: what is told besides, the arms, every test, other metrics.

Takes a ``Claim``; gives lines and tables. Imports scipy, so only once a claim is there.
"""

from collections.abc import Iterator
from statistics import median

from rich.table import Table

from flashstep.bench.claim import Claim, amount_words, interval_words, p_words
from flashstep.bench.compare import Compared


def parts(claim: Claim) -> Iterator[Table | str]:
    """All of it, in order."""
    told = [item for item in claim.verdicts if item.stops == "nothing"]
    if told:
        yield "\nTold besides:\n" + "\n".join(
            f"- {item.why}{f' ({item.remedy})' if item.remedy else ''}" for item in told
        )
    yield _arms(claim)
    if claim.primary is not None:
        yield _tests(claim, claim.primary)
    if claim.secondary:
        yield _secondary(claim.secondary)


def _arms(claim: Claim) -> Table:
    table = Table("arm", "runs", "commit", "machine", "command", title="arms", title_justify="left")
    for arm in claim.arms:
        table.add_row(arm.label, str(arm.runs), arm.revision, arm.device, arm.command)
    return table


def _tests(claim: Claim, primary: Compared) -> Table:
    """Every test of the primary metric, and of the control."""
    asked = primary.measure
    title = f"{primary.words}, {asked.better} is better"
    held = {"B - A": primary, "control - A": claim.control, "B - control": claim.beside}
    columns = {name: _figures(found) for name, found in held.items() if found is not None}
    table = Table("", *columns, title=title, title_justify="left")
    for name in columns["B - A"]:
        table.add_row(name, *(column.get(name, "") for column in columns.values()))
    if claim.margin is not None:
        table.add_row("margin", amount_words(asked, claim.margin))
    return table


def _figures(found: Compared) -> dict[str, str]:
    asked, rows = found.measure, {}
    if found.summaries is not None:
        for name, arm in zip(("first arm", "second arm"), found.summaries, strict=True):
            rows[f"{name}, mean +- sd of runs"] = (
                f"{amount_words(asked, arm.mean)} +- {amount_words(asked, arm.sd)}, {arm.n} runs"
            )
    rows["difference"] = amount_words(asked, found.difference, sign=True)
    if found.percent is not None:
        rows["of the first arm"] = f"{found.percent:+.2f}%"
    rows[f"interval ({found.interval.words})"] = (
        f"{interval_words(asked, found.interval)}, {100 * found.interval.confidence:.3g}%"
    )
    if found.differences:
        low, high = min(found.differences), max(found.differences)
        rows["median of paired differences, range"] = (
            f"{amount_words(asked, median(found.differences), sign=True)}, {amount_words(asked, low, sign=True)} to "
            f"{amount_words(asked, high, sign=True)}"
        )
    if found.questions is not None:
        rows["SE of the paired difference"] = amount_words(asked, found.questions.mean.se)
        rows["sign-flip over questions"] = f"p = {p_words(found.questions.sign_flip.p)}"
        for place, pair in enumerate(found.questions.mcnemar, 1):
            rows[f"McNemar, run {place} of each arm"] = (
                f"only first right {pair.only_a}, only second {pair.only_b}, p = {p_words(pair.tested.p)}"
            )
    tested = found.exchanged.tested
    name = "sign-flip over rounds" if found.rounds else "exchange of runs"
    rows[name] = f"p = {tested.count} = {p_words(tested.p)} (smallest possible {p_words(tested.smallest)})"
    if found.welch is not None and found.welch.t is not None:
        rows["Welch's t on run means"] = (
            f"t = {found.welch.t:.2f}, {found.welch.df:.1f} degrees of freedom, p = {p_words(found.welch.p)}"
        )
    for interval in found.bootstrap:
        rows[f"bootstrap ({interval.words})"] = interval_words(asked, interval)
    return rows


def _secondary(found: tuple[Compared, ...]) -> Table:
    table = Table(
        "metric", "A", "B", "B - A", "%", "interval", "p", title="other metrics: no claim is made of them"
    )
    table.title_justify = "left"
    for item in found:
        asked = item.measure
        means = [sum(values) / len(values) for values in (item.a, item.b)]
        table.add_row(
            item.words,
            *(amount_words(asked, mean) for mean in means),
            amount_words(asked, item.difference, sign=True),
            "" if item.percent is None else f"{item.percent:+.2f}",
            interval_words(asked, item.interval),
            p_words(item.p),
        )
    return table
