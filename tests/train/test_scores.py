"""Scores: against their definitions, and figures worked out by hand."""

import numpy as np
import pytest
import torch

from trnslurm.train.errors import TrainError
from trnslurm.train.loop.scores import (
    classification_scores,
    correlation_scores,
    count_pairs,
    count_words,
    entities,
    entity_scores,
)


def test_counts_have_labels_in_rows_and_leave_padding_out():
    labels, predicted = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 1, 1])
    counts = count_pairs(predicted, labels, torch.ones(4), num_labels=3)
    assert counts.tolist() == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]
    some = count_pairs(predicted, labels, torch.tensor([1.0, 0.0, 0.0, 1.0]), num_labels=3)
    assert some.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    with torch.autocast("cpu", torch.bfloat16):  # in which 257 would be 256
        many = count_pairs(torch.zeros(257), torch.zeros(257), torch.ones(257), num_labels=2)
    assert many.tolist() == [[257, 0], [0, 0]]


def test_scores_of_two_labels():
    # 50 and 10 of label 0, 5 and 35 of label 1: the second of each pair was taken for label 1.
    found = classification_scores(["accuracy", "f1", "macro_f1", "matthews"], [50, 10, 5, 35])
    assert found["accuracy"] == pytest.approx(0.85)
    assert found["f1"] == pytest.approx(2 * 35 / (2 * 35 + 10 + 5))
    assert found["macro_f1"] == pytest.approx((70 / 85 + 100 / 115) / 2)
    # (TP TN - FP FN) / sqrt((TP + FP)(TP + FN)(TN + FP)(TN + FN))
    expected = (35 * 50 - 10 * 5) / (45 * 40 * 60 * 55) ** 0.5
    assert found["matthews"] == pytest.approx(expected)


def test_scores_of_three_labels_one_of_which_is_never_taken():
    found = classification_scores(["accuracy", "macro_f1", "matthews"], [4, 0, 0, 1, 3, 0, 2, 0, 0])
    assert found["accuracy"] == pytest.approx(0.7)
    assert found["macro_f1"] == pytest.approx((8 / 11 + 6 / 7 + 0) / 3)
    # The correlation of one-hot vectors, which R_K is by its definition.
    labels = np.repeat(np.eye(3), [4, 4, 2], 0)
    taken = np.eye(3)[[0] * 4 + [0] + [1] * 3 + [0] * 2]
    centred = [part - part.mean(0) for part in (labels, taken)]
    products = [[(a * b).sum() for b in centred] for a in centred]
    assert found["matthews"] == pytest.approx(
        products[0][1] / (products[0][0] * products[1][1]) ** 0.5
    )


def test_a_label_that_is_nowhere_is_no_part_of_the_mean():
    assert classification_scores(["macro_f1"], [4, 0, 0, 0, 3, 0, 0, 0, 0]) == {"macro_f1": 1.0}
    assert classification_scores(["macro_f1"], [0] * 9) == {"macro_f1": 0.0}


@pytest.mark.parametrize("counts", [[9, 0, 1, 0], [0, 0, 0, 0]])
def test_one_label_for_all_has_no_correlation(counts):
    assert classification_scores(["matthews", "f1"], counts) == {"matthews": 0.0, "f1": 0.0}


def test_correlations_against_numpy_and_with_ties():
    numbers = np.random.default_rng(1)
    wanted = np.round(numbers.random(200) * 5, 1)  # many are equal
    predicted = wanted + numbers.normal(size=200)
    found = correlation_scores(["pearson", "spearman"], predicted, wanted)
    assert found["pearson"] == pytest.approx(np.corrcoef(predicted, wanted)[0, 1])
    assert correlation_scores(["spearman"], np.exp(wanted), wanted)["spearman"] == pytest.approx(1)
    # By hand: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    found = correlation_scores(["spearman"], [1, 5, 5, 9], [1, 2, 3, 4])
    assert found["spearman"] == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert correlation_scores(["pearson"], [1, 1], [1, 2]) == {"pearson": 0.0}


def test_scores_that_do_not_fit_are_refused():
    with pytest.raises(TrainError, match="the score bleu, but the known scores are accuracy, f1"):
        classification_scores(["bleu"], [1, 0, 0, 1])
    with pytest.raises(TrainError, match="f1 needs two labels, but there are 3: use macro_f1"):
        classification_scores(["f1"], [1] * 9)
    with pytest.raises(
        TrainError, match="the score f1, but the known scores are pearson, spearman"
    ):
        correlation_scores(["f1"], [1], [1])


def test_entities_are_those_of_seqeval():
    """Its own examples (the README and the docstrings of metrics/sequence_labeling.py)."""
    assert entities(["B-PER", "I-PER", "O", "B-LOC"]) == {("PER", 0, 1), ("LOC", 3, 3)}
    wanted = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    taken = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    counts = [count_words(a, b) for a, b in zip(taken, wanted, strict=True)]
    sums = [sum(column) for column in zip(*counts, strict=True)]
    assert sums == [1, 2, 2, 8, 10]
    names = ["entity_f1", "entity_precision", "entity_recall", "accuracy"]
    found = entity_scores(names, sums)
    assert found == {
        "entity_f1": 0.5,
        "entity_precision": 0.5,
        "entity_recall": 0.5,
        "accuracy": 0.8,
    }
    assert entity_scores(["entity_f1"], [0, 0, 0, 0, 0]) == {"entity_f1": 0.0}
    with pytest.raises(TrainError, match="the score f1, but the known scores are entity_f1, "):
        entity_scores(["f1"], sums)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("I-A I-A", {("A", 0, 1)}), ("B-A B-A", {("A", 0, 0), ("A", 1, 1)}),
        ("B-A I-B", {("A", 0, 0), ("B", 1, 1)}), ("B-A E-A I-A", {("A", 0, 1), ("A", 2, 2)}),
        ("S-A I-A O", {("A", 0, 0), ("A", 1, 1)}), ("O E-A E-A", {("A", 1, 1), ("A", 2, 2)}),
        ("B-A-B I-A-B", {("A-B", 0, 1)}), ("O O", set()), ("", set()),
    ],
)  # fmt: skip
def test_tags_out_of_order_are_entities_as_for_conlls_script(tags, expected):
    assert entities(tags.split()) == expected
