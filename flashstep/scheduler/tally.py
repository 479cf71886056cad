"""Counts that grow with every step: what speculation did (of one request, or of all), and how many rows steps have."""

from flashstep.config.speculative import Speculation
from flashstep.request import Acceptance


class RowTally:
    """Steps by their rows, in powers of two."""

    __slots__ = ("rows", "steps")

    def __init__(self, most: int) -> None:
        self.steps = [0] * ((most - 1).bit_length() + 1)  # [i]: of 2^(i-1) + 1 .. 2^i rows, [0] of one row
        self.rows = 0

    def add(self, rows: int) -> None:
        self.steps[(rows - 1).bit_length()] += 1
        self.rows += rows


class Tally:
    """Steps that had drafts, by how many stood."""

    __slots__ = ("_draft_tokens", "_histogram", "_speculation")

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._histogram = [0] * (speculation.num_tokens + 1)
        self._draft_tokens = 0

    def add(self, drafted: int, *, accepted: int) -> None:
        """A step has verified ``drafted`` drafts (at least one), of which the first ``accepted`` stood."""
        assert 0 <= accepted <= drafted and drafted, (accepted, drafted)
        self._histogram[accepted] += 1
        self._draft_tokens += drafted

    def acceptance(self) -> Acceptance:
        """The counts so far."""
        histogram = self._histogram
        return Acceptance(
            synthetic=self._speculation.synthetic,
            num_tokens=self._speculation.num_tokens,
            steps=sum(histogram),
            draft_tokens=self._draft_tokens,
            accepted_tokens=sum(count * steps for count, steps in enumerate(histogram)),
            histogram=tuple(histogram),
            per_position=tuple(sum(histogram[place + 1 :]) for place in range(len(histogram) - 1)),
        )
