"""The live view, drawn by Textual: a list of runs, a single run, and its log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.drivers.linux_driver import LinuxDriver
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Label, ProgressBar, Sparkline, Static

from trnslurm.contract.states import State
from trnslurm.errors import TrnslurmError
from trnslurm.records.run import RunDir
from trnslurm.runs.status import RunStatus
from trnslurm.top.look import HEADER, View, log_lines, row_of, view_of

_MOST_LOG_LINES = 1000
_WIDE = 110
_LEFT_OUT = ("nodes", "speed")  # in a narrow terminal, for the reason
_COLOURS = {
    State.COMPLETED: "green",
    State.RUNNING: "cyan",
    State.PRECOMPILING: "cyan",
    State.FAILED: "red",
    State.LOST: "red",
    State.NODE_FAIL: "red",
    State.TIMEOUT: "red",
}

List = Callable[[], Sequence[RunStatus]]
Act = Callable[[RunDir], str]
"""Does something with a run, and returns a message about the result."""


class _Terminal(LinuxDriver):
    """Textual's terminal, except that it ignores keys that are not UTF-8, which would end 8.2.8."""

    def run_input_thread(self) -> None:
        while True:
            try:
                return super().run_input_thread()
            except UnicodeDecodeError:
                continue


class Top(App[None]):
    """The live view of all runs."""

    TITLE = "trnslurm top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; text-style: bold; }
    #title { height: auto; max-height: 5; text-style: bold; }
    #facts { height: auto; max-height: 60%; }
    #curve { height: 3; }
    #scale { height: 1; color: $foreground 60%; }
    #progress { width: 100%; height: 1; }
    #progress Bar { width: 1fr; }
    #log { height: 1fr; border-top: solid $foreground 30%; }
    DataTable { scrollbar-size-horizontal: 0; }
    Confirm { align: center middle; }
    Confirm Label { width: auto; max-width: 76; padding: 1 2; border: solid $foreground; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit", priority=True)]

    def __init__(
        self, listed: List, *, every_s: float, acts: Mapping[str, Act], first: RunDir | None
    ) -> None:
        super().__init__(driver_class=_Terminal)
        self.listed, self.every_s, self.acts, self._first = listed, every_s, acts, first

    def on_mount(self) -> None:
        self.push_screen(RunsScreen())
        if self._first is not None:
            self.push_screen(RunScreen(self._first))

    @work(thread=True, exclusive=True, group="act")
    def do(self, what: str, run: RunDir) -> None:
        """Cancel, resume or report a run, and show the result."""
        try:
            said = self.acts[what](run)
        except (TrnslurmError, OSError) as error:
            self.call_from_thread(self.notify, str(error), severity="error", timeout=15)
        else:
            self.call_from_thread(self.notify, said, timeout=10)


class _LiveScreen(Screen[None]):
    """A screen that is refreshed every few seconds in a thread, because Slurm may be slow.

    It shows one run, or a list from which one is chosen.
    """

    def __init__(self, run: RunDir | None = None) -> None:
        super().__init__()
        self._run = run

    def on_mount(self) -> None:
        assert isinstance(self.app, Top)
        self.set_interval(self.app.every_s, self.look_if_shown)

    def on_screen_resume(self) -> None:
        self.look()

    def look_if_shown(self) -> None:
        """Refresh, unless another screen covers this one."""
        if self.is_current:
            self.look()

    @work(thread=True, exclusive=True)
    def look(self) -> None:
        """Get new data and show them."""
        try:
            found = self.ask()
        except (TrnslurmError, OSError) as error:
            self.app.call_from_thread(self.refused, str(error))
        else:
            self.app.call_from_thread(self.tell, found)

    def ask(self) -> Any:
        """Return new data; this may take a while."""
        raise NotImplementedError

    def tell(self, found: Any) -> None:
        """Show the data."""
        raise NotImplementedError

    def refused(self, why: str) -> None:
        """Show in the first line why there are no new data."""
        self.query(Static).first().update(Text(why))

    def chosen(self) -> RunDir | None:
        """Return the run that the keys act on."""
        return self._run

    def _ask(self, what: str, question: str) -> None:
        run, app = self.chosen(), self.app
        assert isinstance(app, Top)
        if run is None:
            return

        def answer(yes: bool | None) -> None:
            if yes:
                app.do(what, run)

        app.push_screen(Confirm(question.format(run.name)), answer)

    def action_cancel(self) -> None:
        self._ask("cancel", "Cancel {}? If it is training on Slurm, it saves a checkpoint first.")

    def action_resume(self) -> None:
        self._ask("resume", "Resume {} from its newest checkpoint?")

    def action_report(self) -> None:
        run, app = self.chosen(), self.app
        assert isinstance(app, Top)
        if run is not None:
            app.do("report", run)

    def action_logs(self) -> None:
        if (run := self.chosen()) is not None:
            self.app.push_screen(LogScreen(run))


_ACTIONS: list[BindingType] = [
    ("l", "logs", "Log"),
    ("c", "cancel", "Cancel"),
    ("r", "resume", "Resume"),
    ("p", "report", "Report page"),
]


class RunsScreen(_LiveScreen):
    """The list of runs."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "Open"), *_ACTIONS]

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static(id="head")
        yield DataTable(cursor_type="row", zebra_stripes=False)
        yield Footer()

    def on_mount(self) -> None:
        """Create the table."""
        narrow = self.app.size.width < _WIDE
        self._columns = [n for n, name in enumerate(HEADER) if not (narrow and name in _LEFT_OUT)]
        self.query_one(DataTable).add_columns(*(HEADER[n] for n in self._columns))
        self._paths: list[str] = []
        super().on_mount()

    def ask(self) -> Sequence[RunStatus]:
        """Return the status of all runs."""
        assert isinstance(self.app, Top)
        return self.app.listed()

    def tell(self, found: Sequence[RunStatus]) -> None:
        """Fill the table, keeping the cursor on its run."""
        table = self.query_one(DataTable)
        under = self._paths[table.cursor_row] if self._paths else ""
        newest_first = [*found][::-1]
        table.clear()
        for status in newest_first:
            cells = [Text(cell) for cell in row_of(status)]
            cells[1].stylize(_COLOURS.get(status.state, ""))
            table.add_row(*(cells[n] for n in self._columns))
        self._paths = [status.path for status in newest_first]
        if under in self._paths:
            table.move_cursor(row=self._paths.index(under))
        alive = sum(not status.final for status in found)
        runs = "1 run" if len(found) == 1 else f"{len(found)} runs"
        clock = time.strftime("%H:%M:%S")
        self.query_one("#head", Static).update(
            f"trnslurm: {runs}, {alive} active, at {clock}; press Enter to open one"
        )

    def chosen(self) -> RunDir | None:
        """Return the run under the cursor."""
        row = self.query_one(DataTable).cursor_row
        return RunDir(Path(self._paths[row])) if row < len(self._paths) else None

    def on_data_table_row_selected(self) -> None:
        """Show the run on which Enter was pressed."""
        if (run := self.chosen()) is not None:
            self.app.push_screen(RunScreen(run))


class RunScreen(_LiveScreen):
    """One run: its progress, its loss and the end of its log."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,left", "app.pop_screen", "Back", key_display="esc"),
        *_ACTIONS,
    ]

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static(id="title")
        yield ProgressBar(id="progress", total=1.0, show_eta=False)
        yield Static(id="facts")
        yield Sparkline([], id="curve", summary_function=lambda part: sum(part) / len(part))
        yield Static(id="scale")
        yield Static(id="log")
        yield Footer()

    def ask(self) -> View:
        """Return the current state of the run."""
        assert self._run
        return view_of(self._run, lines=max(3, self.app.size.height))

    def tell(self, found: View) -> None:
        """Show the run."""
        status = found.status
        reason = f": {status.reason}" if status.reason else ""
        title = Text.assemble(
            status.run, "  ", (status.state, _COLOURS.get(status.state, "")), reason
        )
        self.query_one("#title", Static).update(title)
        progress = self.query_one(ProgressBar)
        progress.display = found.share is not None
        progress.update(progress=found.share or 0.0)
        rows = [f"{name:>9}  {text}" for name, text in found.facts]
        self.query_one("#facts", Static).update(Text("\n".join(rows)))
        curve = self.query_one(Sparkline)
        curve.display = len(found.losses) > 1
        curve.data = [*found.losses]
        scale = self.query_one("#scale", Static)
        scale.display = curve.display
        if curve.display:
            low, high = min(found.losses), max(found.losses)
            scale.update(f"loss of every step: between {low:.4f} and {high:.4f}")
        self.call_after_refresh(self._tell_log, found.log)

    def _tell_log(self, lines: Sequence[str]) -> None:
        """Show as many of the last lines as fit below the rest."""
        log = self.query_one("#log", Static)
        shown = [Text(line) for line in lines[-max(1, log.size.height) :]]
        for line in shown:
            line.truncate(log.size.width, overflow="ellipsis")
        log.update(Text("\n").join(shown))


class LogScreen(_LiveScreen):
    """The log of node 0, which follows new lines unless it is scrolled up."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,left,l", "app.pop_screen", "Back", key_display="esc")
    ]

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        with VerticalScroll():
            yield Static()
        yield Footer()

    def ask(self) -> Sequence[str]:
        """Return the last lines of the log."""
        assert self._run
        return log_lines(self._run, _MOST_LOG_LINES)

    def tell(self, found: Sequence[str]) -> None:
        """Show the lines."""
        lines = self.query_one(VerticalScroll)
        follows = lines.scroll_offset.y >= lines.max_scroll_y
        self.query_one(Static).update(Text("\n".join(found)))
        if follows:
            lines.scroll_end(animate=False)


class Confirm(ModalScreen[bool]):
    """A question. y means yes, and all other keys mean no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "dismiss(True)", "Yes"),
        ("n,escape,enter,q", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Yield the question."""
        yield Label(Text(f"{self._question}\n\ny: yes   n: no"))
