"""The scheduler's choices, as pure functions: who goes first, how rows are shared among prompts, who must give way.

Order. "fcfs": order of arrival at the engine; "priority": (priority, arrival), smaller first. Admission never overtakes.

Rows. Decoding requests come first (a row each); what is left of the budget is shared among prompts, running and waiting: one
half goes to the shortest first, all the rest to the oldest first. So the oldest prompt always gets at least half (none
starves, however many short ones come), the shortest gets the other half (a short prompt does not wait for a long one), a
lone prompt gets everything, and equal prompts are served in order of arrival.
"""

from collections.abc import Iterable, Sequence

from flashstep.request import Request
from flashstep.scheduler.states import Job, OrderKey


def order_key(request: Request, *, policy: str, number: int) -> OrderKey:
    """The sort key of a request that was the ``number``-th to be added."""
    if policy == "fcfs":
        return (number,)
    if policy == "priority":
        return (request.priority, request.arrival, number)
    raise ValueError(f"policy is {policy!r}; it must be 'fcfs' or 'priority'")


def share_rows(wants: Sequence[int], rows: int) -> list[int]:
    """Share ``rows`` among prompts that want ``wants`` rows, oldest first in the list (see the module's docstring)."""
    grants = [0] * len(wants)
    left = rows
    if len(wants) > 1:
        quick = rows // 2
        for index in sorted(range(len(wants)), key=wants.__getitem__):
            if quick == 0:
                break
            grants[index] = min(wants[index], quick)
            quick -= grants[index]
        left = rows - sum(grants)
    for index, want in enumerate(wants):
        if left == 0:
            break
        extra = min(want - grants[index], left)
        grants[index] += extra
        left -= extra
    return grants


def without_overtaking(grants: Sequence[int], *, first_waiting: int) -> list[int]:
    """Give a waiting prompt one row if a later one has any, so that it is admitted first.

    Places from ``first_waiting`` on are waiting, in order. The largest grant pays; if it cannot, later prompts go without.
    """
    result = list(grants)
    last = max((i for i in range(first_waiting, len(result)) if result[i]), default=-1)
    gaps = [i for i in range(first_waiting, last) if result[i] == 0]
    if not gaps:
        return result
    payer = max(range(len(result)), key=result.__getitem__)
    for gap in gaps:
        if result[payer] <= 1:  # it has paid what it can: the next one
            payer = max(range(len(result)), key=result.__getitem__)
        if result[payer] <= 1:
            result[gap:] = [0] * (len(result) - gap)
            break
        result[payer] -= 1
        result[gap] = 1
    return result


def victim(running: Sequence[Job], *, beneficiary: Job, planned: Iterable[Job]) -> Job | None:
    """Who is preempted so that ``beneficiary`` can go on: the last of ``running`` (the last admitted, or the worst).

    Never the beneficiary, nobody that stands before it, nobody who has rows in the plan that is being made, and nobody whose
    last token is already on its way. None: the beneficiary has to wait.
    """
    busy = set(planned)
    for job in reversed(running):
        if job is beneficiary:
            return None
        if job not in busy and not job.exhausted:
            return job
    return None
