"""Who gives signs of life, long before Slurm knows who does not."""

from trnslurm.node.beats import PERIOD_S, SILENT_S

BEGINS_S = 10.0
"""How long a node's first sign may take before it is asked about."""


class Roll:
    """The nodes of an attempt that were heard, and when; those of the next one as well."""

    def __init__(self) -> None:
        self._attempt = 0
        self._heard: dict[int, float] = {}
        self._heard_ahead: dict[int, float] = {}
        self._lately = self._awake_at = 0.0
        self.ended: set[int] = set()
        """The nodes whose processes have ended, or were killed as they were told."""

    def begin(self, attempt: int, nodes: int, now: float) -> None:
        """Forget the nodes of the attempt before."""
        self._attempt, self._awake_at = attempt, now
        self._lately = -2 * PERIOD_S
        self._heard = dict.fromkeys(range(nodes), now + BEGINS_S - SILENT_S)
        self._heard_ahead, self.ended = {}, set()

    def hear(self, node: int, attempt: int, now: float, *, ended: bool = False) -> None:
        """Note a sign of life."""
        if attempt == self._attempt and node in self._heard:
            self._heard[node] = max(now, self._heard[node])
            self._lately = now
            if ended:
                self.ended.add(node)
        elif attempt == self._attempt + 1:
            self._heard_ahead[node] = now

    def awake(self, now: float) -> None:
        """Note that this program has looked: the nodes are not to blame for its own pauses.

        What they sent meanwhile may be lost, for the socket holds a few hundred signs only.
        """
        if (pause_s := now - self._awake_at - PERIOD_S) > 0:
            for heard in (self._heard, self._heard_ahead):
                heard.update({node: max(at, min(now, at + pause_s)) for node, at in heard.items()})
        self._awake_at = now

    def present(self, now: float) -> set[int]:
        """Return the nodes that were heard lately."""
        return {node for node, at in self._heard.items() if now - at <= SILENT_S}

    def silent(self, now: float) -> set[int]:
        """Return the nodes that are silent.

        If no other one is heard, or has ended, the fault is this program's.
        """
        heard = self.ended or now - self._lately <= 2 * PERIOD_S
        return {*self._heard} - self.present(now) - self.ended if heard else set()

    def all_ahead(self, nodes: int, now: float) -> bool:
        """Check whether all nodes of the next attempt, started ahead, were heard lately."""
        heard = {node for node, at in self._heard_ahead.items() if now - at <= SILENT_S}
        return heard.issuperset(range(nodes))
