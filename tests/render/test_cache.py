"""What rendering keeps in the cache: believed only whole, and only if nobody else wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trnslurm.render import cached

OWN_DIRECTORY = cached.own_directory  # as this file is read, it is not replaced yet


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cached, "own_directory", OWN_DIRECTORY)
    return tmp_path / "trnslurm/rendering"


class Computing:
    """Counts how often it is asked."""

    times = 0

    def __call__(self) -> bytes:
        self.times += 1
        return b"result"


def ask(computing: Computing, *made_of: str, program: str = __file__) -> bytes:
    return cached.cached(program, made_of, computing)


def test_a_result_is_computed_once(directory: Path) -> None:
    computing = Computing()
    assert [ask(computing, "a"), ask(computing, "a")] == [b"result", b"result"]
    assert computing.times == 1
    assert directory.stat().st_mode & 0o777 == 0o700


def test_other_content_and_other_programs_have_other_results(
    directory: Path, tmp_path: Path
) -> None:
    computing, program = Computing(), tmp_path / "program.py"
    for text in ("first", "second"):
        program.write_text(text)
        for made_of in (["a", "b"], ["ab", ""], ["a", "b", ""]):
            ask(computing, *made_of, program=str(program))
    assert computing.times == 6


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:20], lambda d: d[:-1] + b"!"])
def test_a_damaged_result_is_computed_again(directory: Path, damage) -> None:
    computing = Computing()
    ask(computing, "a")
    (file,) = directory.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert ask(computing, "a") == b"result"
    assert computing.times == 2
    ask(computing, "a")
    assert computing.times == 2


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_directory_of_others_is_not_used(directory: Path, mode: int) -> None:
    computing = Computing()
    ask(computing, "a")
    directory.chmod(mode)
    assert ask(computing, "a") == b"result"
    assert computing.times == 2


def test_without_a_cache_all_is_computed(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "trnslurm").write_text("a file\n")
    computing = Computing()
    assert [ask(computing, "a"), ask(computing, "a")] == [b"result", b"result"]
    assert computing.times == 2


def test_an_error_is_kept_nowhere(directory: Path) -> None:
    def refuse() -> bytes:
        raise ValueError

    with pytest.raises(ValueError):
        cached.cached(__file__, ["a"], refuse)
    assert [*directory.iterdir()] == []


def test_the_oldest_results_are_removed(directory: Path) -> None:
    for number in range(140):
        ask(Computing(), str(number))
    assert len([*directory.iterdir()]) == 128
