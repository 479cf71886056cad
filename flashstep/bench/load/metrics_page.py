"""A server's own counters before and after a run, as the /metrics page of vLLM's names tells them (F31, E13).

Takes the text of two pages; gives acceptance and prefix-cache figures of what ran between. Knows no HTTP.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

DRAFTING = {
    "vllm:spec_decode": False,
    "flashstep:synthetic_spec_decode": True,
}  # prefix of counters, whether synthetic
PLAIN = {
    "prefix_cache_queries": "vllm:prefix_cache_queries",
    "prefix_cache_hits": "vllm:prefix_cache_hits",
    "prompt_tokens": "vllm:prompt_tokens",
    "generation_tokens": "vllm:generation_tokens",
    "preemptions": "vllm:num_preemptions",
}

PROCESS_START = ("process_start_time_seconds", "")  # a gauge of Prometheus's own: which process this is

Counts = Mapping[tuple[str, str], float]


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What a server counted between two pages. None where it has no such counter.

    ``acceptance_length`` is 1 + accepted / drafts and ``acceptance_rate`` accepted / drafted tokens; ``by_position`` is the
    share of drafts whose token at each position stood. ``synthetic`` says that drafts stood by lot. ``fault`` is a sentence
    where the two pages are not of one count.
    """

    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    by_position: tuple[float, ...] = ()
    synthetic: bool = False
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    preemptions: float | None = None
    fault: str = ""

    @property
    def acceptance_length(self) -> float | None:
        return (
            1 + self.accepted_tokens / self.drafts
            if self.drafts and self.accepted_tokens is not None
            else None
        )

    @property
    def acceptance_rate(self) -> float | None:
        if not self.draft_tokens or self.accepted_tokens is None:
            return None
        return self.accepted_tokens / self.draft_tokens

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Of prompt tokens that were looked up."""
        if not self.prefix_cache_queries or self.prefix_cache_hits is None:
            return None
        return self.prefix_cache_hits / self.prefix_cache_queries


def read_counters(page: str) -> Counts:
    """The sum over all other labels of each counter, by its name without _total and its ``position`` label; ``ValueError``."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if name != sample.name or name == PROCESS_START[0]:
                place = (name, sample.labels.get("position", ""))
                found[place] = found.get(place, 0.0) + sample.value
    return found


def between(before: Counts, after: Counts) -> Counted:
    """What was counted from one page to the other. A counter that is only on the second page began at 0 between them."""
    grown = {place: value - before.get(place, 0.0) for place, value in after.items()}
    if grown.get(PROCESS_START) and PROCESS_START in before:
        fault = "the server was started anew during the run: what it counted is left out"
    elif any(value < 0 for value in grown.values()):
        fault = "the server's counters went back during the run: what they say is left out"
    else:
        return _counted(grown)
    by_lot = [f"{prefix}_num_drafts" for prefix, synthetic in DRAFTING.items() if synthetic]
    return Counted(fault=fault, synthetic=any(after.get((name, "")) for name in by_lot))


def _counted(grown: Counts) -> Counted:
    plain: dict[str, Any] = {field: grown.get((name, "")) for field, name in PLAIN.items()}
    for prefix, synthetic in DRAFTING.items():
        drafts = grown.get((f"{prefix}_num_drafts", ""))
        if not drafts:
            continue
        accepted = f"{prefix}_num_accepted_tokens_per_pos"
        named = [place for place in grown if place[0] == accepted and place[1].isdecimal()]
        places = sorted(named, key=lambda place: int(place[1]))
        return Counted(
            drafts=drafts,
            draft_tokens=grown.get((f"{prefix}_num_draft_tokens", "")),
            accepted_tokens=grown.get((f"{prefix}_num_accepted_tokens", "")),
            by_position=tuple(grown[place] / drafts for place in places),
            synthetic=synthetic,
            **plain,
        )
    return Counted(**plain)
