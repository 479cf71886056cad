"""The claim: what may be said of two arms, in plain words, with its interval, its design and where its raw data lies.

Takes the arms' entries and the question; gives ``Claim``. Only the metric that was asked for gets words; others stand in a table.
"""

import math
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from flashstep.bench.arms import Arms, Question
from flashstep.bench.compare import Compared, compare
from flashstep.bench.experiment import without_place
from flashstep.bench.ledger import Entry
from flashstep.bench.measure import Measure, shared_measures
from flashstep.bench.stats import bootstrap
from flashstep.bench.stats.paired import Interval
from flashstep.bench.verdicts.builds import hosts_of, of_builds
from flashstep.bench.verdicts.order import of_order, of_processes
from flashstep.bench.verdicts.plan import is_attested, of_plan
from flashstep.bench.verdicts.result import of_result
from flashstep.bench.verdicts.runs import begun_again, failed_and_asked, of_runs
from flashstep.bench.verdicts.settings import of_settings
from flashstep.bench.verdicts.verdict import Verdict


class ArmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an arm was, and which ledger entries are its raw data."""

    label: str
    runs: int
    revision: str
    device: str
    driver: str | None
    command: str
    subject: dict[str, Any]
    entries: tuple[str, ...]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """``says``: "different", "undecided" (no difference shown, which is not equality) or "refused" (some verdict stops it).

    ``not_inferior`` is whether B is shown not to be worse by ``margin`` (in the metric's unit) or more, None where that may not
    be said. ``control`` is the control held against A, ``beside`` is B held against the control. ``plan`` is the hash of the plan
    that the rows are exactly what it says of; None: the claim was not planned.
    """

    says: Literal["different", "undecided", "refused"]
    not_inferior: bool | None
    paragraph: str
    alpha: float
    margin: float | None
    plan: str | None
    verdicts: tuple[Verdict, ...]
    primary: Compared | None
    control: Compared | None
    beside: Compared | None
    secondary: tuple[Compared, ...]
    arms: tuple[ArmFacts, ...]

    @property
    def refusals(self) -> tuple[Verdict, ...]:
        return tuple(item for item in self.verdicts if item.stops != "nothing")


def judge(arms: Arms, question: Question, *, resamples: int = bootstrap.RESAMPLES_OF_TWO) -> Claim:
    """Hold the arms against each other and say what the design lets one say. ``resamples`` 0: no bootstraps, for simulations."""
    found = [
        *of_runs(arms, question.measure),
        *of_order(arms, question.measure),
        *of_processes(arms, question.measure),
        *of_builds(arms),
        *of_settings(arms, question.measure),
        *of_plan(arms, question),
    ]
    held = Held()
    try:
        held = _held(arms, question, resamples)
    except (
        ValueError
    ) as error:  # told by a rule where one knows it; what is left is that the arms have no sample in common
        if not any(item.rule == "metric" for item in found):
            found.append(
                Verdict(
                    rule="common samples",
                    stops="claim",
                    why=str(error),
                    remedy="run both arms with the same workload and seed",
                )
            )
    if held.primary is not None:
        found += of_result(question, held.primary, held.control, held.beside)
    return _said(arms, question, found, held, _secondary(arms, question, resamples))


class Held(NamedTuple):
    """B against A, the control against A, B against the control."""

    primary: Compared | None = None
    control: Compared | None = None
    beside: Compared | None = None


def _held(arms: Arms, question: Question, resamples: int) -> Held:
    """``ValueError`` where some two arms cannot be compared."""
    pairs = [(arms.a, arms.b)] + ([(arms.a, arms.control), (arms.control, arms.b)] if arms.control else [])
    return Held(
        *(compare(*pair, question.measure, alpha=question.alpha, resamples=resamples) for pair in pairs)
    )


def _secondary(arms: Arms, question: Question, resamples: int) -> tuple[Compared, ...]:
    """All other metrics of the runs, as far as these can be compared; simulations do without."""
    if not resamples or not arms.a or not arms.b:
        return ()
    found = []
    for asked in shared_measures([*arms.a, *arms.b]):
        if asked.metric == question.measure.metric:
            continue
        try:
            found.append(compare(arms.a, arms.b, asked, alpha=question.alpha, resamples=0))
        except ValueError:  # no sample in common: nothing that a table could show
            continue
    return tuple(found)


def _said(
    arms: Arms, question: Question, found: list[Verdict], held: Held, secondary: tuple[Compared, ...]
) -> Claim:
    stopped = {item.stops for item in found}
    says: Literal["different", "undecided", "refused"] = "refused"
    not_inferior = amount = None
    if held.primary is not None:
        if not stopped & {"claim", "difference"}:
            says = "different" if held.primary.p <= question.alpha else "undecided"
        if question.margin is not None:
            amount = question.margin.amount(float(np.mean(held.primary.a)))
            if not stopped & {"claim", "non-inferiority"}:
                not_inferior = all(
                    _clears(item, amount) for item in (held.primary, held.beside) if item is not None
                )
    attested = is_attested(found, question)
    sentences = _sentences(question, found, held.primary, says, not_inferior, amount)
    if says != "refused" or not_inferior is not None:
        sentences += _design(arms, held, question, attested=attested)
    return Claim(
        says=says,
        not_inferior=not_inferior,
        paragraph=" ".join(sentences),
        alpha=question.alpha,
        margin=amount,
        plan=question.stated.digest if attested and question.stated else None,
        verdicts=tuple(found),
        primary=held.primary,
        control=held.control,
        beside=held.beside,
        secondary=secondary,
        arms=tuple(_facts(label, runs) for label, runs in arms.named.items() if runs),
    )


def _facts(label: str, runs: tuple[Entry, ...]) -> ArmFacts:
    first = runs[0]
    return ArmFacts(
        label=label,
        runs=len(runs),
        revision=first.origin.revision,
        device=first.origin.device,
        driver=first.origin.driver,
        command=without_place(first.origin.command),
        subject=first.subject,
        entries=tuple(e.id for e in runs),
    )


def _clears(found: Compared, amount: float) -> bool:
    """Whether every interval leaves the margin out."""
    if found.measure.better == "higher":
        return all(bound.low > -amount for bound in found.bounds)
    return all(bound.high < amount for bound in found.bounds)


# ---- words ------------------------------------------------------------------------------------------------------------


def figure(value: float, *, sign: bool = False) -> str:
    """Four digits at least, no exponent."""
    places = min(max(3 - math.floor(math.log10(abs(value))), 0), 12) if value else 0
    text = f"{value:{'+' if sign else ''},.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def amount_words(asked: Measure, value: float, *, sign: bool = False) -> str:
    """A value or difference with its unit; of accuracy in percentage points."""
    if asked.is_accuracy:
        return f"{100 * value:{'+' if sign else ''}.2f} points"
    return f"{figure(value, sign=sign)}{' ' + asked.unit if asked.unit else ''}"


def interval_words(asked: Measure, interval: Interval) -> str:
    if asked.is_accuracy:
        return f"{100 * interval.low:+.2f} to {100 * interval.high:+.2f} points"
    unit = f" {asked.unit}" if asked.unit else ""
    return f"{figure(interval.low, sign=True)} to {figure(interval.high, sign=True)}{unit}"


def p_words(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.2g}"


def tests_words(found: Compared) -> str:
    """What the claim stands on."""
    tested = found.exchanged.tested
    if found.questions is not None:
        signs = found.questions.sign_flip
        return (
            f"sign-flip over the {found.questions.differing:,} of {found.questions.count:,} questions that differ p = "
            f"{p_words(signs.p)}, exchange of the runs p = {tested.count} = {p_words(tested.p)}"
        )
    name = f"exact sign-flip over {len(found.rounds)} rounds" if found.rounds else "exchange of the runs"
    return f"{name} p = {tested.count} = {p_words(tested.p)}"


def _sentences(
    question: Question,
    found: list[Verdict],
    primary: Compared | None,
    says: str,
    not_inferior: bool | None,
    margin: float | None,
) -> list[str]:
    """What is claimed, or why nothing is."""
    sentences = []
    if says == "refused":
        sentences.append(f"No claim about {question.measure.words}.")
        sentences += [_refusal(item) for item in found if item.stops in ("claim", "difference")]
    elif primary is not None:
        sentences += _result(primary, question.alpha, different=says == "different")
    if primary is not None and margin is not None:
        sentences += _of_margin(primary, margin, not_inferior, found)
    return sentences


def _refusal(item: Verdict) -> str:
    return f"{item.why[0].upper()}{item.why[1:]}{': ' + item.remedy if item.remedy else ''}."


def _result(primary: Compared, alpha: float, *, different: bool) -> list[str]:
    asked, interval = primary.measure, primary.interval
    percent = "" if primary.percent is None or asked.is_accuracy else f" ({primary.percent:+.2f}%)"
    bounds = f"{100 * interval.confidence:.3g}% interval {interval_words(asked, interval)}"
    if different:
        direction = "higher" if primary.difference > 0 else "lower"
        worth = "better" if primary.favours == "B" else "worse"
        return [
            f"B's {primary.words} is {direction} than A's by {amount_words(asked, abs(primary.difference))}{percent}, "
            f"which is {worth}: {bounds} for B - A; {tests_words(primary)}, at the level {alpha:g}."
        ]
    return [
        f"No difference in {primary.words} is shown: B - A is {amount_words(asked, primary.difference, sign=True)}{percent}, "
        f"{bounds}; {tests_words(primary)}, {_which_above(primary, alpha)}the level {alpha:g}.",
        "That is not equality: all that the interval holds remains possible.",
    ]


def _which_above(primary: Compared, alpha: float) -> str:
    """Of accuracy two tests must reach the level, and the interval is that of one of them."""
    if primary.questions is None or min(primary.questions.sign_flip.p, primary.exchanged.tested.p) > alpha:
        return "above "
    of_runs = primary.exchanged.tested.p > alpha
    one, other = ("questions", "runs") if of_runs else ("runs", "questions")
    return f"of which the one over {one} reaches and the one over {other} does not reach "


def _of_margin(
    primary: Compared, margin: float, not_inferior: bool | None, found: list[Verdict]
) -> list[str]:
    asked = primary.measure
    words = amount_words(asked, margin)
    if not_inferior is None:
        return [_refusal(item) for item in found if item.stops == "non-inferiority"]
    bounds = " and ".join(
        f"{100 * bound.confidence:.3g}% interval {interval_words(asked, bound)}" for bound in primary.bounds
    )
    if primary.questions is not None:
        bounds += ", over questions and over runs"
    if not_inferior:
        return [
            f"B is not worse than A by {words} or more, the margin that was stated before the runs ({bounds})."
        ]
    return [
        f"That B is not worse than A by {words} or more, the margin stated before the runs, is not shown ({bounds})."
    ]


def _design(arms: Arms, held: Held, question: Question, *, attested: bool) -> list[str]:
    """How it was measured: what a reader must know who has only the paragraph."""
    first, primary = arms.a[0], held.primary
    if primary is not None and primary.rounds:
        ran = f"{len(primary.rounds)} rounds of {first.kind}, both arms in each"
    else:
        ran = f"{len(arms.a)} runs of A and {len(arms.b)} of B of {first.kind}"
    driver = f", driver {first.origin.driver}" if first.origin.driver else ""
    machine = f"{first.origin.machine} ({first.origin.device}{driver})"
    hosts = hosts_of(arms.all)
    where = f"measured from {machine} with the server at {hosts[0]}" if hosts else f"on {machine}"
    sentences = [f"Design: {ran}, {where}."]
    if any(e.failed for e in arms.all):
        shares = {label: failed_and_asked(runs) for label, runs in arms.named.items()}
        told = ", ".join(f"{failed:,} of {asked:,} of {label}" for label, (failed, asked) in shares.items())
        sentences.append(f"Failed, and in no figure: {told}.")
    if arms.replaced:
        sentences.append(f"Ended early and run again: {', '.join(begun_again(arms))}.")
    for name, found in (
        ("The build of A against itself (control)", held.control),
        ("B against the control", held.beside),
    ):
        if found is not None:
            sentences.append(
                f"{name} differs by {amount_words(found.measure, found.difference, sign=True)} "
                f"({interval_words(found.measure, found.interval)}, p = {p_words(found.p)})."
            )
    if attested and question.stated is not None:
        return [
            *sentences,
            f"Metric, level, margin, arms and rounds stand in the plan {question.stated.digest[:12]} of "
            f"{question.stated.plan.date}, written before the first run and carried by every run.",
        ]
    return [
        *sentences,
        "This was not planned: metric, level, arms and number of runs may have been chosen after the results were seen.",
    ]


def as_builtins(claim: Claim) -> dict[str, Any]:
    """For JSON: all of the claim, with what follows from each comparison beside it."""
    plain: dict[str, Any] = msgspec.to_builtins(claim)

    def whole(found: Compared | None) -> dict[str, Any] | None:
        if found is None:
            return None
        extra = {
            "difference": found.difference,
            "percent": found.percent,
            "p": found.p,
            "interval": msgspec.to_builtins(found.interval),
            "differences": found.differences,
            "favours": found.favours,
        }
        return msgspec.to_builtins(found) | extra

    return plain | {
        "primary": whole(claim.primary),
        "control": whole(claim.control),
        "beside": whole(claim.beside),
        "secondary": [whole(item) for item in claim.secondary],
    }
