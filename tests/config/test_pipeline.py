"""A file of stages: their order, and what is refused."""

from __future__ import annotations

import pytest

from trnslurm.config.pipeline import is_pipeline, read_pipeline
from trnslurm.contract.inputs import condition_in
from trnslurm.errors import ConfigError


@pytest.fixture
def read(tmp_path):
    def read(text: str, name: str = "nightly.yaml"):
        file = tmp_path / name
        file.write_text(text)
        assert is_pipeline(str(file))
        return read_pipeline(file)

    return read


def test_stages_come_after_those_that_they_need(read) -> None:
    found = read("""
stages:
  smoke: {submit: "./smoke.sh -- {export.out}", if: evaluate.acc >= 0.6, after: train}
  export: ./export.sh -- {train.checkpoint} {out}
  train: trnslurm submit ./train.py --nodes 2 -- {prepare.out} '{a:1}' ${export.x} {{export.x}}
  evaluate: {submit: "./eval.py -- {train.checkpoint}", files: [eval.py, lib/*]}
  prepare: ./prepare.py
""")
    assert found.name == "nightly"
    assert [s.name for s in found.stages] == ["prepare", "train", "export", "evaluate", "smoke"]
    stages = {stage.name: stage for stage in found.stages}
    assert stages["train"].needs == ("prepare",)
    assert stages["train"].words[:3] == ("./train.py", "--nodes", "2")
    assert stages["smoke"].needs == ("export", "evaluate", "train")
    assert stages["smoke"].condition == "evaluate.acc >= 0.6"
    assert stages["evaluate"].files == ("eval.py", "lib/*")


def test_a_pipeline_is_called_as_its_file_or_its_directory(read, tmp_path) -> None:
    assert read("stages: {a: ./x.py}", "my pipe.yml").name == "my-pipe"
    assert read("stages: {a: ./x.py}", "pipeline.yaml").name == tmp_path.name[:30].strip("-.")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x: 1", "the file has no stages"),
        ("stages: {}", "the file has no stages"),
        ("stages: {a: ./x.py}\nnodes: 2", "unknown key 'nodes'"),
        ("stages: {A-b: ./x.py}", "stages.A-b: a stage name may contain only lowercase letters"),
        ("stages: {a: 3}", "stages.a: expected the arguments of `trnslurm submit`"),
        ("stages: {a: ''}", "stages.a: there is nothing to submit"),
        ("stages: {a: trnslurm submit}", "stages.a: there is nothing to submit"),
        ("""stages: {a: "./x.py 'y"}""", "stages.a: No closing quotation"),
        ("stages: {a: {submit: ./x.py, iff: a}}", 'stages.a: unknown key iff (did you mean "if"?)'),
        ("stages: {a: {submit: ./x.py, after: b}}", "stages.a.after: no stage b"),
        ("stages: {a: {submit: ./x.py, after: 3}}", "stages.a.after: expected a list"),
        ("stages: {a: {submit: ./x.py, if: b.loss}}", "stages.a.if is 'b.loss': expected"),
        ("stages: {a: {submit: ./x.py, if: b.loss < 3}}", "stages.a.if: no stage b"),
        ("stages: {a: './x.py -- {a.out}'}", "stages.a: a stage cannot depend on itself"),
        (
            "stages: {a: './x.py -- {b.out}', b: './x.py -- {a.out}'}",
            "the stages wait for each other: a -> b -> a",
        ),
    ],
)
def test_what_is_refused_and_where(read, text, words) -> None:
    with pytest.raises(ConfigError) as error:
        read(text)
    assert words in str(error.value) and "nightly.yaml: " in str(error.value)
    assert "\n" not in str(error.value)


def test_conditions() -> None:
    found = condition_in(" evaluate.eval/f1<=1e-3 ")
    assert found and (found.name, found.metric, found.bound) == ("evaluate", "eval/f1", 1e-3)
    assert found.holds(1e-3) and not found.holds(2e-3)
    for sign, holds in (("<", False), (">", False), (">=", True), ("<=", True)):
        known = condition_in(f"a.b {sign} 2")
        assert known and known.holds(2.0) is holds
    for text in ("a.b", "a.b = 3", "a.b > x", "a.b > nan", "a > 3", "a.b > 3 4", ""):
        assert condition_in(text) is None
