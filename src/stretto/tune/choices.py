"""What can be chosen: layouts over so many devices, and what goes on each. The settings' own checks decide.

No rule of what fits is written here: a layout becomes settings, which are checked as those of a file are, and
the message of the check is kept. What only a capture or a plan finds is refused there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stretto.capturing import DEGREES
from stretto.config import DecoderSettings, ParallelSettings, TrainSettings
from stretto.config.parallel import IDLE
from stretto.errors import UsageError, meant
from stretto.files.settings_file import faults_of, parse_value
from stretto.ir.parameters import Zero
from stretto.ir.stage_maps import AUTO, stage_map_of, unknown_schedule, virtual_stages_of
from stretto.price.cluster import Description
from stretto.price.cluster_file import Hardware
from stretto.schedule.families import FAMILIES, PLAIN, PLAIN_OF_SEVERAL

LAYOUT = ("pp", "dp", "ep", "tp", "sequence_parallel", "microbatches", "ampipe_degree", "cp")
"""The keys of `parallel` that make a `LayoutChoice`, in its order."""

KEYS = (*LAYOUT, "recompute", "schedule", "virtual_stages", "zero", "dp_shard")
"""Those that are chosen."""

VIRTUAL = (2, 3, 4, 6, 8, 12, 16)
"""Stages a rank that are tried in families with any number of them."""

AUTO_STAGES = 2
"""Stages a rank, at least, from which "auto" chooses: it runs them as one where that is faster."""

RECOMPUTE = ("none", "gathers", "selective", "full")
"""What the backward may compute again, the least first."""

LONG = 8192
"""Tokens of a sample from which ranks may share them. Assumed: fewer are shared better by other axes."""


@dataclass(frozen=True, slots=True, order=True)
class LayoutChoice:
    """How ranks, sequence and batch are shared."""

    pp: int
    dp: int
    ep: int
    tp: int
    sequence_parallel: bool
    microbatches: int
    ampipe_degree: int = 1
    cp: int = 1

    @property
    def sharding(self) -> object:
        """How layers are sharded and cut; rows beside it make a trace."""
        return (self.tp, self.ep, self.sequence_parallel, self.ampipe_degree, self.cp)

    @property
    def pieces(self) -> int:
        """Microbatches of all data-parallel copies."""
        return self.microbatches * self.dp

    def __str__(self) -> str:
        sizes = [f"{name}={getattr(self, name)}" for name in ("pp", "dp", "cp", "ep", "tp")]
        named = [text for text in sizes if not text.endswith("=1")] or ["pp=1"]
        named.append(f"microbatches={self.microbatches}")
        if self.sequence_parallel:
            named.append("sequence_parallel")
        if self.ampipe_degree > 1:
            named.append(f"ampipe_degree={self.ampipe_degree}")
        return " ".join(named)


@dataclass(frozen=True, slots=True, order=True)
class Dealt:
    """What copies keep in parts: `zero`, over groups of `dp_shard` ranks; 0 is over all of dp."""

    zero: Zero = 0
    dp_shard: int = 0

    def __str__(self) -> str:
        return f"{self.zero}" + (f" over {self.dp_shard}" if self.dp_shard else "")


COPIES = Dealt()
"""Nothing: all have copies."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A layout with a schedule, stages a rank, what the backward computes again, and what copies keep in
    parts."""

    layout: LayoutChoice
    schedule: str
    virtual_stages: int
    recompute: str | int = "none"
    dealt: Dealt = COPIES

    def __str__(self) -> str:
        each = f" virtual_stages={self.virtual_stages}" if self.virtual_stages > 1 else ""
        again = f" recompute={self.recompute}" if self.recompute != "none" else ""
        parts = f" zero={self.dealt}" if self.dealt.zero else ""
        return f"{self.layout} {self.schedule}{each}{again}{parts}"

    def changes(self) -> dict[str, Any]:
        """Key of `parallel` -> what it is set to, None where it is left out."""
        changes: dict[str, Any] = {name: getattr(self.layout, name) for name in LAYOUT}
        usual = virtual_stages_of(self.schedule, None) == self.virtual_stages
        changes |= {"schedule": self.schedule, "recompute": self.recompute}
        changes["virtual_stages"] = None if usual else self.virtual_stages
        changes |= {"zero": self.dealt.zero, "dp_shard": self.dealt.dp_shard or None}
        for key, (_, wanted) in IDLE.items():
            if all(changes[one] == 1 for one in wanted):
                changes[key] = None
        if self.dealt.zero != 1:
            changes["owners"] = None
        if self.schedule in FAMILIES and not FAMILIES[self.schedule].groups:
            changes["microbatch_group"] = None  # planning refuses it there
        for key in ("cp", "ep", "ampipe_degree", "sequence_parallel", "recompute", "zero"):
            if changes[key] == ParallelSettings.model_fields[key].default:
                changes[key] = None
        return changes


class Choices:
    """What may be chosen for a run. fixed: keys of `KEYS` that are not to be chosen, with their values.
    node_devices: that fast links join, where there are others.

    refused: message -> how many were refused with it.
    """

    def __init__(
        self,
        settings: TrainSettings,
        devices: int,
        fixed: Mapping[str, Any] | None = None,
        node_devices: int | None = None,
    ) -> None:
        self.settings = settings
        self.devices = devices
        self.node_devices = node_devices
        self.fixed = dict(fixed or {})
        self.refused: Counter[str] = Counter()
        self._values = settings.model_dump(exclude_unset=True)
        self._values.setdefault("parallel", {})

    def settings_of(self, candidate: Candidate) -> TrainSettings:
        """The settings with a candidate's choices. Raises UsageError with the lines of their checks."""
        values = self._changed(candidate)
        if faults := faults_of(TrainSettings, values, "", {}):
            raise UsageError("; ".join(line for _, line in faults))
        return TrainSettings.model_validate(values)

    def _changed(self, candidate: Candidate) -> dict[str, Any]:
        parallel = dict(self._values["parallel"])
        for key, value in candidate.changes().items():
            parallel.pop(key, None)
            if value is not None:
                parallel[key] = value
        return {**self._values, "parallel": parallel}

    def allowed(self, candidate: Candidate) -> bool:
        """Whether the settings' checks allow it; their message is counted where they do not."""
        try:
            virtual_stages_of(candidate.schedule, candidate.virtual_stages)
            faults = [line for _, line in faults_of(TrainSettings, self._changed(candidate), "", {})]
        except UsageError as error:
            faults = [str(error)]
        self.refused.update(faults)
        return not faults

    def plain(self, layout: LayoutChoice) -> Candidate:
        """A layout as a candidate, with what is fixed and nothing chosen."""
        schedule = str(self.fixed.get("schedule", self._plain))
        each = virtual_stages_of(schedule, self.fixed.get("virtual_stages"))
        dealt = self.kinds(layout)[0][0]
        return Candidate(layout, schedule, each, self.fixed.get("recompute", "none"), dealt)

    @property
    def zero(self) -> Zero | None:
        """What is not chosen, as the settings or what is fixed say; None where it is."""
        given = self.settings.parallel
        said: Zero | None = given.zero if "zero" in given.model_fields_set else None
        return self.fixed.get("zero", said)

    def kinds(self, layout: LayoutChoice) -> tuple[tuple[Dealt, ...], ...]:
        """What copies may keep in parts, the least first; each over groups within a node, where dp spans
        nodes, and over all of dp. What the settings say is not chosen."""
        given = self.settings.parallel
        if layout.dp * layout.cp == 1:
            return ((COPIES,),)
        shard = self.fixed.get("dp_shard", given.dp_shard)
        within = (self.node_devices or 0) // (layout.cp * layout.tp)
        fits = 1 < within < layout.dp and layout.dp % within == 0 == within % layout.ep
        groups = (shard,) if shard else (within, 0) if fits and self.zero is None else (0,)
        zeros: tuple[Zero, ...] = (0, 1, 2, 3) if self.zero is None else (self.zero,)
        return tuple(tuple(Dealt(zero, each) for each in groups) if zero else (COPIES,) for zero in zeros)

    @property
    def _plain(self) -> str:
        return PLAIN if self.fixed.get("virtual_stages", 1) == 1 else PLAIN_OF_SEVERAL

    def layouts(self) -> Iterator[LayoutChoice]:
        """All that are allowed on all devices: sizes that divide what they share."""
        for layout in self._all():
            if self.allowed(self.plain(layout)):
                yield layout

    def _all(self) -> Iterator[LayoutChoice]:
        batch = self.settings.training.global_batch
        degrees = self._of("ampipe_degree", (1,))
        for tp, pp, dp, cp in self._sizes():
            for ep in self._of("ep", divisors(dp)):
                for sequence in self._of("sequence_parallel", (False, True) if tp > 1 else (False,)):
                    for count in self._of("microbatches", divisors(max(batch // dp, 1))):
                        for degree in degrees:
                            yield LayoutChoice(pp, dp, ep, tp, sequence and tp > 1, count, degree, cp)

    def _sizes(self) -> Iterator[tuple[int, int, int, int]]:
        """tp, pp, dp and cp that are all devices."""
        length = self.settings.data.sequence_length
        for tp in self._of("tp", divisors(self.devices)):
            for pp in self._of("pp", divisors(self.devices // tp)):
                shared = divisors(self.devices // tp // pp) if length >= LONG else (1,)
                for cp in self._of("cp", shared):
                    for dp in self._of("dp", (self.devices // tp // pp // cp,)):
                        if pp * dp * cp * tp == self.devices:
                            yield tp, pp, dp, cp

    def _of(self, key: str, usual: Sequence[Any]) -> Sequence[Any]:
        return (self.fixed[key],) if key in self.fixed else usual

    def orders(self, layout: LayoutChoice) -> Iterator[tuple[str, int]]:
        """Families, each with its numbers of stages a rank that are allowed."""
        # One rank has no one to wait for: families differ in nothing but their memory.
        families = tuple(FAMILIES) if layout.pp > 1 else (self._plain,)
        for name in self._of("schedule", families):
            stages = stage_map_of(name)
            numbers = (stages.usual, *(VIRTUAL if stages.most is None else ()))
            for each in self._of("virtual_stages", tuple(dict.fromkeys(numbers))):
                candidate = replace(self.plain(layout), schedule=name, virtual_stages=each, recompute="none")
                if stages.allow(each) and self.allowed(candidate):
                    yield name, each

    def again(self, layout: LayoutChoice) -> tuple[str | int, ...]:
        """What the backward may compute again, the least first."""
        if "recompute" in self.fixed:
            return (self.fixed["recompute"],)
        return tuple(word for word in RECOMPUTE if word != "gathers" or layout.sequence_parallel)

    def degrees(self, layout: LayoutChoice) -> tuple[int, ...]:
        """Other numbers of chunks, where there is something that chunks can hide."""
        if "ampipe_degree" in self.fixed or layout.tp == layout.ep == 1:
            return ()
        others = (replace(layout, ampipe_degree=degree) for degree in DEGREES)
        return tuple(one.ampipe_degree for one in others if self.allowed(self.plain(one)))

    def own(self) -> Candidate | None:
        """What the settings choose themselves, where it is for as many devices and no other than is fixed."""
        given = self.settings.parallel
        other = any(getattr(given, key) != value for key, value in self.fixed.items())
        if given.world != self.devices or given.schedule not in FAMILIES or other:
            return None
        if given.ampipe_degree == "auto" or given.virtual_stages == "auto":
            return None
        layout = LayoutChoice(*(getattr(given, key) for key in LAYOUT))
        each = virtual_stages_of(given.schedule, given.virtual_stages)
        dealt = Dealt(given.zero, given.dp_shard or 0)
        return Candidate(layout, given.schedule, each, given.recompute, dealt)

    def with_auto(self, one: Candidate) -> list[Candidate]:
        """The candidate with the schedule that planning finds, where that may be chosen."""
        if "schedule" in self.fixed or one.layout.pp == 1 or one.schedule == AUTO:
            return []
        auto = replace(one, schedule=AUTO)
        if "virtual_stages" not in self.fixed and self.several_stages(one.layout, AUTO_STAGES):
            auto = replace(auto, virtual_stages=max(AUTO_STAGES, one.virtual_stages))
        return [auto] if self.allowed(auto) else []

    @property
    def layers(self) -> int | None:
        """Equal blocks of the model, where its settings say."""
        model = self.settings.model
        if self.settings.task is not None or not isinstance(model, DecoderSettings):
            return None
        return model.layers

    def several_stages(self, layout: LayoutChoice, each: int = 2) -> bool:
        """Whether a rank may have so many stages."""
        return self.layers is None or self.layers >= each * layout.pp


def node_of(cluster: Description) -> int | None:
    """Devices of a node, where a cluster has several and their links differ."""
    if isinstance(cluster, Hardware) and cluster.nodes > 1:
        return cluster.fabric.node_devices
    return None


def divisors(number: int) -> tuple[int, ...]:
    """All of them, ascending."""
    return tuple(one for one in range(1, number + 1) if number % one == 0)


def read_fixed(texts: Sequence[str]) -> dict[str, Any]:
    """`--fix KEY=VALUE` as values. Raises UsageError for a key that is not chosen anyway, and for a value
    that the key cannot have."""
    changes: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().removeprefix("parallel.")
        if key not in KEYS or not equals:
            near = "" if key in KEYS else meant(key, KEYS)
            raise UsageError(f"--fix {text}: {near}expected KEY=VALUE with a key of {', '.join(KEYS)}")
        read = parse_value(value)
        beside = {"zero": {"dp": 2}, "dp_shard": {"zero": 1, "dp": read}}.get(key, {})
        faults = [line for _, line in faults_of(ParallelSettings, {key: read, **beside}, "", {})]
        if key == "schedule" and read not in (*FAMILIES, AUTO):
            faults = [unknown_schedule(read) or "an order of your own is for one layout: name a family"]
        if key == "ampipe_degree" and read == "auto":
            faults = ["numbers of chunks are compared anyway: give one, or leave it out"]
        # These two are refused for others that they go with, which are chosen.
        if faults and key not in ("sequence_parallel", "ep"):
            raise UsageError(f"--fix {text}: {faults[0]}")
        changes[key] = read
    return changes
