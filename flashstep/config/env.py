"""Environment variables: the only module that may touch them, and the list of those that matter.

None chooses behaviour: that is what flags are for, which are typed, validated and printed by --help. torch, OpenMP and rich read
their own (OMP_NUM_THREADS, NO_COLOR). A variable that has to be read or set gets a row: what it does, and why it is no flag.
"""

import os

VARIABLES: dict[str, str] = {
    "GOMP_SPINCOUNT": "how long torch's threads spin at a barrier before they sleep; OpenMP reads it when torch is loaded, so a "
    "flag would come too late. Unset, they spin for so long that two threads on two cores that others use too need 20 to 30 s "
    "for a chunk of 2,047 rows instead of 4.4 s; 20,000 costs nothing on a quiet machine (1.3 s either way; docs/log.md)",
}


def limit_spinning() -> None:
    """Before torch is loaded: let its threads sleep at a barrier soon. What the user has set stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # noqa: TID251 - the one module


def set_variables(prefix: str) -> list[str]:
    """The names of the variables that begin with ``prefix`` and are set to something. Their values are read nowhere."""
    return sorted(name for name, value in os.environ.items() if name.startswith(prefix) and value)  # noqa: TID251 - the one module
