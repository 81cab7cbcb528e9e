"""The checkpoint that did best: which it is, that it is kept, and what happens if it is damaged."""

import json
import math
import os
from dataclasses import replace

import pytest

from trnslurm.saves.manifest import NAME, _checksum
from trnslurm.train.checkpoint.manifest import CheckpointManifest
from trnslurm.train.checkpoint.reading import find_best, prove


def save_all(writers, scores):
    """Save after steps 1, 2, … with these scores."""
    for step, score in enumerate(scores, start=1):
        writers.begin_save(step, score=score)
        writers.close()


def best_of(writers, name=""):
    best = find_best(writers.root, name)
    return best and prove(best).step


@pytest.mark.parametrize(
    ("name", "scores", "best", "kept"),
    [
        ("f1", [0.5, 0.9, 0.7, 0.8, 0.6], 2, [2, 4, 5]),
        ("f1", [0.5, 0.9, 0.7, 0.9, 0.6], 2, [2, 4, 5]),
        ("f1", [0.9, 0.5, 0.5, 1.0, 0.6], 4, [4, 5]),
        ("f1", [0.0, None, None, None, None], 1, [1, 4, 5]),
        ("f1", [math.nan, -0.5, math.inf, -1.0, math.nan], 2, [2, 4, 5]),
        ("f1", [None, None, None, None, None], None, [4, 5]),
        ("loss", [0.5, 0.2, 0.7, 0.8, 0.6], 2, [2, 4, 5]),
        ("", [0.5, 0.9, 0.7, 0.8, 0.6], None, [4, 5]),
    ],
)
def test_the_best_is_kept_beside_the_newest(team, name, scores, best, kept):
    writers = team(keep_best=name)
    save_all(writers, scores)

    assert writers.steps() == kept
    assert best_of(writers) == best_of(writers, name) == best
    assert best_of(writers, "another") is None


def test_it_stays_over_attempts_and_worker_counts(team):
    save_all(team(keep_best="f1"), [0.9, 0.1, 0.2])
    later = team(3, attempt=2, keep_best="f1")

    assert later.resume() == 3
    later.begin_save(4, score=0.3)
    later.close()
    assert (later.steps(), best_of(later)) == ([1, 3, 4], 1)


def test_a_damaged_one_is_not_the_best(team):
    writers = team(keep_best="f1")
    save_all(writers, [0.9, 0.1, 0.2])
    os.truncate(writers.file(1), writers.file(1).stat().st_size - 4)
    assert best_of(writers) == 3

    writers.begin_save(4, score=0.3)
    writers.close()
    assert writers.steps() == [3, 4]


def test_a_manifest_of_before_there_were_scores_is_read(team):
    writers = team()
    writers.save(1)
    path = writers.file(1).with_name(NAME)
    values = json.loads(path.read_text())
    del values["sha256"], values["score"]
    path.write_text(json.dumps(values | {"sha256": _checksum(values)}))

    manifest = prove(path.parent)
    assert manifest.score == {}
    assert CheckpointManifest.from_json(manifest.to_json(), where="") == manifest
    assert b"frozen" not in replace(manifest, frozen=[]).to_json(), "older ones refuse the key"
    assert team(attempt=2).resume() == 1
