"""The rules of ``verify.py`` as their definitions read: probabilities instead of logarithms, one request at a time, plain floats.

What tests hold ``verify.py`` against. ``p[i]`` and ``q[i]`` are the target's and the draft's probabilities in the place of draft
i + 1; ``p`` has one row more, for the token behind the last draft. Knows no tensors.
"""

from collections.abc import Sequence

Row = Sequence[float]


def present(drafts: Sequence[int]) -> int:
    """How many drafts come before the first -1."""
    return next((place for place, draft in enumerate(drafts) if draft < 0), len(drafts))


def accept_points(drafts: Sequence[int], targets: Sequence[int]) -> int:
    """The drafts before the first that is not the token drawn in its place."""
    accepted = 0
    while accepted < present(drafts) and drafts[accepted] == targets[accepted]:
        accepted += 1
    return accepted


def accept_standard(drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row], uniforms: Row) -> int:
    """Left to right: a draft stands if u q(d) < p(d)."""
    accepted = 0
    while accepted < present(drafts):
        draft = drafts[accepted]
        if uniforms[accepted] * q[accepted][draft] >= p[accepted][draft]:
            break
        accepted += 1
    return accepted


def accept_block(drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row], uniforms: Row) -> int:
    """The largest i with u_i <= h_i, 0 if there is none."""
    thresholds = block_thresholds(drafts, p, q)
    passed = [
        place for place, (u, h) in enumerate(zip(uniforms, thresholds, strict=False), start=1) if u <= h
    ]
    return max(passed, default=0)


def accept_synthetic(drafts: Sequence[int], rates: Row, uniforms: Row) -> int:
    """Left to right: a draft stands with probability rate_i / rate_{i-1}."""
    accepted, before = 0, 1.0
    while accepted < present(drafts) and before > 0 and uniforms[accepted] < rates[accepted] / before:
        before = rates[accepted]
        accepted += 1
    return accepted


def block_scales(drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row]) -> list[float]:
    """P_0 = 1, P_i = min(1, P_{i-1} p(d_i) / q(d_i)), for the drafts that are present."""
    scales = [1.0]
    for place in range(present(drafts)):
        above, below = p[place][drafts[place]], q[place][drafts[place]]
        if scales[-1] == 0 or above == 0:
            scales.append(0.0)
        else:
            scales.append(min(1.0, scales[-1] * above / below) if below > 0 else 1.0)
    return scales


def block_thresholds(drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row]) -> list[float]:
    """h_1 .. h_n of the n drafts that are present."""
    scales, last = block_scales(drafts, p, q), present(drafts)
    thresholds = []
    for place in range(1, last):
        share = sum(excess(scales[place], p[place], q[place]))
        total = share + 1 - scales[place]
        thresholds.append(share / total if total > 0 else 1.0)
    return thresholds + scales[last:] if last else []


def excess(scale: float, p: Row, q: Row) -> list[float]:
    """max(P p(x) - q(x), 0) for each token x."""
    return [max(scale * target - draft, 0.0) for target, draft in zip(p, q, strict=True)]


def residual(
    drafts: Sequence[int], p: Sequence[Row], q: Sequence[Row], accepted: int, *, block: bool
) -> list[float]:
    """The weights that the token behind ``accepted`` drafts is drawn by."""
    if accepted == present(drafts):
        return list(p[accepted])
    scale = block_scales(drafts, p, q)[accepted] if block else 1.0
    left = excess(scale, p[accepted], q[accepted])
    return left if sum(left) > 0 else list(p[accepted])
