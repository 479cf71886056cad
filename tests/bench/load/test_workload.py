"""A run's plan: the same for the same seed, and nothing before or beside it that would warm its prompts."""

from itertools import islice
from pathlib import Path

from flashstep.bench.load.arrivals import Arrivals
from flashstep.bench.load.bodies import Shape
from flashstep.bench.load.lengths import UNCHECKED, Range, Words
from flashstep.bench.load.prompts import RandomPrompts, read_prompts
from flashstep.bench.load.workload import Workload

WORDS = Words(UNCHECKED.words, overhead=4)
RANDOM = Workload(
    source=RandomPrompts(input_len=Range(30, 60), output_len=Range(4, 8)),
    shape=Shape(model="m"),
    arrivals=Arrivals(rate=5.0),
    num_prompts=12,
    num_warmups=3,
    probe_rate=2.0,
    seed=7,
)


def test_two_plans_of_one_seed_are_one_plan() -> None:
    first, second = list(RANDOM.plan(WORDS)), list(RANDOM.plan(WORDS))
    assert first == second and len(first) == 12
    bodies = [RANDOM.shape.call(session, 0, []).body for _, session in first]
    assert bodies == [RANDOM.shape.call(session, 0, []).body for _, session in second]


def test_warm_ups_and_probes_share_no_prompt_with_the_run() -> None:
    asked = [session.turns[0].messages for _, session in RANDOM.plan(WORDS)]
    warm = [session.turns[0].messages for session in RANDOM.warm_ups(WORDS)]
    probes = [session.turns[0].messages for _, session in islice(RANDOM.probes(), 12)]
    assert len(warm) == 3 and RANDOM.warm_ups(WORDS)[0].key == "warm-up-0"
    texts = [message[0]["content"] for message in (*asked, *warm, *probes)]
    assert len(set(texts)) == 27


def test_probes_come_at_their_rate() -> None:
    times = [at_s for at_s, _ in islice(RANDOM.probes(), 400)]
    assert 160 < times[-1] < 240 and times == sorted(times)


def test_a_files_prompts_are_not_sent_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("".join(f'{{"prompt": "p{number}"}}\n' for number in range(4)))
    read = read_prompts(file, output_len=None, chat=True)
    workload = Workload(source=read, shape=Shape(model="m"), num_prompts=3, num_warmups=2)
    assert [session.turns[0].messages[0]["content"] for _, session in workload.plan(None)] == [
        "p0",
        "p1",
        "p2",
    ]
    warm = [session.turns[0].messages[0]["content"] for session in workload.warm_ups(None)]
    assert len(warm) == 2 and not any(text.startswith("p") for text in warm)
