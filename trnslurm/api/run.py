"""Run: a submitted run, with methods to watch, resume and cancel it. runs() lists runs."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from trnslurm.api.arguments import (
    PathLike,
    Paths,
    PythonConsole,
    Settings,
    file_name,
    flag,
    nodes_of,
    one_line_errors,
    one_of,
    search_path,
    settings_of,
    text,
    texts,
    whole,
)
from trnslurm.cluster.programs import export_quietly, option_words
from trnslurm.contract.states import OF_A_RUN, State
from trnslurm.errors import ConfigError, RunFailedError, TrnslurmError
from trnslurm.records.run import RunDir
from trnslurm.runs.explain import explained
from trnslurm.runs.find import find_run
from trnslurm.runs.logs import log_of, print_log
from trnslurm.runs.search import RunFilter, list_statuses, run_roots, workspace_of
from trnslurm.runs.standing import standing_of
from trnslurm.runs.status import RunStatus, run_status, statuses_of
from trnslurm.runs.tables import (
    HEADER,
    RIGHT,
    cells,
    html_table,
    parse_time,
    runs_table,
    text_table,
)
from trnslurm.runs.watch import follow
from trnslurm.submission.cancel import cancel_unless_ended
from trnslurm.submission.resume import Continuation
from trnslurm.submission.resume import resume as resume_run

_NUMBER = (int, float)
_DTYPES = ("float32", "bfloat16")


class Run:
    """A run, shown as a table in a notebook and as one line in a shell."""

    @one_line_errors
    def __init__(self, run: PathLike, *, path: Paths = ()) -> None:
        """Find a run by its name, a unique part of it, its directory, or `last`."""
        workspace = workspace_of(search_path(path))
        self._files = find_run(file_name("run", run), run_roots(workspace))
        self._path = path
        self.remarks: tuple[str, ...] = ()
        """Remarks of submit or resume, such as which defaults were chosen and why."""

    @classmethod
    def _of(cls, files: RunDir, remarks: Sequence[str] = (), path: Paths = ()) -> Run:
        run = object.__new__(cls)
        run._files, run._path, run.remarks = files, path, tuple(remarks)
        return run

    @property
    def name(self) -> str:
        """The name of the run, which is also the name of its directory."""
        return self._files.name

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self._files.path

    @property
    def jobs(self) -> dict[str, str]:
        """Phase -> Slurm job id. Empty on the local cluster."""
        return self._files.record().phase_jobs

    @property
    def state(self) -> str:
        """The current state in one word, as in `trnslurm status`. Each access queries Slurm."""
        return self.status().state

    @property
    def values(self) -> dict[str, str]:
        """The values that a sweep set for this run, or empty if it does not belong to a sweep."""
        return dict(self._files.record().values)

    @property
    def then(self) -> Run | None:
        """The next run in its chain, which starts from the result of this run."""
        then = self._files.record().then
        return Run._of(self._files.sibling(then), path=self._path) if then else None

    @one_line_errors
    def status(self) -> RunStatus:
        """Return the current state and reason, the phases, the attempts and the latest metrics."""
        return run_status(self._files, leftovers=True)

    @one_line_errors
    def wait(self, timeout: float | None = None, *, raises: bool = True) -> Run:
        """Wait until the run has ended for good, and return it. Ctrl-C ends only the wait.

        Raise a NotYetError after `timeout` seconds. If the run did not complete, raise a
        RunFailedError with the cause, unless `raises` is False.
        """
        _check_timeout(timeout)
        careful = flag("raises", raises)
        (status,) = collections.deque(follow(self._files, within_s=timeout), maxlen=1)
        if careful and status.state is not State.COMPLETED:
            raise RunFailedError(self._why(status))
        return self

    @one_line_errors
    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each step, once per step, as in `trnslurm metrics --json`."""
        return self._files.steps()

    @one_line_errors
    def logs(
        self,
        node: int = 0,
        *,
        tail: int | None = None,
        phase: str | None = None,
        batch: bool = False,
    ) -> str:
        """Return the log of a node or of the batch script, in full or only its last lines."""
        lines = None if tail is None else whole("tail", tail)
        rank = whole("node", node, least=0)
        file = log_of(
            self._files, phase=text("phase", phase), node=rank, batch=flag("batch", batch)
        )
        return b"".join(print_log(file, lines)).decode(errors="replace")

    @one_line_errors
    def export(
        self,
        *,
        step: int | str | None = None,
        output: PathLike | None = None,
        dtype: str = "float32",
        tokenizer: PathLike | None = None,
        force: bool = False,
    ) -> Path:
        """Write a checkpoint as a Hugging Face folder, and return the folder.

        The default is the newest valid checkpoint. `step` is a number or `best`.
        """
        options: dict[str, object] = {"dtype": one_of("dtype", dtype, _DTYPES)}
        options["force"] = flag("force", force)
        if step is not None:
            options["step"] = step if step == "best" else whole("step", step)
        for name, folder in (("output", output), ("tokenizer", tokenizer)):
            if folder is not None:
                options[name] = Path(file_name(name, folder)).absolute()
        return export_quietly(self._files, option_words(options), say=PythonConsole().say)

    @one_line_errors
    def resume(
        self,
        *,
        nodes: int | str | None = None,
        stop_at: int | None = None,
        settings: Settings = (),
        notify: str | Sequence[str] = (),
        force: bool = False,
        arguments: Sequence[str] = (),
    ) -> Run:
        """Resume the run from its newest checkpoint, optionally on other nodes; return at once.

        `nodes` is a number or a range such as "2-4". `settings` change what --set of
        `trnslurm resume` changes: caps, variables, and how Slurm queues the job. `force` starts a
        custom script again even if it may overwrite its unreported checkpoints. `arguments` are
        added to the script's own from then on.
        """
        how = _continuation(
            nodes, stop_at, settings, notify, self._path, force=force, arguments=arguments
        )
        console = PythonConsole(detach=True)
        resume_run(self._files, how, console)
        self.remarks = console.other_remarks
        return self

    @one_line_errors
    def cancel(self, *, now: bool = False) -> Run:
        """Cancel the run and the runs that wait for it, unless it has ended. Return at once.

        A job that is training on Slurm saves a checkpoint first, unless `now` is set.
        """
        cancel_unless_ended([self._files], now=flag("now", now))
        return self

    def _why(self, status: RunStatus) -> str:
        """Return one line that says how the run ended, and what triage found."""
        status, found = explained(self._files, status)
        said = f"{self.name} is {status.words}"
        if found:
            more = "" if found.evidence in found.fix else f"; see {found.evidence}"
            said += f"; {found.fix}{more} in {self.directory}"
        then = status.mend if found else status.next
        return said + (f"; next: {then}" if then else "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.directory == other.directory

    def __hash__(self) -> int:
        return hash(self.directory)

    def __repr__(self) -> str:
        try:
            status = self.status()
        except TrnslurmError as error:
            return f"<Run {self.name}: {error}>"
        *_, step, loss, reason = cells(status)
        about = [f"{status.state}{f' ({reason})' if reason else ''}"]
        about += [f"step {step}", f"loss {loss}"] if step != "-" else []
        return f"<Run {self.name}: {', '.join(about)}>"

    def _repr_html_(self) -> str:
        try:
            status = self.status()
        except TrnslurmError as error:
            return html_table(("", ""), [("run", self.name), ("error", str(error))])
        rows = [*zip(HEADER, cells(status), strict=True)]
        rows += [("remark", remark) for remark in self.remarks]
        rows += [("directory", status.path)]
        rows += [("next", status.next)] if status.next else []
        return html_table(("", ""), [row for row in rows if row[1] not in ("", "-")])


class Runs(Sequence[Run]):
    """Runs, newest last, shown as a table of their states when they were listed.

    The runs of a sweep are in the sweep's order, with the values of each run.
    """

    def __init__(self, statuses: Sequence[RunStatus], runs: Sequence[Run]) -> None:
        self.statuses = tuple(statuses)
        """The status of each run when it was listed, from a single query to Slurm."""
        self._runs = tuple(runs)

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Run | Runs:
        if isinstance(index, slice):
            return Runs(self.statuses[index], self._runs[index])
        return self._runs[index]

    @one_line_errors
    def best(self, *, lowest: str | None = None, highest: str | None = None) -> Run | None:
        """Return the run with the lowest (or highest) latest value of a metric.

        The default metric is the held-out loss, or else the training loss. Return None if no run
        has reported it yet.
        """
        standing = standing_of([run._files for run in self], lowest=lowest, highest=highest)
        return self[[*standing.statuses].index(standing.best)] if standing.best else None

    @one_line_errors
    def wait(self, timeout: float | None = None, *, raises: bool = True) -> Runs:
        """Wait until all runs have ended for good, and return them with their final states.

        Raise the errors of Run.wait once all runs have ended.
        """
        _check_timeout(timeout)
        careful = flag("raises", raises)
        deadline = None if timeout is None else time.monotonic() + timeout
        for run in self:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            run.wait(left, raises=False)
        self.statuses = tuple(statuses_of([run._files for run in self])[0])
        for run in self if careful else ():
            run.wait()
        return self

    @one_line_errors
    def cancel(self, *, now: bool = False) -> Runs:
        """Cancel all runs that have not ended. Return at once."""
        cancel_unless_ended([run._files for run in self], now=flag("now", now))
        return self

    def __repr__(self) -> str:
        table = runs_table(self.statuses, values=self._of_sweep())
        return "\n".join(text_table(*table, right=RIGHT)) if self else "No runs yet"

    def _repr_html_(self) -> str:
        return html_table(*runs_table(self.statuses, values=self._of_sweep()), right=RIGHT)

    def _of_sweep(self) -> bool:
        return len({status.group for status in self.statuses}) == 1


@one_line_errors
def runs(
    sweep: PathLike | None = None,
    *,
    all: bool = False,  # noqa: A002  as the option
    state: str | Sequence[str] = (),
    recipe: str | None = None,
    since: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
    path: Paths = (),
) -> Runs:
    """Return the newest 20 runs, all runs, or the runs of a sweep. Warn about damaged runs.

    The other arguments select among all runs, like the options of `trnslurm runs`.
    """
    asked = text("since", since)
    states = [each.upper() for each in texts("state", state)]
    for each in states:
        one_of("state", each, OF_A_RUN)
    chosen = RunFilter(
        sweep=None if sweep is None else file_name("sweep", sweep),
        everything=flag("all", all),
        states=tuple(states),
        recipe=text("recipe", recipe),
        since="" if asked is None else parse_time(asked, "since"),
        sort=text("sort", sort),
        limit=None if limit is None else whole("limit", limit),
    )
    statuses, broken = list_statuses(workspace_of(search_path(path)), chosen)
    console = PythonConsole()
    for error in broken:
        console.warn(str(error))
    return Runs(statuses, [Run._of(RunDir(Path(s.path)), path=path) for s in statuses])


@one_line_errors
def resume(
    run: Run | PathLike,
    *,
    nodes: int | str | None = None,
    stop_at: int | None = None,
    settings: Settings = (),
    cluster: str | None = None,
    notify: str | Sequence[str] = (),
    force: bool = False,
    arguments: Sequence[str] = (),
    path: Paths = (),
) -> Run:
    """Resume a run from its newest checkpoint, optionally on other nodes; return at once.

    `nodes` is a number or a range such as "2-4". `settings` change what --set of `trnslurm resume`
    changes: caps, variables, and how Slurm queues the job. `force` starts a custom script again
    even if it may overwrite checkpoints that it has not reported. `arguments` are added to the
    script's own from then on.
    "s3://BUCKET/PREFIX/RUN" starts a new run on a `cluster`, with any settings.
    """
    if isinstance(run, str) and run.startswith("s3://"):
        from trnslurm.submission.moved import propose_moved  # few need these
        from trnslurm.submission.submit import submit

        console = PythonConsole(detach=True)
        if arguments:
            raise ConfigError("arguments can only be passed to a run that continues in place")
        how = _continuation(nodes, stop_at, settings, notify, path)
        name = None if cluster is None else text("cluster", cluster)
        submission = propose_moved(run, how, name, workspace_of(search_path(path)), console)
        (started, *_), _ = submit(submission, ["python", f"trnslurm.resume({run!r})"], console)
        return Run._of(started, console.other_remarks, path)
    if cluster is not None:
        raise ConfigError("cluster works only with a run in S3: other runs continue in place")
    return _run(run, path).resume(
        nodes=nodes,
        stop_at=stop_at,
        settings=settings,
        notify=notify,
        force=force,
        arguments=arguments,
    )


@one_line_errors
def cancel(run: Run | PathLike, *, now: bool = False, path: Paths = ()) -> Run:
    """Cancel a run and the runs that wait for it, unless it has ended. Return at once.

    A job that is training on Slurm saves a checkpoint first, unless `now` is set.
    """
    return _run(run, path).cancel(now=now)


def _continuation(
    nodes: int | str | None,
    stop_at: int | None,
    settings: Settings,
    notify: str | Sequence[str],
    path: Paths,
    *,
    force: bool = False,
    arguments: Sequence[str] = (),
) -> Continuation:
    """Return what changes when a run continues."""
    return Continuation(
        force=flag("force", force),
        **({} if nodes is None else nodes_of(nodes)),
        stop_at=None if stop_at is None else whole("stop_at", stop_at, least=0),
        settings=settings_of(settings),
        notify=texts("notify", notify),
        arguments=texts("arguments", arguments, one_word=False),
        template_dirs=workspace_of(search_path(path)).template_dirs(),
    )


def _check_timeout(timeout: object) -> None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, _NUMBER)):
        raise ConfigError(f"timeout={timeout!r}: expected a number of seconds")


def _run(run: Run | PathLike, path: Paths) -> Run:
    return run if isinstance(run, Run) else Run(run, path=path)
