"""What a t test would find: the yardstick of the exact tests' power."""

from scipy import stats


def power(effect: float, *, sd: float, n: int, alpha: float) -> float:
    """Chance that a two-sided paired t test of ``n`` differences with spread ``sd`` finds a mean difference of ``effect``.

    By the noncentral F, which t squared has: scipy's noncentral t is NaN in places.
    """
    reach = stats.t.ppf(1 - alpha / 2, n - 1)
    return float(stats.ncf.sf(reach**2, 1, n - 1, n * (effect / sd) ** 2))
