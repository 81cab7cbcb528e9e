"""What `import trnslurm` offers: what the commands do, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import trnslurm
from trnslurm import RunFailedError, TrnslurmError, TrnslurmWarning
from trnslurm.errors import NotYetError
from trnslurm.records.run import RunDir
from trnslurm.render.bundle import diff, read_bundle

ROOT = Path(__file__).parents[2]
# On each of two nodes, one process without PyTorch. It holds until it is told to go on or to end.
SCRIPT = """
import os, pathlib, sys, time
import trnslurm
first = int(sys.argv[1]) if len(sys.argv) > 1 else 1
for step in range(first, 4):
    trnslurm.report(step=step, steps=3, loss=1 / step)
print("trained <b>well</b>")
if "--fail" in sys.argv:
    raise KeyError("lr")
while "--hold" in sys.argv and not trnslurm.should_stop():
    time.sleep(0.02)
"""
SUBMIT: dict[str, Any] = {"cluster": "local", "launcher": "python"}


@pytest.fixture
def script(site, tmp_path: Path) -> Path:
    """A custom script in a project of its own."""
    (tmp_path / "project").mkdir()
    file = tmp_path / "project/train.py"
    file.write_text(SCRIPT)
    return file


def test_what_is_offered(stable) -> None:
    found = {}
    for name in trnslurm.__all__:
        thing = getattr(trnslurm, name)
        assert thing.__doc__ and name in dir(trnslurm)
        if inspect.isclass(thing):
            members = [] if issubclass(thing, Exception) else vars(thing)
            fields = getattr(thing, "__dataclass_fields__", {})
            public = [n for n in dict.fromkeys([*fields, *members]) if not n.startswith("_")]
            above = ", ".join(base.__name__ for base in thing.__bases__)
            found[name] = [f"class ({above})", *(member(thing, n) for n in public)]
        else:
            found[name] = [signature(thing)]
            assert "ForwardRef" not in str(inspect.signature(thing)), "what help() shows"
    found["trnslurm.train"] = sorted(imported_in_pages())
    stable.compare("python.txt", found)
    with pytest.raises(AttributeError, match="no attribute 'paln'"):
        trnslurm.paln  # noqa: B018


def member(cls: type, name: str) -> str:
    value = inspect.getattr_static(cls, name, None)
    return f"{name}{signature(value)}" if inspect.isfunction(value) else name


def signature(function: Any) -> str:
    """Its parameters and their defaults, without types."""
    found = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self"]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def imported_in_pages() -> set[str]:
    """What the pages import for jobs and for scripts with a Trainer of their own."""
    pages = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md"))
    lines = re.findall(r"^ +from (trnslurm\.train[\w.]*) import (.*)$", pages, re.MULTILINE)
    return {f"{module}.{name}" for module, names in lines for name in names.split(", ")}


def test_functions_hide_the_rooms_of_their_names() -> None:
    """In whichever order both are imported."""
    from trnslurm.plan import spec
    from trnslurm.runs import status
    from trnslurm.submission import job

    assert all(
        callable(f) for f in (trnslurm.plan, trnslurm.render, trnslurm.submit, trnslurm.runs)
    )
    assert spec.make_spec and status.run_status and job.make_job
    with pytest.raises(TrnslurmError, match="unknown recipe 'no_such'"):
        trnslurm.plan("no_such")


def test_a_run_to_its_good_end(script: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # nothing is asked
    handler, umask = signal.getsignal(signal.SIGINT), os.umask(0o022)
    run = trnslurm.submit(script, nodes=2, **SUBMIT)
    controller = int(RunDir(run.directory).record().jobs["local"].partition("@")[0])
    assert os.getpgid(controller) != os.getpgid(0)  # a kernel's end kills its own group
    assert run.wait(timeout=600) is run
    assert (run.state, run.jobs, run.then) == ("COMPLETED", {}, None)
    assert [(m["step"], m["loss"]) for m in run.metrics()] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert "trained <b>well</b>\n" in run.logs(node=1)
    assert run.logs(tail=1).count("\n") == 1
    assert run == trnslurm.Run("last") == trnslurm.Run(run.directory) and len({run, run}) == 1
    assert [*trnslurm.runs()] == [run]
    assert repr(run) == f"<Run {run.name}: COMPLETED, step 3/3, loss 0.3333>"
    assert f'<td style="text-align: left">{run.name}</td>' in trnslurm.runs()._repr_html_()
    recorded = RunDir(run.directory).record().command
    assert recorded == ("python", f"trnslurm.submit({str(script)!r}, cluster='local', "
                                  "launcher='python', nodes=2)")  # fmt: skip
    assert capfd.readouterr() == ("", "")
    assert (signal.getsignal(signal.SIGINT), os.umask(umask)) == (handler, 0o022)


def test_a_run_that_fails(script: Path) -> None:
    run = trnslurm.submit(script, arguments=["1", "--fail"], **SUBMIT)
    with pytest.raises(RunFailedError) as error:
        run.wait(timeout=600)
    said = str(error.value)
    assert "\n" not in said and said.startswith(f"{run.name} is FAILED (")
    assert "KeyError: 'lr' at train.py, line " in said
    assert run.wait(raises=False).state == "FAILED"


def test_a_run_is_cancelled_and_resumed(script: Path) -> None:
    run = trnslurm.submit(script, arguments=["1", "--hold"], **SUBMIT)
    with pytest.raises(NotYetError, match=r"after 0.01 s$"):
        run.wait(timeout=0.01)
    while not run.metrics():
        assert not run.status().final, repr(run)
    trnslurm.cancel(run)
    with pytest.raises(RunFailedError, match="is CANCELLED"):
        run.wait(timeout=600)
    assert trnslurm.resume("last", nodes=2) == run
    while run.status().nodes != 2 or len(run.status().attempts) < 2:
        assert not run.status().final, repr(run)
    assert run.cancel().wait(timeout=180, raises=False).state == "CANCELLED"


def test_from_threads_and_within_an_event_loop(site, fake_slurm, tmp_path: Path) -> None:
    """Each run is whole, and the process is as before; a notebook's cells run in a loop."""
    site.recipe()
    before = (Path.cwd(), signal.getsignal(signal.SIGINT), os.umask(0o022))

    def submit(number: int) -> trnslurm.Run:
        return trnslurm.submit("toy", cluster="pc", name=f"n{number}", precompile="never")

    async def cell() -> list[trnslurm.Run]:
        threads = [asyncio.to_thread(submit, number) for number in range(4)]
        return [submit(4), *await asyncio.gather(*threads)]

    runs = asyncio.run(cell())
    calls = {call.cwd: call for call in fake_slurm.calls("sbatch")}
    assert calls.keys() == {run.directory for run in runs}
    assert len({run.jobs["train"] for run in runs}) == len(runs)
    for run in runs:
        assert calls[run.directory].script == (run.directory / "train.sbatch").read_bytes()
        assert run.directory.stat().st_mode & 0o777 == 0o700
        assert (run.directory / "plan.json").stat().st_mode & 0o777 == 0o600
    after = (Path.cwd(), signal.getsignal(signal.SIGINT), os.umask(before[2]))
    assert after == (*before[:2], 0o022)


