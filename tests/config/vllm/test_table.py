"""The table of vLLM's flags against vLLM 0.33's own list, against ours, and against the page that is made of it."""

import shlex
from pathlib import Path

import msgspec
import pytest

from flashstep.config.speculative import NOT_OURS, SpeculativeOptions
from flashstep.config.vllm.commands import COMMANDS, answer
from flashstep.config.vllm.flags import OFF, ON, Shape, Standing, rows
from flashstep.config.vllm.line import OBJECTS, RENAMED, SIZED, own_shapes, translate
from flashstep.config.vllm.page import with_tables
from flashstep.config.vllm.table import SHORT, TABLE
from flashstep.config.vllm.works import WORKS

ROOT = Path(__file__).parents[3]
# the names of the flags of `vllm serve` 0.33.0, read from its wheel
VLLM = set((Path(__file__).parent / "serve_flags_0_33.txt").read_text().split())
OURS = set(own_shapes())


def test_each_flag_of_vllm_is_in_one_place() -> None:
    """Works, is renamed, or is in the table; a flag that becomes ours leaves the table, and gets a row in ``works``."""
    places = [set(WORKS), set(RENAMED), set(TABLE), {"model"}]
    for number, place in enumerate(places):
        for other in places[number + 1 :]:
            assert not place & other
    assert set().union(*places) - VLLM == set()
    assert VLLM - set().union(*places) == set()


def test_what_works_is_ours() -> None:
    assert set(WORKS) == OURS & VLLM
    assert {renamed.ours for renamed in RENAMED.values()} <= OURS
    assert set(OBJECTS) <= OURS
    assert set(SIZED) <= OURS


def test_every_entry_has_a_reason_and_what_to_use() -> None:
    for flag in TABLE.values():
        assert flag.reason and flag.instead, flag.name
        assert flag.standing is not Standing.WORKS


def test_what_is_always_so_has_a_value_that_is_taken() -> None:
    for flag in TABLE.values():
        if flag.standing is Standing.ALWAYS:
            assert flag.taken or flag.keys, flag.name


def test_flags_of_one_dash_are_of_known_flags() -> None:
    assert set(SHORT.values()) <= set(TABLE) | OURS | set(RENAMED)


def test_every_flag_we_name_as_the_way_out_exists() -> None:
    named = {
        word.strip("`,.;()").removeprefix("--")
        for flag in TABLE.values()
        for word in flag.instead.split()
        if word.startswith("--")
    }
    of_other_commands = {"released", "token"}
    assert named - of_other_commands <= OURS, named - OURS


def test_the_page_is_made_of_the_table() -> None:
    page = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8")
    remedy = "run: python -m flashstep.config.vllm.page docs/from-vllm.md"
    assert with_tables(page) == page, remedy
    assert f"{len(VLLM)} flags" in page
    assert [name for name in VLLM if f"`--{name}`" not in page and f"`--no-{name}`" not in page] == []


def test_the_page_says_what_becomes_of_its_example() -> None:
    page = (ROOT / "docs" / "from-vllm.md").read_text(encoding="utf-8")
    example = page.split("```")[1].replace("\\\n", " ")
    words = shlex.split(example)
    assert words[:3] == ["flashstep", "vllm", "serve"]
    problems = translate(words[3:]).problems
    assert len(problems) == 3 and "three things have to go" in page
    for problem, flag in zip(
        problems, ("tensor-parallel-size", "compilation-config", "additional-config"), strict=True
    ):
        assert problem.startswith(f"--{flag}")


def test_the_notation() -> None:
    made = {
        flag.name: (flag.shape, flag.taken)
        for flag in rows(Standing.NEVER, "a +b -+c d= e=1|2 f* g{}", "because", "leave it out")
    }
    assert made == {
        "a": (Shape.SWITCH, (OFF,)),
        "b": (Shape.SWITCH, (ON,)),
        "c": (Shape.SWITCH, (ON, OFF)),
        "d": (Shape.VALUE, ()),
        "e": (Shape.VALUE, ("1", "2")),
        "f": (Shape.LIST, ()),
        "g": (Shape.OBJECT, ()),
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_answer(command: str) -> None:
    assert answer([*command.split(), "--model", "x"]) == f"vllm {command}: {COMMANDS[command]}"


def test_no_answer_for_what_is_no_command() -> None:
    assert answer(["bench", "nothing"]) is None
    assert answer([]) is None


def test_every_field_of_vllms_speculative_config_has_an_answer() -> None:
    """Its names in vLLM 0.33.0, without those that its command line does not take."""
    fields = (
        "method num_speculative_tokens model draft_tensor_parallel_size tensor_parallel_size quantization moe_backend "
        "attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration "
        "disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes draft_lm_head_quantization "
        "use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting "
        "num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config rejection_sample_method "
        "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification draft_sample_method "
        "dspark_draft_topk xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k enforce_eager"
    ).split()
    ours = {field.name for field in msgspec.structs.fields(SpeculativeOptions)}
    assert set(fields) - ours - set(NOT_OURS) == set()
