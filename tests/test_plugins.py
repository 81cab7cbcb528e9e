"""Plug-ins: the package of docs/plugins.md in a real run, and packages that are broken."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import trnslurm
from trnslurm.config import plugins
from trnslurm.config.command import read_command
from trnslurm.contract.files import write_json
from trnslurm.errors import TrnslurmError
from trnslurm.node.triage.diagnosis import diagnose
from trnslurm.render.site_causes import site_causes

from .processes import run_process

ROOT = Path(trnslurm.__file__).parents[1]
PAGE = ROOT / "docs/plugins.md"


def quoted(name: str) -> str:
    """Return a file that the page quotes."""
    found = re.search(
        rf"^    \$ cat {name}\n((?:    .*\n|\n)+?)(?=    \$ )", PAGE.read_text(), re.MULTILINE
    )
    assert found
    return textwrap.dedent(found[1])


def install(place: Path, name: str, points: dict[str, dict[str, str]], **modules: str) -> None:
    """Write what pip writes of a package of modules."""
    about = place / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, named in points.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in named.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, text in modules.items():
        (place / f"{module}.py").write_text(text)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of installed packages, on this process's path."""
    place = tmp_path / "packages"
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    yield place
    for name in [
        n for n, m in sys.modules.items() if str(place) in str(getattr(m, "__file__", ""))
    ]:
        del sys.modules[name]


@pytest.fixture
def acme(packages: Path) -> Path:
    """The package of the page."""
    points = tomllib.loads(quoted("pyproject.toml"))["project"]["entry-points"]
    install(packages, "acme-trnslurm", points, acme_trnslurm=quoted("acme_trnslurm.py"))
    return packages


def test_the_package_of_the_page_in_a_run(acme: Path, site, run_cli, cli, tmp_path: Path) -> None:
    """Rendering needs it. Submitting, the node's programs and triage work from the copy."""
    site.here(
        '[ "$TRNSLURM_PHASE" != train ] || echo "acme: no license from lic-2.acme" >&2\nexit 1'
    )
    profile = site.root / "cluster-config/here.yaml"
    profile.write_text(f"{profile.read_text()}causes: [acme]\n")
    Path("train.py").touch()
    notify = f"plugin:logbook:{tmp_path / 'log book'}"
    alone, both = {"PYTHONPATH": str(ROOT)}, {"PYTHONPATH": f"{ROOT}:{acme}"}
    done = run_cli(
        *("render", "--cluster", "here", "--nodes", "1", "--notify", notify, "-o", "bundle"),
        *("--", "acme-train", "train.py", "--lr", "3"),
        environ=both,
    )
    assert done.code == 0
    assert (
        "Reading it as torchrun --nproc_per_node=2 train.py --lr 3 (launcher acme-train of "
        "acme-trnslurm 1.0)\nUsing --workers 2, from the command\n"
    ) in done.err
    done = run_cli("submit", "--rendered", "bundle", environ=alone)
    assert done.code == 1
    run = site.run()
    cause = "the license server lic-2.acme has no seat left"
    assert f"{run.name}: FAILED (local-0: {cause})" in done.out
    assert f"FAILED on 1 node of here: local-0: {cause}" in (tmp_path / "log book").read_text()
    found = json.loads(run_cli("triage", run.path, "--json", environ=alone).ok)
    assert (found["name"], found["mend"]) == ("acme/no-license", "resume")

    steps = [{"attempt": 1, "step": s, "steps": 9, "loss": s / 2, "time": 1.0} for s in (1, 2)]
    run.metrics_file.write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    sent = cli("metrics", "last", "--to", "csv", "--project", tmp_path)
    assert sent.out == f"{run.name}: steps 1 to 2 sent to {tmp_path}/{run.name}.csv\n"
    assert Path(f"{tmp_path}/{run.name}.csv").read_text().split() == ["1,0.5", "2,1.0"]
    assert "no new step" in cli("metrics", "last", "--to", "csv", "--project", tmp_path).out
    lines = cli("--version", "--verbose").out.splitlines()
    listed = [line for line in lines if line.startswith("plug-in: ")]
    assert listed == re.findall(r"^    (plug-in: .*)$", PAGE.read_text(), re.MULTILINE)
    listed = json.loads(cli("--version", "--verbose", "--json").out)["plugins"]
    assert {each["package"] for each in listed} == {"acme-trnslurm"}


