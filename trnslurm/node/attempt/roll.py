"""Tracks the nodes' heartbeats, which reveal a lost node long before Slurm does."""

from trnslurm.node.beats import PERIOD_S, SILENT_S

BEGINS_S = 10.0
"""How long a node's first heartbeat may take before the node is queried."""


class Roll:
    """When the nodes of this attempt and the next one sent their last heartbeats."""

    def __init__(self) -> None:
        self._attempt = 0
        self._heard: dict[int, float] = {}
        self._heard_ahead: dict[int, float] = {}
        self._lately = self._awake_at = 0.0
        self.ended: set[int] = set()
        """The nodes whose processes have ended, or were killed on our order."""

    def begin(self, attempt: int, nodes: int, now: float) -> None:
        """Forget the nodes of the previous attempt."""
        self._attempt, self._awake_at = attempt, now
        self._lately = -2 * PERIOD_S
        self._heard = dict.fromkeys(range(nodes), now + BEGINS_S - SILENT_S)
        self._heard_ahead, self.ended = {}, set()

    def hear(self, node: int, attempt: int, now: float, *, ended: bool = False) -> None:
        """Record a heartbeat."""
        if attempt == self._attempt and node in self._heard:
            self._heard[node] = max(now, self._heard[node])
            self._lately = now
            if ended:
                self.ended.add(node)
        elif attempt == self._attempt + 1:
            self._heard_ahead[node] = now

    def awake(self, now: float) -> None:
        """Record that this program has looked, so that nodes are not blamed for its own pauses.

        Heartbeats sent during a pause may be lost, because the socket holds only a few hundred.
        """
        if (pause_s := now - self._awake_at - PERIOD_S) > 0:
            for heard in (self._heard, self._heard_ahead):
                heard.update({node: max(at, min(now, at + pause_s)) for node, at in heard.items()})
        self._awake_at = now

    def present(self, now: float) -> set[int]:
        """Return the nodes that sent a heartbeat recently."""
        return {node for node, at in self._heard.items() if now - at <= SILENT_S}

    def silent(self, now: float) -> set[int]:
        """Return the silent nodes.

        If no other node is heard or has ended, the fault is in this program.
        """
        heard = self.ended or now - self._lately <= 2 * PERIOD_S
        return {*self._heard} - self.present(now) - self.ended if heard else set()

    def all_ahead(self, nodes: int, now: float) -> bool:
        """Check whether all standby nodes of the next attempt sent a heartbeat recently."""
        heard = {node for node, at in self._heard_ahead.items() if now - at <= SILENT_S}
        return heard.issuperset(range(nodes))