def test_a_chain_and_further_node_counts(site, fake_slurm) -> None:
    site.recipe(
        "batch: {global_batch: 64}\nprecompile: never\ntrain: {init_from: '', save_every: 1}\n"
        "presets: {one: {steps: 2, then: two}, two: {steps: 3}}\ndefault_preset: one\n"
    )
    run = trnslurm.submit("toy", cluster="pc", chain=True, time=5)
    assert run.name.endswith("toy-one") and run.then and run.then.name.endswith("toy-two")
    assert run.then.then is None
    with pytest.raises(TrnslurmError, match="compile_for does not work with chain"):
        trnslurm.submit("toy", cluster="pc", chain=True, compile_for=[2], time=5)
    with (
        pytest.warns(TrnslurmWarning, match="^elastic has been renamed to compile_for$"),
        pytest.raises(TrnslurmError, match="does not work with chain"),
    ):
        trnslurm.submit("toy", cluster="pc", chain=True, elastic=[2], time=5)


def test_what_was_chosen_is_remembered_and_what_is_wrong_is_a_warning(
    site, fake_slurm, make_run, monkeypatch
) -> None:
    site.recipe()
    monkeypatch.setattr("trnslurm.submission.choice.slurm_hint", lambda: (None, False))
    site.profile("local", scheduler="slurm", run_root=str(site.run_root), python="/no/python")
    monkeypatch.setattr(
        "trnslurm.submission.propose.check_here", lambda *_: ["half of it is missing"]
    )
    with pytest.warns(TrnslurmWarning, match="^half of it is missing$") as caught:
        run = trnslurm.submit("toy", precompile="never")
    assert [warning.filename for warning in caught] == [__file__]
    assert run.remarks == ("Using --cluster local by default",)
    assert "by default" in run._repr_html_()
    damaged = make_run("20260101-000000-damaged")
    damaged.record_file.write_text("{}")
    with pytest.warns(TrnslurmWarning, match="damaged or unreadable"):
        assert [*trnslurm.runs(all=True)] == [run]
    broken = trnslurm.Run(damaged.path)
    assert "damaged or unreadable" in repr(broken) and "unreadable" in broken._repr_html_()
    with pytest.raises(TrnslurmError, match="damaged or unreadable"):
        broken.state  # noqa: B018


