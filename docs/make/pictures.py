"""Make the pictures of the pages, docs/pictures/: run the commands, and record what they show.

    python docs/make/pictures.py [PICTURE...]

Terminals are those of tmux, written as SVG by rich; figures are those of `trnslurm report --png`;
the page is as Chromium shows it. Trainings run here and in a sandbox, in a home of their own.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import diagrams
from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures"
BOUND_S = 300
_PROMPT = "$ "
_THEME = TerminalTheme(
    (22, 24, 29), (214, 218, 224),
    [(22, 24, 29), (235, 110, 110), (110, 205, 130), (226, 190, 100),
     (110, 160, 245), (205, 140, 230), (95, 200, 215), (214, 218, 224)],
)  # fmt: skip
# rich's own loads a font from a CDN; any will do, as each piece of text says how long it is.
_SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas,
"DejaVu Sans Mono", monospace; white-space: pre; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Machine:
    """A user's machine with a home of its own, a sandbox, and the runs that pictures are of."""

    def __init__(self, home: Path) -> None:
        self.home = home
        own = ("SLURM_", "SBATCH_", "TRNSLURM_", "XDG_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        self.environ = kept | {
            "HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
            "LC_ALL": "C.UTF-8", "TERM": "xterm-256color",
            "TRNSLURM_SANDBOXES": str(home / "sandboxes"), "TRNSLURM_CLUSTER": "local",
        }  # fmt: skip
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            self.environ.pop(name, None)

    def run(self, command: str) -> str:
        """Run a shell command, which must succeed, and return what it printed."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.home, env=self.environ, text=True, check=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        return done.stdout

    def newest(self) -> Path:
        """Return the directory of the newest run."""
        return max((self.home / "trnslurm-runs").iterdir())

    def until_step(self, step: int, run: str = "") -> None:
        """Wait until a run has done a step, by default the newest one."""
        metrics = (self.home / "trnslurm-runs" / run if run else self.newest()) / "metrics.jsonl"
        until(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text())


class Terminal:
    """A terminal of tmux with a shell in it."""

    def __init__(self, machine: Machine, columns: int, rows: int) -> None:
        self.machine, self.columns = machine, columns
        size = f"-x {columns} -y {rows}"
        self._tmux = f"tmux -S {machine.home}/t -f /dev/null"
        machine.run(f"{self._tmux} new-session -d {size} env PS1='{_PROMPT}' bash --norc")
        self.wait(lambda shown: shown.rstrip() == _PROMPT.rstrip())

    def type(self, words: str) -> None:
        """Type a line."""
        self.machine.run(f"{self._tmux} send-keys -l {shlex.quote(words)}")
        self.press("Enter")

    def press(self, key: str) -> None:
        """Press a key."""
        self.machine.run(f"{self._tmux} send-keys {key}")

    def shown(self, how: str = "") -> str:
        """Return what it shows."""
        return self.machine.run(f"{self._tmux} capture-pane -p {how}")

    def wait(self, seen: Callable[[str], bool]) -> None:
        """Wait until it shows something."""
        until(lambda: seen(self.shown()))

    def enter(self, command: str) -> None:
        """Type a command, and wait until it has ended."""
        self.type(command)
        end = f"\n{_PROMPT.rstrip()}"
        self.wait(lambda shown: shown.rstrip().endswith(end))

    def picture(self, name: str, title: str) -> None:
        """Write what it shows, without the empty prompt at its end."""
        lines = (
            self.shown("-e -N").rstrip().replace(str(self.machine.home), "/home/ada").split("\n")
        )
        while Text.from_ansi(lines[-1]).plain.strip() in ("", _PROMPT.strip()):
            lines.pop()
        with Path(os.devnull).open("w") as nowhere:
            console = Console(
                record=True, width=self.columns, file=nowhere, force_terminal=True,
                color_system="truecolor", legacy_windows=False,
            )  # fmt: skip
            for line in [*lines, ""]:  # a letter reaches below the last line
                console.print(Text.from_ansi(line), no_wrap=True, crop=True)
        console.save_svg(
            str(PICTURES / name), title=title, theme=_THEME, code_format=_SVG, unique_id=name[:-4]
        )

    def close(self) -> None:
        """End it."""
        self.machine.run(f"{self._tmux} kill-server")


def until(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + BOUND_S
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"not so after {BOUND_S} s")
        time.sleep(0.1)


def plan(machine: Machine) -> None:
    """Record a plan."""
    terminal = Terminal(machine, 108, 60)
    terminal.enter("trnslurm plan gpt2_zero1 --cluster trn1 --nodes 1,2,4,8")
    terminal.picture("plan.svg", "plan")
    terminal.close()


def submit(machine: Machine) -> None:
    """Record a submit that follows its run, and the report of that run."""
    terminal = Terminal(machine, 100, 40)
    terminal.enter("trnslurm submit gpt2_zero1 --nodes 2 --set steps=300")
    terminal.picture("submit.svg", "submit")
    terminal.close()
    figures(machine, "last", "plain", "loss", "step-time")


def status(machine: Machine) -> None:
    """Record what status says of a run whose worker was killed."""
    machine.run("trnslurm submit gpt2_zero1 --nodes 2 --set steps=2000 --set device=cpu --detach")
    machine.until_step(20)
    kill(machine.newest(), b"train.py")
    machine.run("trnslurm watch last || true")
    terminal = Terminal(machine, 120, 40)
    terminal.enter("trnslurm status last")
    terminal.picture("status.svg", "status")
    terminal.close()


def faults(machine: Machine) -> None:
    """Record the report of a run: it loses a node, and is resumed on another number."""
    machine.run("trnslurm sandbox up -q --set SlurmdTimeout=10 --set KillWait=5 "
                "--set AuthInfo=cred_expire=5")  # fmt: skip
    local, machine.environ["TRNSLURM_CLUSTER"] = machine.environ["TRNSLURM_CLUSTER"], "sandbox"
    machine.run("trnslurm submit gpt2_zero1 --nodes 2 --set steps=600 --set device=cpu "
                "--set train.save_every=50")  # fmt: skip
    machine.until_step(180)
    machine.run("trnslurm sandbox fault 2 power-off")
    machine.until_step(400)
    machine.run("trnslurm cancel last; trnslurm watch last || true; trnslurm resume last --nodes 1")
    machine.run("trnslurm watch last; trnslurm sandbox down")
    machine.environ["TRNSLURM_CLUSTER"] = local
    figures(machine, "last", "killed", "loss", "timeline")
    screenshot(machine, machine.home / "killed.html", "report.png")


def sweep(machine: Machine) -> None:
    """Record top while the third run of a sweep trains, and the report of the sweep."""
    machine.run("trnslurm submit gpt2_zero1 --set steps=200 --set device=cpu --detach "
                "--sweep train.lr=1e-3,5e-3 --sweep seed=1,2")  # fmt: skip
    name = machine.newest().name.rpartition("-")[0]
    machine.until_step(40, f"{name}-3")
    top(machine, "top-list.svg", 90, 14)
    top(machine, "top-run.svg", 100, 34, f"{name}-3")
    machine.run(f"trnslurm watch {name}-4")
    figures(machine, name, "sweep", "loss")


def roles(machine: Machine) -> None:
    """Record the timeline of a run with servers of which one was killed."""
    machine.run("trnslurm new grpo --example grpo")
    machine.run(
        "cd grpo && trnslurm submit ./train.py --nodes 2 --name grpo --detach "
        "--set 'roles.rollout.command=[python, serve.py, \"{port}\", sample]' "
        "--set roles.rollout.nodes=2 "
        "--set 'roles.reward.command=[python, serve.py, \"{port}\", reward]' -- "
        "--rollout {rollout.urls} --reward {reward.url} --out {checkpoints} --resume {resume} "
        "--steps 400"
    )
    machine.until_step(150)
    kill(machine.newest() / "work", b"sample")
    machine.run("trnslurm watch last")
    figures(machine, "last", "roles", "timeline")


def on_slurm(machine: Machine) -> None:
    """Record the jobs that evaluate each checkpoint of a run, and a pipeline that has changed."""
    machine.run("trnslurm sandbox up -q")
    local, machine.environ["TRNSLURM_CLUSTER"] = machine.environ["TRNSLURM_CLUSTER"], "sandbox"
    machine.run("trnslurm new line --example pipeline; cd line; mkdir ~/data; "
                "python prepare.py ~/data")  # fmt: skip
    followers(machine, "--time 10 --set devices=[cpu] --set workers_per_node=1")
    pipeline(machine, "--set devices=[cpu] --set workers_per_node=1")
    machine.run("trnslurm sandbox down")
    machine.environ["TRNSLURM_CLUSTER"] = local


def followers(machine: Machine, options: str) -> None:
    """Record what status says of the jobs for each checkpoint."""
    machine.run(f"cd line && trnslurm submit ./train.py {options} --name line -- "
                "~/data {checkpoints} --resume {resume}")  # fmt: skip
    run = machine.newest()
    machine.run(f"cd line && trnslurm submit ./evaluate.py {options} --name eval --at-most 2 "
                "--each-checkpoint-of last --highest accuracy -- ~/data {checkpoint}")  # fmt: skip
    until(lambda: len(completed(run.parent, f"{run.name}.eval-*")) == 3)
    terminal = Terminal(machine, 120, 40)
    terminal.enter("trnslurm status last")
    terminal.enter(f"trnslurm status {run.name}.eval")
    terminal.picture("follow.svg", "status")
    terminal.close()


def pipeline(machine: Machine, options: str) -> None:
    """Record what a pipeline does again after a change."""
    machine.run(f"sed -i 's|: \\./[a-z.]*|& {options}|' line/pipeline.yaml")
    machine.run("cd line && trnslurm submit pipeline.yaml --name nightly")
    runs = machine.home / "trnslurm-runs"
    until(lambda: len(completed(runs, "*-nightly-*")) == 5)
    terminal = Terminal(machine, 120, 40)
    terminal.type("cd line && clear")
    terminal.wait(lambda shown: shown.rstrip() == _PROMPT.rstrip())
    terminal.enter("echo '# changed' >> evaluate.py")
    terminal.enter("trnslurm plan pipeline.yaml --name nightly")
    machine.run("cd line && trnslurm submit pipeline.yaml --name nightly")
    until(lambda: len(completed(runs, "*-nightly-*")) == 7)
    terminal.enter(f"trnslurm status {machine.newest().name.rpartition('-')[0]}")
    terminal.picture("pipelines.svg", "a pipeline")
    terminal.close()


def completed(runs: Path, names: str) -> list[Path]:
    """Return the states of those runs that have completed."""
    found = runs.glob(f"{names}/state/train-*.json")
    return [file for file in found if '"COMPLETED"' in file.read_text()]


def drawings(_machine: Machine) -> None:
    """Draw the diagrams, which show no program."""
    diagrams.main()


def kill(directory: Path, word: bytes) -> None:
    """Kill a process that runs in a directory and has an argument that ends with a word."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_bytes().strip(b"\0").split(b"\0")
            inside = (process / "cwd").readlink() == directory
        except OSError:
            continue
        if inside and b"python" in argv[0] and any(each.endswith(word) for each in argv[1:4]):
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise SystemExit(f"no process {word!r} in {directory}")


