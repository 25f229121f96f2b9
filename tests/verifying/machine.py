"""The imagined machine of `tests.verifying.reference`: what ranks keep, and how what they send arrives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stretto.ir.plan import Plan


class WrongPlanError(Exception):
    """What happened on the imagined machine that must not."""


Message = tuple[int, int]
"""(edge, microbatch)."""

Part = tuple[object, Any]
"""What a member has started, and what it gives."""

Gathering = tuple[object, int]
"""(communicator and group, number) of a collective."""


@dataclass
class Memory:
    """Numbers side by side, each for so many elements. filling: the collective that works in it, or ""."""

    numbers: list[int]
    elements: list[int]
    filling: str = ""


@dataclass(frozen=True)
class Place:
    """Some of a memory's numbers."""

    memory: Memory
    at: tuple[int, ...]

    def read(self) -> list[int]:
        if self.memory.filling:
            raise WrongPlanError(f"is read or written while {self.memory.filling} works in it")
        return [self.memory.numbers[k] for k in self.at]

    @property
    def elements(self) -> list[int]:
        return [self.memory.elements[k] for k in self.at]


def placed(numbers: list[int], elements: list[int]) -> Place:
    """In memory of their own."""
    return Place(Memory(numbers, elements), tuple(range(len(numbers))))


@dataclass
class Pending:
    """The buffer of a collective that is under way. place: of one of the step, where its result will be."""

    collective: Gathering
    kind: str
    place: Place | None = None


@dataclass
class Rank:
    """What one rank has. values: (stage, microbatch, program, name), program F or B for I and W."""

    rank: int
    at: dict[str, int]
    values: dict[tuple[int, int, str, str], int | Pending] = field(default_factory=dict)
    arrived: dict[tuple[int, int, str], int] = field(default_factory=dict)
    posted: dict[Message, int] = field(default_factory=dict)
    taken: set[Message] = field(default_factory=set)
    sent: dict[Message, int] = field(default_factory=dict)
    left: set[Message] = field(default_factory=set)
    kept: dict[Message, int] = field(default_factory=dict)
    """Values for another stage of the same rank."""
    under_way: set[Gathering] = field(default_factory=set)
    step: dict[str, Place] = field(default_factory=dict)
    """What lives over the step: `grad/` of parameters, and `step/loss`."""
    once: dict[str, Place | Pending] = field(default_factory=dict)
    """What programs that run once a step have made."""
    queue: list[Gathering] = field(default_factory=list)