def test_texts_of_others_are_escaped(make_run) -> None:
    """A run root may be everybody's, and a notebook shows what is written there."""
    evil = "<script>alert(1)</script>"
    states = {"train": [{"state": "FAILED", "reason": evil}]}
    run = trnslurm.Run(make_run(phases=("train",), jobs={}, recipe=evil.replace("/", ""),
                                scheduler="local", states=states).path)  # fmt: skip
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in run._repr_html_()
    assert "text-align: right" not in run._repr_html_()
    for shown in (run._repr_html_(), trnslurm.runs()._repr_html_()):
        assert "<script" not in shown


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 7, "train.lr": 1e-05}, ("steps=7", "train.lr=1e-05")),
        ({"batch.allow_idle": True, "env.A": "b: 1"}, ("batch.allow_idle=true", "env.A=b: 1")),
        ({"devices": ["cpu"], "python": Path("/a b")}, ("devices=[cpu]", "python=/a b")),
        ({"env.N": 8, "train.init_from": ""}, ("env.N=8", "train.init_from=")),
        ("steps=7", ("steps=7",)),
        (["steps=7", "train.lr=1e-3"], ("steps=7", "train.lr=1e-3")),
    ],
)  # fmt: skip
def test_settings_are_those_of_the_command_line(
    site, cli, tmp_path: Path, settings: Any, words: tuple[str, ...]
) -> None:
    options = [word for each in words for word in ("--set", each)]
    where = ("--cluster", "local", "--preset", "tiny", "-o", tmp_path / "b")
    assert cli("render", "gpt2_zero1", *where, *options).code == 0
    bundle = trnslurm.render("gpt2_zero1", cluster="local", preset="tiny", settings=settings,
                             output=tmp_path / "a")  # fmt: skip
    assert not list(diff(read_bundle(tmp_path / "a"), read_bundle(tmp_path / "b")))
    assert dict(bundle.files) == dict(read_bundle(tmp_path / "a").files)
    assert repr(bundle).startswith(f"<Bundle of {len(bundle.files)} files: ")


