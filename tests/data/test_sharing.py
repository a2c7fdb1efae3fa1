"""Packed sequences with a common beginning: every sequence is in there whole, and sees what it would see alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dcp.data.rows import IGNORE
from hf_dcp.data.sharing import common_prefix, group_pairs, pack

TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=7)  # few different ones: common beginnings are frequent


def attended(mask_ranges: np.ndarray) -> list[set[int]]:
    return [{j for lo, hi in row for j in range(lo, hi)} for row in mask_ranges.tolist()]


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, min_size=2, max_size=6).filter(lambda s: len(s) % 2 == 0), st.data())
def test_every_sequence_is_there_and_sees_itself_alone(lists: list[list[int]], data: st.DataObject) -> None:
    sequences = [np.array(s, np.int64) for s in lists]
    predict = data.draw(st.booleans())
    prompts = [data.draw(st.integers(0, len(s) - 1)) for s in lists]
    labels = [np.where(np.arange(len(s)) >= p, s, IGNORE) for s, p in zip(sequences, prompts)]
    groups = group_pairs(sequences, prompts if predict else None)
    assert sorted(k for group in groups for k in group) == list(range(len(sequences)))
    shared = pack(sequences, groups, labels if predict else None, dummy_token=9)
    spec, batch = shared.batch.spec, shared.batch
    seen: list[set[int]] = []
    for start, length, mask in zip(spec.starts.tolist(), spec.lengths, spec.masks):
        seen += [{j + start for j in row} for row in attended(mask.ranges(length))]
    tail = int(predict)
    for k, sequence in enumerate(sequences):
        place = shared.places[k]
        assert len(place) == len(sequence) - tail
        assert batch.input_ids[place].tolist() == sequence[: len(place)].tolist()
        assert batch.position_ids[place].tolist() == list(range(len(place)))
        for t, token in enumerate(place.tolist()):
            assert seen[token] == set(place[: t + 1].tolist())
            if predict and labels[k][t + 1] != IGNORE:
                assert shared.predicts[k][t]
                assert batch.shift_labels[token] == sequence[t + 1]
    stock = sum(len(s) - tail for s in sequences)
    assert batch.spec.num_tokens <= max(stock, 1)


def test_the_last_token_of_the_question_is_in_each_branch() -> None:
    question, answers = [5, 6, 7], [[1, 2], [3, 4, 1]]
    sequences = [np.array(question + a) for a in answers]
    labels = [np.array([IGNORE] * 3 + a) for a in answers]
    shared = pack(sequences, [[0, 1]], labels)
    # question without its last token; then that token and each answer without its last one
    assert shared.batch.input_ids.tolist() == [5, 6, 7, 1, 7, 3, 4]
    assert shared.batch.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert shared.batch.shift_labels.tolist() == [IGNORE, IGNORE, 1, 2, 3, 4, 1]
    whole = pack(sequences, [[0, 1]])
    assert whole.batch.input_ids.tolist() == [5, 6, 7, 1, 2, 3, 4, 1]


def test_different_prompts_are_documents_and_equal_sequences_are_there_once() -> None:
    first, second = np.array([1, 2, 3]), np.array([4, 5])
    shared = pack([first, second], [[0, 1]])
    assert shared.batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert shared.batch.spec.masks[0].ranges(5)[3].tolist() == [[0, 0], [3, 4]]
    assert pack([first, first], [[0, 1]]).batch.spec.num_tokens == 3
    assert common_prefix([first, second]) == 0
    assert common_prefix([first, first[:2]]) == 2


def test_a_batch_without_a_token_to_compute_has_a_dummy() -> None:
    one = np.array([4])
    shared = pack([one, one], [[0, 1]], [one, one], dummy_token=9)
    assert shared.batch.input_ids.tolist() == [9]
    assert shared.batch.shift_labels.tolist() == [IGNORE]
    assert [len(place) for place in shared.places] == [0, 0]


def test_pairs_of_one_question_come_together() -> None:
    a, b, c, other = (np.array(x) for x in ([1, 2, 3], [1, 2, 4], [1, 2, 5], [7, 8]))
    chosen, rejected = [a, a, b, other], [b, c, c, a]
    groups = group_pairs([*chosen, *rejected], None)
    assert groups == [[0, 4, 1, 5, 2, 6], [3, 7]]  # the last pair shares an answer, but no beginning
    assert pack([*chosen, *rejected], groups).batch.spec.lengths == (5, 5)
    by_prompt = group_pairs([a, c, b, c[:2]], [2, 2, 2, 2])
    assert by_prompt == [[0, 2, 1, 3]]
    assert group_pairs([a, c, b, c[:2]], None) == [[0, 2], [1, 3]]
