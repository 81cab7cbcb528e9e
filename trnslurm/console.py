"""Console: where a command's remarks go, and how its user wants the results."""

from __future__ import annotations

from dataclasses import field

from trnslurm.frozen import Frozen

_WARNING = "warning: "


class Console(Frozen):
    """Collects remarks. The command line's Console prints them. Python's issues warnings."""

    as_json: bool = False
    follow: bool = False
    """Whether to show a Slurm run until it ends."""
    detach: bool = False
    """Whether to return at once from a run on this machine, which keeps running."""
    yes: bool = False
    """Whether to skip asking for confirmation."""
    dry_run: bool = False
    remarks: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Show the user a remark, but never the same one twice."""
        if text not in self.remarks:
            self.remarks.append(text)
            self.tell(text)

    def warn(self, text: str) -> None:
        """Show the user a problem that does not stop the request, but never the same one twice."""
        self.say(f"{_WARNING}{text}")

    @property
    def warnings(self) -> list[str]:
        """The warnings so far."""
        return [text.removeprefix(_WARNING) for text in self.remarks if text.startswith(_WARNING)]

    def tell(self, text: str) -> None:
        """Show the user a text. This Console only collects texts."""
