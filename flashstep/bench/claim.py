"""The claim: what may be said of two arms, in plain words, with its interval, its design and where its raw data lies.

Takes the arms' entries and the question; gives ``Claim``. Only the metric that was asked for gets words; others stand in a table.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from flashstep.bench import verdicts
from flashstep.bench.arms import Arms, Question
from flashstep.bench.compare import Compared, compare
from flashstep.bench.experiment import without_place
from flashstep.bench.ledger import Entry
from flashstep.bench.measure import Measure, shared_measures
from flashstep.bench.stats import bootstrap
from flashstep.bench.stats.design import detectable
from flashstep.bench.stats.paired import Interval
from flashstep.bench.verdicts import Verdict

CHANCE = 0.8  # of finding what is called detectable


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

    ``not_inferior`` is whether B is shown to be worse by less than ``margin`` (in the metric's unit), None where that may not be
    said.
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
    secondary: tuple[Compared, ...]
    arms: tuple[ArmFacts, ...]

    @property
    def refusals(self) -> tuple[Verdict, ...]:
        return tuple(item for item in self.verdicts if item.stops != "nothing")


def judge(arms: Arms, question: Question, *, resamples: int = bootstrap.RESAMPLES_OF_TWO) -> Claim:
    """Hold the arms against each other and say what the design lets one say. ``resamples`` 0: no bootstraps, for simulations."""
    found = [
        *verdicts.of_runs(arms, question.measure),
        *verdicts.of_origin(arms),
        *verdicts.of_settings(arms, question),
        *verdicts.of_plan(arms, question),
    ]
    primary = control = None
    try:
        primary = compare(arms.a, arms.b, question.measure, alpha=question.alpha, resamples=resamples)
        if arms.control:
            control = compare(
                arms.a, arms.control, question.measure, alpha=question.alpha, resamples=resamples
            )
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
    else:
        found += verdicts.of_result(question, primary, control)
    return _said(arms, question, found, primary, control, _secondary(arms, question, resamples))


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
    arms: Arms,
    question: Question,
    found: list[Verdict],
    primary: Compared | None,
    control: Compared | None,
    secondary: tuple[Compared, ...],
) -> Claim:
    stopped = {item.stops for item in found}
    says: Literal["different", "undecided", "refused"] = "refused"
    not_inferior = amount = None
    if primary is not None:
        if not stopped & {"claim", "difference"}:
            says = "different" if primary.p <= question.alpha else "undecided"
        if question.margin is not None:
            amount = question.margin.amount(float(np.mean(primary.a)))
            if not stopped & {"claim", "non-inferiority"}:
                not_inferior = _not_inferior(primary, amount)
    paragraph = " ".join(_sentences(arms, question, found, primary, control, says, not_inferior, amount))
    return Claim(
        says=says,
        not_inferior=not_inferior,
        paragraph=paragraph,
        alpha=question.alpha,
        margin=amount,
        plan=question.stated.digest if _planned(found, question) and question.stated else None,
        verdicts=tuple(found),
        primary=primary,
        control=control,
        secondary=secondary,
        arms=tuple(_facts(label, runs) for label, runs in arms.named.items() if runs),
    )


def _planned(found: Iterable[Verdict], question: Question) -> bool:
    return question.stated is not None and not any(
        item.rule in ("plan", "plan before runs") for item in found
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


def _not_inferior(primary: Compared, amount: float) -> bool:
    if primary.measure.better == "higher":
        return primary.interval.low > -amount
    return primary.interval.high < amount


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
    arms: Arms,
    question: Question,
    found: list[Verdict],
    primary: Compared | None,
    control: Compared | None,
    says: str,
    not_inferior: bool | None,
    margin: float | None,
) -> list[str]:
    sentences = []
    if says == "refused":
        sentences.append(f"No claim about {question.measure.words}.")
        sentences += [_refusal(item) for item in found if item.stops in ("claim", "difference")]
    elif primary is not None:
        sentences += _result(primary, question.alpha, different=says == "different")
    if primary is not None and margin is not None:
        sentences += _of_margin(primary, margin, not_inferior, found)
    if says == "refused" and not_inferior is None:
        return sentences
    sentences.append(_design(arms, primary))
    if primary is not None and control is not None:
        sentences.append(
            f"The build of A against itself (control) differs by {amount_words(control.measure, control.difference, sign=True)} "
            f"({interval_words(control.measure, control.interval)}, p = {p_words(control.p)})."
        )
    if _planned(found, question) and question.stated is not None:
        sentences.append(
            f"Metric, level, margin and rounds stand in the plan {question.stated.digest[:12]} of {question.stated.plan.date}, "
            "written before the first run and carried by every run."
        )
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
    sentences = [
        f"No difference in {primary.words} is shown: B - A is {amount_words(asked, primary.difference, sign=True)}{percent}, "
        f"{bounds}; {tests_words(primary)}, above the level {alpha:g}.",
        "That is not equality: all that the interval holds remains possible.",
    ]
    least = least_detectable(primary, alpha)
    if least is not None:
        sentences.append(
            f"With this spread a difference of {amount_words(asked, least)} is found in {100 * CHANCE:.0f}% of such experiments."
        )
    return sentences


def least_detectable(primary: Compared, alpha: float) -> float | None:
    """The difference that the design finds in ``CHANCE`` of cases, by a t test; None where runs are not paired."""
    if primary.questions is not None:
        count = primary.questions.count
        return detectable(sd=primary.questions.mean.se * count**0.5, n=count, alpha=alpha, chance=CHANCE)
    if not primary.rounds:
        return None
    return detectable(
        sd=float(np.std(primary.differences, ddof=1)), n=len(primary.rounds), alpha=alpha, chance=CHANCE
    )


def _of_margin(
    primary: Compared, margin: float, not_inferior: bool | None, found: list[Verdict]
) -> list[str]:
    asked = primary.measure
    words = amount_words(asked, margin)
    if not_inferior is None:
        return [_refusal(item) for item in found if item.stops == "non-inferiority"]
    bounds = f"{100 * primary.interval.confidence:.3g}% interval {interval_words(asked, primary.interval)}"
    if not_inferior:
        return [
            f"B is worse than A by less than the margin of {words} that was stated before the runs ({bounds})."
        ]
    return [
        f"That B is worse than A by less than {words}, the margin stated before the runs, is not shown ({bounds})."
    ]


def _design(arms: Arms, primary: Compared | None) -> str:
    first = arms.a[0]
    if primary is not None and primary.rounds:
        ran = f"{len(primary.rounds)} rounds of {first.kind}, both arms in each"
    else:
        ran = f"{len(arms.a)} runs of A and {len(arms.b)} of B of {first.kind}"
    driver = f", driver {first.origin.driver}" if first.origin.driver else ""
    return f"Design: {ran}, on {first.origin.machine} ({first.origin.device}{driver})."


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
        "secondary": [whole(item) for item in claim.secondary],
    }