class Machine:
    """All ranks of a run, and what is under way between them. steps: grows whenever something happens."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.job, self.mesh = plan, plan.job, plan.mesh
        self.ranks = [Rank(r, self.mesh.coordinates(r)) for r in range(self.mesh.world)]
        self.sends: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.posts: dict[tuple[str, int], int] = defaultdict(int)
        """By (communicator, receiving rank)."""
        self.started: dict[object, dict[int, list[Part]]] = defaultdict(lambda: defaultdict(list))
        self.over: set[Gathering] = set()
        self.steps = 0
        names = [communicator.name for communicator in plan.communicators]
        if len(set(names)) < len(names):
            raise WrongPlanError("two communicators of one name")

    # --- messages -----------------------------------------------------------------------------------

    def ends(self, edge: int) -> tuple[int, int]:
        found = self.job.edges[edge]
        return self.plan.rank_of(found.source), self.plan.rank_of(found.target)

    def lane(self, rank: Rank, edge: int) -> tuple[str, int]:
        """The communicator of an edge's messages and the rank that receives them."""
        source, target = self.ends(edge)
        name = self.plan.lane_of(edge)
        for communicator in self.plan.communicators:
            if communicator.name == name:
                group = self.mesh.group(rank.rank, communicator.axes, communicator.ranks)
                pair = tuple(self.mesh.rank({**rank.at, "pp": place}) for place in (source, target))
                if group != pair:
                    raise WrongPlanError(f"{name} does not join the ranks of e{edge}")
                return name, pair[1]
        raise WrongPlanError(f"there is no communicator {name}")

    def post(self, rank: Rank, message: Message) -> None:
        source, target = self.ends(message[0])
        if source == target or target != rank.at["pp"] or not 0 <= message[1] < self.job.microbatches:
            raise WrongPlanError(f"rank {rank.rank} has nothing to receive for {message}")
        if message in rank.posted:
            raise WrongPlanError(f"a second buffer for {message}")
        lane = self.lane(rank, message[0])
        rank.posted[message] = self.posts[lane]
        self.posts[lane] += 1

    def send(self, rank: Rank, message: Message, value: int) -> None:
        source, target = self.ends(message[0])
        if source != rank.at["pp"]:
            raise WrongPlanError(f"rank {rank.rank} does not send e{message[0]}")
        if message in rank.sent or message in rank.kept:
            raise WrongPlanError(f"{message} is sent twice")
        if source == target:
            rank.kept[message] = value
        else:
            lane = self.sends[self.lane(rank, message[0])]
            rank.sent[message] = len(lane)
            lane.append(value)

    def arrive(self, rank: Rank, stage: int, message: Message) -> Iterator[str]:
        edge = self.job.edges[message[0]]
        key = (edge.target, message[1], edge.value)
        if edge.target != stage:
            raise WrongPlanError(f"e{message[0]} does not lead to stage {stage}")
        if self.plan.rank_of(edge.source) == rank.at["pp"]:
            if message not in rank.kept:
                raise WrongPlanError(f"{message} is not made yet")
            rank.arrived[key] = rank.kept[message]
            return
        if message not in rank.posted or message in rank.taken:
            raise WrongPlanError(f"no buffer for {message}")
        lane = self.lane(rank, message[0])
        while len(self.sends[lane]) <= rank.posted[message]:
            yield f"message {message}"
        rank.taken.add(message)
        rank.arrived[key] = self.sends[lane][rank.posted[message]]
        self.steps += 1

    def gone(self, rank: Rank, message: Message) -> Iterator[str]:
        if message not in rank.sent or message in rank.left:
            raise WrongPlanError(f"{message} is under way no more, or not yet")
        lane = self.lane(rank, message[0])
        while self.posts[lane] <= rank.sent[message]:
            yield f"the receive of {message}"
        rank.left.add(message)

    # --- collectives --------------------------------------------------------------------------------

    def start(self, rank: Rank, communicator: str, what: object, value: Any) -> Gathering:
        for found in self.plan.communicators:
            if found.name == communicator:
                group = self.mesh.group(rank.rank, found.axes, found.ranks)
                if group is None or len(set(group)) < len(group):
                    raise WrongPlanError(f"{communicator} is not for rank {rank.rank}, or has one twice")
                key = (communicator, group)
                mine = self.started[key][rank.rank]
                collective = (key, len(mine))
                mine.append((what, value))
                rank.under_way.add(collective)
                if found.axes[0] == "pp":
                    rank.queue.append(collective)
                return collective
        raise WrongPlanError(f"there is no communicator {communicator}")

    def members(self, collective: Gathering) -> tuple[int, ...]:
        (_, group), _ = collective  # type: ignore[misc]
        return group  # type: ignore[no-any-return]

    def finish(self, rank: Rank, collective: Gathering) -> Iterator[str]:
        """Waits until the collective is over; its parts, in the order of the group."""
        key, number = collective
        group = self.members(collective)
        if collective not in rank.under_way:
            raise WrongPlanError(f"rank {rank.rank} waits a second time for a collective")
        while any(len(self.started[key][member]) <= number for member in group):
            yield f"collective {collective}"
        while not self.turn(collective, ()):
            yield f"its turn for {collective}"
        parts = [self.started[key][member][number] for member in group]
        if len({what for what, _ in parts}) > 1:
            raise WrongPlanError(f"collectives meet that are not one: {[what for what, _ in parts]}")
        rank.under_way.remove(collective)
        self.steps += 1
        return [value for _, value in parts]

    def turn(self, collective: Gathering, behind: tuple[Gathering, ...]) -> bool:
        """Whether every member has started it and is done with all that it started before."""
        if collective in self.over:
            return True
        key, number = collective
        for member in self.members(collective):
            queue = self.ranks[member].queue
            if len(self.started[key][member]) <= number or collective in behind:
                return False
            before = queue[: queue.index(collective)] if collective in queue else []
            if not all(self.turn(other, (*behind, collective)) for other in before):
                return False
        self.over.add(collective)
        return True
