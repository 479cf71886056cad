"""What ran, and where: machine, driver, GPUs, the servers' hosts; commits, changed files, subjects; is the control A's build?"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from flashstep.bench.arms import Arms
from flashstep.bench.experiment import CONTROL
from flashstep.bench.ledger import Entry
from flashstep.bench.origin import Origin
from flashstep.bench.verdicts.verdict import Verdict, by_arm, differ, distinct, listed, some

HERE = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}


def of_builds(arms: Arms) -> Iterator[Verdict]:
    """All of it."""
    yield from _of_machines(arms)
    for name in ("python", "torch"):
        found = by_arm(arms, lambda entry, name=name: getattr(entry.origin, name))
        if differ(found):
            yield Verdict(rule="libraries", stops="nothing", why=f"{name} is not the same: {listed(found)}")
    revisions = by_arm(arms, lambda entry: entry.origin.revision)
    for label, found in revisions.items():
        if len(found) > 1:
            yield Verdict(
                rule="one build an arm",
                stops="claim",
                why=f"arm {label} has runs of different commits: {', '.join(map(str, found))}",
                remedy="run the whole arm from one commit",
            )
    yield from _of_subjects(arms, revisions)
    yield from _of_revisions(arms, revisions)


def _of_machines(arms: Arms) -> Iterator[Verdict]:
    for name, words in (
        ("machine", "machines"),
        ("cpu", "processors"),
        ("driver", "drivers"),
        ("gpus", "GPUs"),
    ):
        found = by_arm(arms, lambda entry, name=name: _hardware(entry.origin, name))
        if differ(found):
            yield Verdict(
                rule="one machine",
                stops="claim",
                why=f"the runs come from different {words}: {listed(found)}",
                remedy="run both arms on one machine with nothing changed between them (E23)",
            )
    hosts = {label: hosts_of(runs) for label, runs in arms.named.items()}
    if differ(hosts):
        yield Verdict(
            rule="one machine",
            stops="claim",
            why=f"the servers are on different hosts: {listed(hosts)}",
            remedy="serve both arms on one machine (E23)",
        )


def hosts_of(runs: Iterable[Entry]) -> list[str]:
    """Of the servers that were asked; empty where the runs had none. All names of the client's own machine are one."""
    urls: list[str] = []
    for entry in runs:
        url = entry.subject.get("url")
        urls += [url] if isinstance(url, str) else url or []
    hosts = [urlsplit(url).hostname or url for url in urls]
    return distinct("localhost" if host in HERE else host for host in hosts)


def _of_subjects(arms: Arms, revisions: dict[str, list[Any]]) -> Iterator[Verdict]:
    subjects = by_arm(arms, _build)
    for label, found in subjects.items():
        if len(found) > 1:
            names = sorted(
                {name for one in found for name in one if any(one[name] != o.get(name) for o in found)}
            )
            yield Verdict(
                rule="one subject an arm",
                stops="claim",
                why=f"arm {label} has {len(found)} subjects, which differ in {some(names)}",
                remedy="an arm is one thing that is measured: run it with the same flags against the same server",
            )
    if arms.control and (revisions[CONTROL], subjects[CONTROL]) != (revisions["A"], subjects["A"]):
        yield Verdict(
            rule="control of A",
            stops="claim",
            why="commit or subject of the control are not A's: it is another build, and does not show how A differs from itself",
            remedy="run the control with A's command (--control A)",
        )


def _build(entry: Entry) -> dict[str, Any]:
    """What was measured, without the address that it had."""
    return {name: value for name, value in entry.subject.items() if name != "url"}


def _of_revisions(arms: Arms, revisions: dict[str, list[Any]]) -> Iterator[Verdict]:
    told = set(chain(*revisions.values()))
    if any(str(name).endswith("+") for name in told):
        alike = "; both arms say the same commit, and what differs between them stands nowhere"
        yield Verdict(
            rule="changed files",
            stops="nothing",
            why=f"files differed from the commit ({listed(revisions)})"
            + (alike if revisions["A"] == revisions["B"] else ""),
            remedy="commit before measuring, so that others can build what was measured",
        )
    if "unknown" in told:
        yield Verdict(
            rule="unknown commit",
            stops="nothing",
            why="a run was made outside a repository, so that its commit is not known",
            remedy="say the build in the arm's subject",
        )
    subjects = [distinct(dict(e.subject) for e in runs) for runs in (arms.a, arms.b)]
    if revisions["A"] == revisions["B"] and subjects[0] == subjects[1]:
        yield Verdict(
            rule="same subject",
            stops="nothing",
            why="both arms have the same commit and the same subject: as far as the ledger tells, this is a build against itself",
        )


def _hardware(origin: Origin, name: str) -> Any:
    if name == "gpus":  # name and uuid; clocks and temperature are of the moment
        return tuple(",".join(gpu.split(",")[:2]) for gpu in origin.gpus)
    return getattr(origin, name)
