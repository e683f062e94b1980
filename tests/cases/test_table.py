"""The table of real faults of other engines, and the test that restates each as a kind."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent.parent


class Entry(NamedTuple):
    """Where a fault was seen first, and the tests of its kind: a file and names in it."""

    source: str
    file: str
    tests: tuple[str, ...]


def _cases(source: str, file: str, *tests: str) -> Entry:
    return Entry(source, f"cases/test_{file}.py", tests)


ENTRIES: list[Entry] = [
    # Pool.
    _cases(
        "vllm#1556",
        "pool",
        "test_forks_freed_in_any_order_leave_every_count_at_zero",
        "test_a_table_that_repeats_a_block_is_never_taken_for_sound",
    ),
    _cases("sglang#11970", "pool", "test_free_and_cached_and_held_blocks_are_all_blocks_at_idle"),
    _cases(
        "mlxcel#170",
        "pool",
        "test_every_outcome_of_the_cache_gives_back_what_it_took",
        "test_shutdown_gives_back_what_every_state_of_a_request_holds",
    ),
    _cases(
        "sglang#16067",
        "pool",
        "test_blocks_taken_before_a_failing_allocation_are_given_back",
        "test_a_turn_that_fails_half_way_returns_its_lock_and_its_blocks",
    ),
    _cases("nanovllm-voxcpm#62", "pool", "test_the_index_of_prefixes_is_no_larger_than_the_pool"),
    _cases(
        "vllm#46283",
        "pool",
        "test_blocks_of_a_step_that_never_returns_are_named_and_never_waited_for",
    ),
    # Identity of blocks.
    _cases("nano#163", "identity", "test_a_recycled_block_is_no_longer_found_under_its_old_prefix"),
    _cases(
        "vllm#37076",
        "identity",
        "test_a_cached_block_cannot_be_taken_between_its_finding_and_its_use",
    ),
    _cases("vllm#50283", "identity", "test_a_failed_step_leaves_nothing_to_be_found"),
    _cases(
        "xllm#1984",
        "identity",
        "test_diverging_forks_copy_their_partial_block_once_and_no_stale_copy_happens_later",
        "test_a_rolled_back_session_writes_into_no_block_of_its_children",
    ),
    _cases(
        "MemOS#2301",
        "models",
        "test_the_prefix_that_forks_share_neither_grows_nor_changes_in_a_real_model",
    ),
    _cases(
        "sglang#2755",
        "identity",
        "test_a_session_can_be_forked_before_anything_was_computed",
        "test_forks_of_finished_cancelled_and_closed_sessions_are_defined",
    ),
    # Liveness.
    _cases(
        "vllm#39734",
        "liveness",
        "test_what_fits_the_model_but_not_the_pool_is_refused_and_blocks_nobody",
        "test_samples_that_fit_together_only_by_sharing_their_prompt_run",
    ),
    _cases(
        "inference-sim#297",
        "liveness",
        "test_half_of_the_memory_two_long_sequences_need_is_enough_for_both",
    ),
    _cases(
        "hf#42943",
        "liveness",
        "test_readers_in_reverse_order_get_their_own_tokens_and_an_end",
    ),
    _cases(
        "cpython#90155",
        "liveness",
        "test_a_waiter_cancelled_as_its_turn_comes_wakes_the_next",
    ),
    _cases(
        "llama.cpp#4185",
        "liveness",
        "test_a_full_pool_of_live_sessions_goes_on_without_endless_retries",
        "test_sessions_that_fill_the_pool_go_on_one_token_each",
    ),
    # Answers.
    _cases("vllm#8844", "answers", "test_any_sample_of_a_group_may_be_the_victim_at_any_token"),
    _cases(
        "nano#211", "answers", "test_a_preempted_sequence_goes_on_from_whatever_is_still_cached"
    ),
    _cases(
        "vllm#5543",
        "answers",
        "test_200_prompts_answer_from_the_cache_as_they_do_cold",
    ),
    _cases("vllm#936", "models", "test_nan_in_every_slot_that_holds_nothing_changes_no_reply"),
    Entry(
        "vllm#47671",
        "kernels/test_offsets.py",
        (
            "test_blocks_beyond_32_bits_are_read",
            "test_slots_beyond_32_bits_are_written",
            "test_blocks_beyond_32_bits_are_copied",
        ),
    ),
    _cases(
        "hf#25306",
        "models",
        "test_a_long_sequence_leaves_no_trace_in_the_positions_of_later_ones",
        "test_positions_that_are_not_known_to_be_served_right_are_refused_at_load",
    ),
    _cases(
        "hf#45943",
        "models",
        "test_the_users_model_works_as_before_while_and_after_an_engine_runs_it",
        "test_replies_of_consecutive_batches_go_to_those_who_asked",
    ),
    # Life of a request.
    _cases(
        "vllm#1020",
        "lifecycle",
        "test_a_reader_that_goes_between_two_tokens_gives_its_blocks_back_in_a_step",
    ),
    _cases(
        "imp#1633",
        "lifecycle",
        "test_a_request_cancelled_as_it_is_promoted_is_never_run",
        "test_an_end_is_never_overwritten",
        "test_a_call_cancelled_in_the_tick_in_which_it_was_made_runs_no_step",
    ),
    _cases(
        "sglang#36333",
        "lifecycle",
        "test_a_cancel_that_the_step_thread_learns_late_leaves_no_output_and_no_orphan",
    ),
    _cases(
        "dynamo#8768",
        "lifecycle",
        "test_clean_up_awaits_nothing_so_that_no_second_cancel_can_stop_it",
    ),
    _cases(
        "LMCache#3688",
        "lifecycle",
        "test_aborts_of_unknown_and_ended_requests_and_late_results_are_ignored",
        "test_a_result_for_a_call_that_is_gone_is_released",
    ),
    # Loop.
    _cases(
        "vllm#5060",
        "loop",
        "test_a_failing_step_ends_neither_the_loop_nor_those_who_were_not_in_it",
    ),
    Entry(
        "vllm-metal#577",
        "test_bad_input.py",
        ("test_bad_input_is_refused_while_no_step_can_run",),
    ),
    _cases("hf#48303", "loop", "test_an_engine_may_be_idle_at_its_start_and_at_its_end"),
    _cases("cpython#97970", "loop", "test_a_result_wakes_a_loop_on_which_nothing_else_happens"),
    _cases(
        "llama.cpp#2303",
        "loop",
        "test_a_thousand_calls_cancelled_and_made_again_at_once_freeze_nothing",
    ),
    _cases(
        "cpython#117379",
        "loop",
        "test_a_reply_needs_no_other_reference_than_its_own_awaiter",
    ),
    _cases("sglang#9241", "loop", "test_sessions_leave_nothing_for_the_collector"),
    _cases("vllm#320", "loop", "test_a_reader_that_sleeps_queues_nothing_and_slows_nobody"),
    # Input.
    _cases(
        "CVE-2026-34756",
        "input",
        "test_a_huge_count_is_refused_before_anything_is_made_of_it",
    ),
    _cases(
        "vllm#16529",
        "input",
        "test_the_first_and_the_last_id_of_the_vocabulary_are_taken",
        "test_a_tokenizer_larger_than_the_model_is_refused_where_it_shows",
    ),
    _cases(
        "vllm#7283",
        "input",
        "test_empty_prompts_have_one_outcome_with_a_bos_and_without",
        "test_a_template_that_renders_to_nothing_is_refused_or_has_tokens",
    ),
    _cases("vllm#890", "models", "test_a_tiny_temperature_tends_to_greedy"),
    _cases("vllm#15041", "input", "test_names_are_labels_and_ids_are_never_used_twice"),
    _cases(
        "local-inference-lab/vllm#266",
        "input",
        "test_log_probabilities_are_as_many_as_were_asked_for",
    ),
    _cases(
        "vllm#4365",
        "input",
        "test_every_combination_of_limits_and_stop_strings_has_its_documented_end",
        "test_stop_ids_end_a_reply_from_its_min_tokens_on",
    ),
    # Trust.
    _cases("CVE-2025-25183", "trust", "test_prompts_whose_hashes_collide_do_not_share"),
    Entry(
        "sglang#37160",
        "test_isolation.py",
        (
            "test_the_prefix_cache_shares_within_a_namespace_alone",
            "test_forks_checkpoints_and_branches_stay_in_their_namespace",
        ),
    ),
    _cases("hf#29279", "trust", "test_no_text_of_a_message_becomes_a_control_token"),
    _cases(
        "CVE-2026-4372",
        "trust",
        "test_a_folder_that_brings_code_is_not_opened_and_its_code_not_run",
        "test_an_old_transformers_is_refused_when_an_engine_opens",
    ),
    _cases(
        "CVE-2025-62164",
        "trust",
        "test_tensors_are_no_prompts_and_arrays_are_bounded_by_their_length",
    ),
    # Text.
    _cases(
        "sglang#888",
        "text",
        "test_a_conversation_of_messages_has_one_bos_whatever_follows",
    ),
    _cases(
        "vllm#11089",
        "text",
        "test_a_stop_string_is_found_over_token_borders_and_no_part_of_it_is_seen",
        "test_an_empty_stop_string_is_refused_and_a_cut_reply_goes_on_as_it_was_said",
    ),
]


def _docstrings(file: str) -> dict[str, str]:
    """The tests of a file with their docstrings."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = (n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {node.name: ast.get_docstring(node) or "" for node in functions}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.source)
def test_every_fault_has_a_test_that_names_its_source(entry: Entry) -> None:
    found = _docstrings(entry.file)
    assert set(entry.tests) <= set(found)
    assert entry.source.lower() in found[entry.tests[0]].lower()


def test_the_table_is_whole() -> None:
    assert len({entry.source for entry in ENTRIES}) == len(ENTRIES) == 51
    assert sum(entry.file.startswith("cases/") for entry in ENTRIES) >= 44


def test_every_test_beside_the_table_restates_a_fault() -> None:
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for name, text in _docstrings(f"cases/{path.name}").items():
            if name.startswith("test_") and path.name != "test_table.py":
                assert "#" in text or "CVE" in text, f"{path.name}::{name} names no source"
