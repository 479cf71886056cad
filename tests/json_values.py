"""What may stand where a JSON value is expected, for hypothesis: any value, any text, and objects under meaningful names."""

import json
from collections.abc import Iterable

from hypothesis import strategies as st

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def texts(names: Iterable[str]) -> st.SearchStrategy[str]:
    """JSON objects with some of ``names``, whatever their values; JSON of other kinds; texts that are no JSON."""
    objects = st.dictionaries(st.sampled_from(sorted(names)) | st.text(max_size=4), VALUES, max_size=4)
    whole = objects.map(json.dumps) | VALUES.map(json.dumps)
    cut = st.tuples(whole, st.integers(0, 200)).map(lambda pair: pair[0][: pair[1]])
    return whole | cut | st.text(max_size=30) | st.sampled_from(["[" * 5000, '{"a":' * 5000, "9" * 5000])
