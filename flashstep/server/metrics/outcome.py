"""How one request went, told once at its end: the facts that metrics, traces and the log have in common.

A request is one choice: the n choices of a prompt are n requests of one family. Knows no HTTP and no text.
"""

import msgspec

UNFINISHED = ("abort", "error")  # these have no latency worth a place in a histogram


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``reason`` is stop, length, abort or error. Times are seconds; None: it never came so far."""

    request_id: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    transferred_tokens: int  # their records came from outside
    completion_tokens: int
    max_tokens: int
    temperature: float
    top_p: float
    preemptions: int
    end_to_end_s: float
    queued_s: float | None
    prefill_s: float | None  # from admission to the first token
    first_token_s: float | None  # from arrival
    decode_s: float | None  # from the first token to the last

    @property
    def finished(self) -> bool:
        """It came to an end of its own."""
        return self.reason not in UNFINISHED

    @property
    def inference_s(self) -> float | None:
        """Prefill and decoding."""
        known = self.prefill_s is not None and self.decode_s is not None
        return self.prefill_s + self.decode_s if known else None


def child_id(family: str, child: int) -> str:
    """The id of a request: those of one prompt share ``family``."""
    return f"{family}-{child}"


def family(request_id: str) -> str:
    """What ``child_id`` was made with."""
    return request_id.rpartition("-")[0]
