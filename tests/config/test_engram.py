"""``--engram-config``: what each field means on each device, and every mix that cannot be meant."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstep.config.engram import EngramOptions, Place
from flashstep.config.errors import ConfigError
from tests.json_values import texts


@pytest.mark.parametrize(
    ("text", "gpu", "cpu"),
    [
        ("{}", Place.PINNED, Place.MEMORY),
        ('{"cpu_offload": false}', Place.DEVICE, None),
        ('{"use_thp": true}', Place.PINNED, Place.MEMORY),
        ('{"dp_shared_memory": "auto"}', Place.PINNED, Place.MEMORY),
        ('{"dp_shared_memory": true}', Place.SHARED, Place.MAPPED),
        ('{"dp_shared_memory": false}', Place.PINNED, Place.MEMORY),
    ],
)
def test_where_the_rows_lie(text: str, gpu: Place, cpu: Place | None) -> None:
    options = EngramOptions.parse(text)
    assert options.place("cuda") is gpu
    assert not options.problems_on("cuda", has_files=False)
    if cpu is None:
        assert "the device is the CPU, which has one memory" in options.problems_on("cpu", has_files=True)[0]
    else:
        assert options.place("cpu") is cpu and not options.problems_on("cpu", has_files=True)
    assert EngramOptions.parse(options.text) == options


def test_a_map_needs_files() -> None:
    shared = EngramOptions(dp_shared_memory=True)
    assert "dummy weights lie in none" in shared.problems_on("cpu", has_files=False)[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "it is not JSON"),
        ("[]", "expected a JSON object"),
        ('{"use_thp": true, "use_thp": true}', "it names use_thp twice"),
        ('{"use_thp": 1}', "use_thp is 1; it must be true or false"),
        ('{"dp_shared_memory": "on"}', 'dp_shared_memory is "on"; it must be true or false, or "auto"'),
        ('{"offload": true}', "offload is not a known field; known are cpu_offload, use_thp"),
        ('{"embedding_across_dp": true}', "there is one rank"),
        ('{"cpu_offload": false, "dp_shared_memory": true}', "only host memory can be shared"),
        ('{"cpu_offload": false, "use_thp": true}', "huge pages are of host memory"),
        ('{"use_thp": true, "dp_shared_memory": true}', "leave use_thp out"),
    ],
)
def test_what_cannot_be_meant_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match="--engram-config") as caught:
        EngramOptions.parse(text)
    assert len(caught.value.problems) == 1 and sentence in caught.value.problems[0]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EngramOptions.parse('{"cpu_offload": false, "use_thp": true, "dp_shared_memory": true, "pages": 2}')
    assert len(caught.value.problems) == 4


def test_told_in_words() -> None:
    assert EngramOptions().told("auto") == "in pinned host memory, or without a GPU in memory"
    assert EngramOptions(dp_shared_memory=True).told("cpu") == "memory-mapped on disk"


@settings(max_examples=300, deadline=None)
@given(text=texts(EngramOptions.__struct_fields__))
def test_any_text_is_options_or_refused_in_sentences(text: str) -> None:
    try:
        options = EngramOptions.parse(text)
    except ConfigError as error:
        assert error.problems and all(error.problems)
    else:
        assert EngramOptions.parse(options.text) == options


@given(
    st.builds(
        EngramOptions,
        cpu_offload=st.booleans(),
        use_thp=st.booleans(),
        dp_shared_memory=st.none() | st.booleans(),
    ).filter(lambda options: not options.problems())
)
def test_options_read_back_as_they_were_written(options: EngramOptions) -> None:
    assert EngramOptions.parse(options.text) == options
