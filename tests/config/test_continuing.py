"""By which argument a script continues: only what is sure is added."""

from __future__ import annotations

from pathlib import Path

import pytest

from trnslurm.config.continuing import continuing_words, quoted_for_hydra, sources_of
from trnslurm.config.entry import Entry

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
        (f"{PARSER}a('-r', '--restart', type=str, default=None)", "", "--restart {resume}"),
        (f"{PARSER}a('--load-model', help='Restart training using a checkpoint')\na('--load-old')",
         "", "--load-model {resume}"),
        ("LightningCLI(Model)", "fit --config a.yaml", "--ckpt_path {resume}"),
        ("LightningCLI(Model)", "test --config a.yaml", ""),
        ("LightningCLI(Model)", "fit --ckpt_path last", ""),
        (f"{HYDRA}f(cfg.get('ckpt_path'))", "", "++ckpt_path={resume}"),
        (f"{HYDRA}f(cfg.train.resume_path)", "", "++train.resume_path={resume}"),
        (f"{HYDRA}t.fit(f(m), ckpt_path=cfg.run.ckpt_path)\nt.test(ckpt_path=cfg.ckpt_path)", "",
         "++run.ckpt_path={resume}"),
        (f"{HYDRA}t.fit(m, ckpt_path=cfg.get('ckpt_path'))", "", "++ckpt_path={resume}"),
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
def test_the_argument_by_which_a_script_continues(source: str, words: str, added: str) -> None:
    assert " ".join(continuing_words(source.encode(), (), words.split())) == added


def test_another_file_of_the_project_reads_the_arguments() -> None:
    others = [f"{PARSER}p.add_argument('--resume')".encode()]
    assert continuing_words(b"import options", others, []) == ["--resume", "{resume}"]
    assert continuing_words(PARSER.encode(), others, []) == []
    assert continuing_words(b"", others, []) == []


@pytest.mark.parametrize("imports", ["from pkg.cli import main", "import pkg.cli as cli"])
@pytest.mark.parametrize("place", ["env/lib/python3.11/site-packages", "project", "project/src"])
def test_the_source_of_an_installed_program(
    tmp_path: Path, monkeypatch, imports: str, place: str
) -> None:
    """An editable install has it in the project."""
    package, script = tmp_path / place / "pkg", tmp_path / "env/bin/train-it"
    package.mkdir(parents=True)
    script.parent.mkdir(parents=True, exist_ok=True)
    (package / "cli.py").write_text("cli")
    (package / "train.py").write_text("train")
    for name in ("train-it", "python"):
        script.with_name(name).write_text(f"#!/usr/bin/python\n{imports}\n")
        script.with_name(name).chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    for entry in (Entry.program("train-it"), Entry.module("pkg.cli")):
        own, others = sources_of(entry, tmp_path / "project")
        assert (own, b"train" in {*others}) == (b"cli", True)
    assert sources_of(Entry.program("other"), tmp_path)[0] == b""


def test_a_checkpoint_of_lightning_has_an_equals_sign() -> None:
    """Which Hydra takes only within quotes."""
    words = ["+a.b={resume}", "--x={resume}", "{resume}", "lr=1"]
    assert quoted_for_hydra(words) == ["+a.b='{resume}'", *words[1:]]
