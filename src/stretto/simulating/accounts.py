"""One rank's accounts: what its compute lane did when, and what it held.

Knows spans and numbers; nothing of how they come about.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.ir.action import Action
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind


class Accounts:
    """Spans of the compute lane, and steps of memory, of one rank.

    action_end_us: when the last work of the action that is being extended ended.
    """

    def __init__(self, rank: int, spans: list[Span], bytes_held: int) -> None:
        self._rank = rank
        self._spans = spans
        self.peak_bytes = bytes_held
        self.steps: list[tuple[float, int]] = [(0.0, bytes_held)]
        # The compute span that is being extended: its action and its start.
        self._action: Action | None = None
        self._action_start_us = 0.0
        self.action_end_us = 0.0
        self._stood = -1

    def extend(self, action: Action, start_us: float) -> None:
        """Work of `action` begins."""
        if self._action is not action:
            self.flush()
            self._action, self._action_start_us = action, start_us

    def flush(self) -> None:
        """Write the compute span that was being extended."""
        action, self._action = self._action, None
        if action is not None:
            self._spans.append(
                Span(
                    self._rank,
                    COMPUTE_LANE,
                    SpanKind.COMPUTE,
                    str(action),
                    self._action_start_us,
                    self.action_end_us,
                    action.stage,
                    action.phase,
                    action.microbatch,
                )
            )

    def stand(self, start_us: float, end_us: float, begun_us: float, name: str) -> None:
        """The lane stood still; what it waited for was under way from `begun_us` on."""
        begun_us = min(max(begun_us, start_us), end_us)
        for kind, first, last in (
            (SpanKind.BUBBLE, start_us, begun_us),
            (SpanKind.EXPOSED, begun_us, end_us),
        ):
            if last > first:
                self._stand(Span(self._rank, COMPUTE_LANE, kind, name, first, last))

    def _stand(self, span: Span) -> None:
        """Write a span, or make the last one longer that it goes on with."""
        before = self._spans[self._stood] if self._stood >= 0 else None
        if before is not None and (before.kind, before.name, before.end_us) == (
            span.kind,
            span.name,
            span.start_us,
        ):
            self._spans[self._stood] = replace(before, end_us=span.end_us)
            return
        self._stood = len(self._spans)
        self._spans.append(span)

    def hold(self, time_us: float, held: int) -> None:
        """So many bytes are held from now on."""
        if held > self.peak_bytes:
            self.peak_bytes = held
        if self.steps[-1][1] != held:
            self.steps.append((time_us, held))