def top(machine: Machine, name: str, columns: int, rows: int, run: str = "") -> None:
    """Record top: the list of runs, or one run."""
    terminal = Terminal(machine, columns, rows)
    terminal.type(f"exec trnslurm top {run}")
    if run:
        terminal.wait(lambda shown: "▁" in shown and "grad_norm" in shown)  # its log, too
    else:
        terminal.wait(lambda shown: " active, at " in shown and "-gpt2_zero1" in shown)
    terminal.picture(name, "top")
    terminal.close()


def figures(machine: Machine, run: str, name: str, *which: str) -> None:
    """Write figures of a report."""
    machine.run(f"trnslurm report {run} -o {name}.html --png")
    for figure in which:
        lighten(machine.home / f"{name}-{figure}.png", PICTURES / f"{name}-{figure}.png")


def screenshot(machine: Machine, page: Path, name: str) -> None:
    """Write what a browser shows of a page."""
    machine.run(
        "chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage "
        f"--window-size=1100,1760 --user-data-dir={machine.home}/chromium "
        f"--screenshot={machine.home}/page.png {page.as_uri()} 2> /dev/null"
    )
    lighten(machine.home / "page.png", PICTURES / name)


def lighten(picture: Path, file: Path) -> None:
    """Write a picture with 200 colours: the repository stays small."""
    with Image.open(picture) as found:
        found.convert("RGB").quantize(200, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)


MADE = {
    plan: ("plan.svg",),
    submit: ("submit.svg", "plain-loss.png", "plain-step-time.png"),
    status: ("status.svg",),
    faults: ("killed-loss.png", "killed-timeline.png", "report.png"),
    sweep: ("sweep-loss.png", "top-list.svg", "top-run.svg"),
    roles: ("roles-timeline.png",),
    on_slurm: ("follow.svg", "pipelines.svg"),
    drawings: ("submit-path.svg", "parts-of-a-run.svg", "states.svg"),
}  # fmt: skip


def main(names: list[str]) -> None:
    """Make these pictures, or all."""
    machine = Machine(Path(tempfile.mkdtemp(dir="/tmp", prefix="tp-")))  # short: sockets lie below
    try:
        for make, made in MADE.items():
            if not names or {*names} & {*made}:
                make(machine)
                print("\n".join(f"Wrote docs/pictures/{name}" for name in made), flush=True)
    finally:
        machine.run("tmux -S ~/t kill-server 2> /dev/null || true")
        machine.run("trnslurm sandbox down --all > /dev/null || true")
        shutil.rmtree(machine.home)


if __name__ == "__main__":
    main(sys.argv[1:])
