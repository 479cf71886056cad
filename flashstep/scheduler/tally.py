"""What speculation did, counted: of one request, or of all of them. Gives ``request.Acceptance``."""

from flashstep.config.speculative import Speculation
from flashstep.request import Acceptance


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