def test_built_in_names_go_first_and_search_nothing(packages, cli, make_run, monkeypatch) -> None:
    points = {
        "trnslurm.trackers": {"wandb": "lost:X"},
        "trnslurm.launchers": {"torchrun": "lost:X"},
    }
    install(packages, "rival", points)
    said = cli("--version", "--verbose").out
    hidden = ", unused: the built-in one of this name takes precedence"
    assert f"plug-in: launcher torchrun of rival 1.0{hidden}\n" in said
    assert f"plug-in: tracker wandb of rival 1.0{hidden}\n" in said
    monkeypatch.setattr(plugins, "all_plugins", None)  # a search would be an error
    for words in ("torchrun x.py", "python x.py", "uv run trl sft", "trl env", "./here", "/bin/x"):
        assert read_command(words.split())
    monkeypatch.setenv("WANDB_MODE", "offline")
    make_run(name="20260101-000000-gpt")
    assert cli("metrics", "last", "--to", "wandb").code == 0


BROKEN = """
import sys
text = "no table"
def raises(*given): raise ValueError("two\\nlines")
def ends(*given): sys.exit(3)
def nothing(*given): return None
def loops(words): return words[:1] + words
def refused(words): return ["srun", "--multi-prog", "x"]
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("metrics last --to none",
         "--to none: no such tracker; known: wandb, mlflow, ends (from broken), lost ("),
        ("metrics last --to lost",
         "tracker lost of broken 1.0: ModuleNotFoundError: No module named 'lost'"),
        ("metrics last --to raises", "tracker raises of broken 1.0: ValueError: two"),
        ("metrics last --to ends", "tracker ends of broken 1.0: SystemExit: 3"),
        ("metrics last --to nothing", "tracker nothing of broken 1.0: AttributeError: 'NoneType' "
         "object has no attribute 'last'"),
        ("metrics last --to twice", "tracker twice is in two packages, broken and other: "),
        ("plan -c pc -- raises x.py", "launcher raises of broken 1.0: ValueError: two"),
        ("plan -c pc -- nothing", "launcher nothing of broken 1.0: TypeError"),
        ("plan -c pc -- refused", "launcher refused of broken 1.0: srun: --multi-prog "),
        ("render toy -c pc --set notify.plugin=webhook", "notify.plugin is webhook, which is "),
        ("render toy -c pc --notify plugin:none", "notify.plugin none: no such notifier; known: "),
        ("render toy -c pc --notify plugin:far", "notifier far of broken 1.0: a run cannot copy"),
        ("render toy -c pc --notify plugin:a://b", "notify.plugin: a URL would end up in the"),
        ("render toy -c pc --set causes=[bad]", "causes bad of broken 1.0: not valid TOML: "),
        ("render toy -c pc --set causes=[../bad]", "causes ../bad: no such causes (did you mean"),
    ],
)  # fmt: skip
def test_a_broken_one_is_one_line_that_names_its_package(
    packages, site, cli, make_run, words: str, said: str
) -> None:
    named = ("raises", "ends", "nothing")
    points = {
        "trnslurm.trackers": {n: f"broken:{n}" for n in (*named, "twice")} | {"lost": "lost:X"},
        "trnslurm.launchers": {n: f"broken:{n}" for n in (*named, "loops", "refused")},
        "trnslurm.notifiers": {"far": "lost:X"},
        "trnslurm.causes": {"bad": "broken:text"},
    }
    install(packages, "broken", points, broken=BROKEN)
    install(packages, "other", {"trnslurm.trackers": {"twice": "broken:ends"}})
    (packages / "odd-1.0.dist-info").mkdir()
    (packages / "odd-1.0.dist-info/entry_points.txt").write_text("[trnslurm.trackers]\nx")
    site.recipe()
    make_run(name="20260101-000000-gpt")
    done = cli(*words.split())
    assert done.code == 1 and done.error.startswith(said)
    assert done.err.count("\n") == 1


GOOD = {"name": "a", "pattern": "acme: lost", "example": "acme: lost", "cause": "c", "fix": "f"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fix": ""}, "it has no fix"),
        ({"log": "x"}, "unknown key log"),
        ({"cause": "two\nlines"}, "its values must be one-line strings"),
        ({"near": "x"}, "its values must be one-line strings"),
        ({"kind": "general"}, "kind must be one of cause, effect, harmless"),
        ({"wide": "yes"}, "wide must be true or false"),
        ({"fix": "x" * 181}, "fix is longer than 180 characters"),
        ({"pattern": "acme: (lost"}, "its pattern is not a valid Python pattern: missing )"),
        ({"pattern": r"acme: (\w+ )*lost"}, "its pattern nests repeats or alternatives"),
        ({"pattern": "acme: (aa|ab?)+lost"}, "its pattern nests repeats or alternatives"),
        ({"pattern": r"acme.*a.*m.*e.*: .*lost"}, "its pattern is slow on lines like 'acme"),
        ({"pattern": r"\w+ \d"}, "its pattern must contain at least three fixed characters"),
        ({"example": "acme: found"}, "its pattern does not match its example"),
        ({"near": ["acme: lost and found"]}, "its pattern also matches a line in near: acme: lost"),
        ({}, ""),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_cause_is_said_before_a_run_has_it(
    packages, changed: dict[str, object], said: str
) -> None:
    entry = "\n".join(f"{key} = {json.dumps(value)}" for key, value in (GOOD | changed).items())
    text = f"[[cause]]\n{entry}\n"
    install(packages, "broken", {"trnslurm.causes": {"b": "broken:C"}}, broken=f"C = {text!r}\n")
    file = packages / "b.toml"
    file.write_text(text)
    for name, where in (("b", "causes b of broken 1.0"), (str(file), str(file))):
        if not said:
            (entry,) = json.loads(site_causes(name)[1])["cause"]
            assert entry == GOOD | changed | {"words": ["acme: lost"]}
            continue
        with pytest.raises(TrnslurmError) as refused:
            site_causes(name)
        assert re.sub("cause (b/)?a: ", "", str(refused.value)).startswith(f"{where}: {said}")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("b.toml", "", "causes b.toml: a file must be given by its full path, starting"),
        ("{}/no.toml", "", "{}/no.toml: no such file"),
        (
            "{}/b c.toml",
            "",
            "causes {}/b c.toml: a file name may contain only letters,",
        ),
        ("{}/b.toml", "[cause", "{}/b.toml: not valid TOML: "),
        ("{}/b.toml", "cause = 3", "{}/b.toml: expected a table with [[cause]] entries"),
    ],
)
def test_a_file_of_causes_that_cannot_be_read(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / "b.toml").write_text(text)
    with pytest.raises(TrnslurmError) as refused:
        site_causes(name.format(tmp_path))
    assert str(refused.value).startswith(says.format(tmp_path))


def test_a_run_with_a_damaged_table_is_diagnosed_all_the_same(
    make_run, capsys, monkeypatch
) -> None:
    run = make_run(states={"train": [{"state": "FAILED"}]}, phases=("train",))
    run.node_log("train", 1, 0).write_text("ValueError: x\nacme: lost\n")
    run.causes.mkdir(parents=True)
    (run.causes / "good.json").write_text(json.dumps({"cause": [GOOD]}))
    for name, text in (("cut", '{"cause": [{'), ("other", '{"cause": [{"name": "x"}]}')):
        (run.causes / f"{name}.json").write_text(text)
    found = diagnose(run.path, "train", 1)
    assert found and found.name == "good/a"
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("(")[0] for line in said] == [
        "triage: the site's causes cut: not read ",
        "triage: the site's causes other: not read ",
    ]
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)  # their patterns may never end
    found = diagnose(run.path, "train", 1)
    assert found and found.name == ""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 'sent'", "sent"),
        ("return None", "done"),
        ("raise RuntimeError('no room')", "not sent by acme 1.0 (RuntimeError: no room)"),
        ("raise ValueError('https://x/secret')", "not sent by acme 1.0 (ValueError)"),
        ("sys.exit('https://x/secret')", "not sent by acme 1.0 (SystemExit)"),
        ("import nowhere", "not sent by acme 1.0 (ModuleNotFoundError: No module named 'nowhere')"),
        ("threading.Event().wait()", "did not finish within 1 s"),
        (None, "the run has no code for this plug-in in code/plug-ins/notifiers/x"),
    ],
)
def test_a_notifier_on_a_node(tmp_path: Path, body: str | None, said: str) -> None:
    """Its errors are lines of the log, whatever it does, and it delays nothing."""
    place = tmp_path / "code/plug-ins/notifiers/x"
    place.mkdir(parents=True)
    if body is not None:
        write_json(place / "plug-in.json", {"entry": "acme:send", "package": "acme 1.0"})
        checks = "assert (target, limit_s, message['event']) == ('a:b', 1.0, 'end')"
        send = f"def send(target, message, limit_s):\n    {checks}\n    {body}\n"
        (place / "acme.py").write_text(f"import sys, threading\n{send}")
    write_json(tmp_path / "notify.json", {"plugin": "x:a:b", "events": ["end"]})
    done = run_process(
        [sys.executable, "-m", "trnslurm.node.notify", "1"],
        cwd=tmp_path,
        feed='{"event": "end"}',
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.err == f"notify: end: x: {said}\n"
    assert done.code == (0 if said in ("sent", "done") else 1)