def test_a_plan_is_that_of_the_command(site, cli) -> None:
    plan = trnslurm.plan("gpt2_zero1", nodes=range(1, 4), cluster="trn1")
    done = cli("plan", "gpt2_zero1", "--nodes", "1,2,3", "--cluster", "trn1")
    assert done.out.startswith(repr(plan) + "\n")
    rows = json.loads(cli("plan", "gpt2_zero1", "--nodes", "1", "--json").out)["plans"]
    assert plan.rows[0] == {name: value for name, value in rows[0].items() if name != "graphs"}
    assert '<td style="text-align: right">$1,365</td>' in plan._repr_html_()
    some = trnslurm.plan("gpt2_zero1", nodes=[2, 5], cluster="pc")
    assert [row["nodes"] for row in some.rows] == [2] and [*some.refused] == [5]
    assert "5 is more than slurm.max_nodes (4)" in repr(some).splitlines()[-1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: trnslurm.plan("gpt2_zero1", nodes="two"), "nodes='two': expected a whole number"),
        (lambda: trnslurm.plan("gpt2_zero1", nodes=[]), "nodes: pass at least one node count"),
        (lambda: trnslurm.plan(7), "recipe=7: expected a path or a name"),
        (lambda: trnslurm.submit("toy", nodes=0), "nodes=0: expected at least 1"),
        (lambda: trnslurm.submit("toy", nodes=True), "nodes=True: expected a whole number"),
        (lambda: trnslurm.submit("toy", nodes=2.0), "nodes=2.0: expected a whole number"),
        (lambda: trnslurm.submit("toy", preset=1), "preset=1: expected a string"),
        (lambda: trnslurm.submit("toy", settings=3), "settings=3: expected strings"),
        (lambda: trnslurm.submit("toy", settings={"steps": {1j}}), "steps={1j} is not a number"),
        (lambda: trnslurm.submit("toy", settings={3: 3}), "settings=3: expected a string"),
        (lambda: trnslurm.submit("toy", arguments=[3]), r"arguments=\[3\]: expected strings"),
        (lambda: trnslurm.submit("toy", arguments="--lr 1"), "expected a list of strings"),
        (lambda: trnslurm.submit("toy", launcher="x"), "launcher='x': expected trnslurm,"),
        (lambda: trnslurm.submit("toy", precompile="no"), "expected auto, always or never"),
        (lambda: trnslurm.submit("toy", chain=1), "chain=1: expected True or False"),
        (lambda: trnslurm.submit("toy", path="a\0b"), "path='a.x00b': expected a path or a name"),
        (lambda: trnslurm.submit(), "pass either a recipe or rendered=DIR"),
        (lambda: trnslurm.submit(rendered="x", preset="y"), "omit preset"),
        (lambda: trnslurm.submit("toy", from_run=[]), r"from_run=\[\]: expected a path or a name"),
        (lambda: trnslurm.submit("toy", time="soon", cluster="pc"), "--time soon: expected"),
        (lambda: trnslurm.Run(None), "run=None: expected a path or a name"),
        (lambda: trnslurm.Run("no_such"), "no run 'no_such' in"),
        (lambda: trnslurm.resume("last", nodes=0), "no run 'last' in"),
        (lambda: trnslurm.render("toy", force=1, output="x"), "force=1: expected True or False"),
        (lambda: trnslurm.render("toy", output="/proc/x", time=5), "cannot write /proc/x"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_errors_of_one_line(site, call: Callable[[], Any], said: str) -> None:
    site.recipe()
    with pytest.raises(TrnslurmError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_what_the_system_refuses_is_an_error_of_one_line(make_run, monkeypatch) -> None:
    run = trnslurm.Run(make_run().path)

    def refuse(_: RunDir) -> None:
        raise PermissionError(13, "Permission denied", "/a/file")

    monkeypatch.setattr(RunDir, "steps", refuse)
    with pytest.raises(TrnslurmError, match=r"^/a/file: Permission denied$"):
        run.metrics()


@pytest.mark.parametrize("number", ["1", 0, -1, True])
def test_wrong_numbers_for_a_run(make_run, number: Any) -> None:
    run = trnslurm.Run(make_run().path)
    for call in (lambda: run.logs(tail=number), lambda: run.resume(nodes=number),
                 lambda: run.export(step=number)):  # fmt: skip
        with pytest.raises(TrnslurmError, match=r"(tail|nodes|step)=.*: expected"):
            call()


EXPORT = """
import json, os, sys
print("noise"); print("warning: half of it is missing", file=sys.stderr)
if "--force" in sys.argv: sys.exit("noise\\nerror: this cannot be replaced")
print(json.dumps({"directory": os.getcwd(), "options": sys.argv[2:]}))
"""


def test_an_export_prints_nothing(make_run, capfd) -> None:
    files = make_run(scheduler="local", jobs={})
    files.config_file.write_text(yaml.safe_dump({"config": {"scheduler": "local"}}))
    job = files.code / "jobs/gpt2_zero1"
    job.mkdir(parents=True)
    (job / "export.py").write_text(EXPORT)
    run = trnslurm.Run(files.path)
    with pytest.warns(TrnslurmWarning, match="^half of it is missing$"):
        assert run.export(step="best", dtype="bfloat16") == files.path
    with pytest.raises(TrnslurmError, match=r"^this cannot be replaced$"):
        run.export(force=True)
    assert capfd.readouterr() == ("", "")
