"""Console: where remarks of a command go, and how its user wants the results."""

from __future__ import annotations

from dataclasses import field

from trnslurm.frozen import Frozen

_WARNING = "warning: "


class Console(Frozen):
    """Collects remarks. The command line's Console prints them, Python's issues warnings."""

    as_json: bool = False
    follow: bool = False
    """Show a run on Slurm until it ends."""
    detach: bool = False
    """Return at once from a run on this machine, which continues."""
    yes: bool = False
    """Do not ask for confirmation."""
    dry_run: bool = False
    remarks: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Show the user a remark; repeat no remark."""
        if text not in self.remarks:
            self.remarks.append(text)
            self.tell(text)

    def warn(self, text: str) -> None:
        """Show the user a problem that does not stop the request; repeat no warning."""
        self.say(f"{_WARNING}{text}")

    @property
    def warnings(self) -> list[str]:
        """What was warned of."""
        return [text.removeprefix(_WARNING) for text in self.remarks if text.startswith(_WARNING)]

    def tell(self, text: str) -> None:
        """Show the user a text; this Console only collects."""
