"""By which argument a script continues: only what is sure is added."""

from __future__ import annotations

from pathlib import Path

import pytest

from trnslurm.config.continuing import continuing_words, quoted_for_hydra

HYDRA = "@hydra.main()\ndef main(cfg):\n    "
PARSER = "p = argparse.ArgumentParser()\n"


@pytest.mark.parametrize(
    ("source", "words", "added"),
    [
        (f"{PARSER}p.add_argument('--resume', default='', type=str)", "", "--resume {resume}"),
        (f"{PARSER}a('--resume-from', help='a (new) path')", "", "--resume-from {resume}"),
        (f"{PARSER}a('--resume', type=str)\na('--resume-inference')", "", "--resume {resume}"),
        ("p = HfArgumentParser(X)\ntrain(resume_from_checkpoint=a)", "",
         "--resume_from_checkpoint {resume}"),
        ("def run(\n    lr=1,\n    resume_from=None,\n):\n    ...\nfire.Fire(run)", "",
         "--resume_from {resume}"),
        (f"{HYDRA}f(cfg.get('ckpt_path'))", "", "++ckpt_path={resume}"),
        (f"{HYDRA}f(cfg.train.resume_path)", "", "++train.resume_path={resume}"),
        # several ways, none, one that is no path, or one that the user has chosen
        (f"{PARSER}a('--resume')\na('--resume-from')", "", ""),
        (f"{PARSER}a('--resume_epoch')", "", ""),
        (f"{PARSER}a('--resume', action='store_true')", "", ""),
        (f"{PARSER}a('--resume', type=int, default=0)", "", ""),
        (f"{PARSER}a('--resume', default=f(1), type=str2bool)", "", ""),
        ("p = HfArgumentParser(X)\ntrainer.train()", "", ""),
        (f"{HYDRA}f(cfg.a.ckpt_path, cfg.ckpt_path)", "", ""),
        ("resume = None", "", ""),
        (f"{PARSER}a('--resume')", "--dataloader-workers=2 --download", "--resume {resume}"),
        (f"{PARSER}a('--resume')", "--load x.pt", ""),
        (f"{PARSER}a('--resume')", "--resume x.pt", ""),
        (f"{PARSER}a('--resume')", "--init={first:new}", ""),
    ],
)  # fmt: skip
def test_the_argument_by_which_a_script_continues(
    tmp_path: Path, source: str, words: str, added: str
) -> None:
    found = continuing_words(source.encode(), tmp_path, words.split())
    assert " ".join(found) == added


def test_another_file_of_the_project_reads_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "options.py").write_text(f"{PARSER}p.add_argument('--resume')")
    assert continuing_words(b"import options", tmp_path, []) == ["--resume", "{resume}"]
    assert continuing_words(PARSER.encode(), tmp_path, []) == []


def test_a_checkpoint_of_lightning_has_an_equals_sign() -> None:
    """Which Hydra takes only within quotes."""
    words = ["+a.b={resume}", "--x={resume}", "{resume}", "lr=1"]
    assert quoted_for_hydra(words) == ["+a.b='{resume}'", *words[1:]]
