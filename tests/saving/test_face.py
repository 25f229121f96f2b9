"""`stretto.save` and `stretto.load`: written under one layout, read under each other, training goes on as if
nothing had been.

What is compared with is the plain model, trained by PyTorch alone, in float64. Ranks are threads.
"""

from __future__ import annotations

import copy
import errno
import functools
import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter

import stretto
from stretto.ir.plan import Plan
from stretto.models.gpt import next_token_loss
from stretto.runtime.runner import Runner
from stretto.saving import folder
from tests.capturing.zoo import Chain, mean_square, rows
from tests.parallelize.equality import batch_of, gpt
from tests.runtime.equality import lowered

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "dp": {"dp": 2},
    "pp tp": {"pp": 2, "tp": 2},
    "pp dp": {"pp": 2, "dp": 2},
    "tp dp": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "tp4": {"tp": 4},
    "all": {"pp": 2, "tp": 2, "dp": 2},
    "nothing on one": {"pp": 2, "split": "embedding,layer*2,loss|"},
}
TOLERANCE = 1e-9
"""Relative. AdamW divides by the square root of a mean of squares, which takes the last bits of small
gradients up."""
STEPS = 2


@functools.cache
def model() -> nn.Module:
    """Embedding and head are tied, and are on two stages of a pipeline; the vocabulary is sharded by tp."""
    return gpt(tie_embeddings=True, positions="learned").double()


@functools.cache
def plan_of(layout: str) -> Plan:
    options = LAYOUTS[layout]
    # Each piece is of one row.
    parallel = stretto.Parallel(**{**options, "microbatches": 4 // options.get("dp", 1)})
    return lowered(stretto.capture(model(), batch_of(), next_token_loss, parallel), "1f1b")


def groups(named: Any, lr: float = 1e-2) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    found = list(named)
    matrices, vectors = ([p for _, p in found if (p.dim() > 1) is many] for many in (True, False))
    both = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": lr / 2}]
    return [group for group in both if group["params"]] or both[:1]


def adamw(named: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(named, lr), lr=lr, amsgrad=True)


def momentum(named: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(named, lr), lr=lr, momentum=0.9)


Make = Callable[..., torch.optim.Optimizer]


def trained(make: Make, steps: int) -> dict[str, Tensor]:
    """The plain model after so many steps."""
    own = copy.deepcopy(model())
    optimizer = make(own.named_parameters())
    for _ in range(steps):
        torch.stack(
            [next_token_loss(own, {k: v[m : m + 1] for k, v in batch_of().items()}) for m in range(4)]
        ).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return own.state_dict()


def train(runner: Runner, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        runner.step(batch_of())
        optimizer.step()
        optimizer.zero_grad()


def run(layout: str, work: Callable[[Runner], Any], of: nn.Module | None = None) -> list[Any]:
    return stretto.run_threads(plan_of(layout), lambda _: copy.deepcopy(of or model()), work)


def write(layout: str, path: Path, make: Make = adamw, extra: Any = None) -> None:
    def work(runner: Runner) -> None:
        optimizer = make(runner.named_parameters())
        train(runner, optimizer, STEPS)
        stretto.save(path, runner, optimizer, extra)

    run(layout, work)


def go_on(layout: str, path: Path, make: Make = adamw) -> dict[str, Tensor]:
    """From other weights and another rate, which the checkpoint's replace; one step."""
    other = copy.deepcopy(model())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)

    def work(runner: Runner) -> dict[str, Tensor]:
        optimizer = make(runner.named_parameters(), lr=1.0)
        stretto.load(path, runner, optimizer)
        train(runner, optimizer, 1)
        return runner.state_dict()

    return run(layout, work, other)[0]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name] - tensor).double().norm()
        assert float(error) <= TOLERANCE * float(tensor.double().norm()), name


FAST = (
    *("tp > pp", "one > pp tp", "all > dp", "pp dp > tp"),
    *("nothing on one > tp", "pp > nothing on one"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("saved")

    @functools.cache
    def of(layout: str) -> Path:
        write(layout, place / layout)
        return place / layout

    return of


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return trained(adamw, STEPS + 1)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=() if pair in FAST else pytest.mark.slow)
        for pair in (f"{wrote} > {reads}" for wrote in LAYOUTS for reads in LAYOUTS)
    ],
)
def test_what_one_layout_saved_another_goes_on_from(
    saved: Callable[[str], Path], expected: dict[str, Tensor], pair: str
) -> None:
    wrote, reads = pair.split(" > ")
    assert_close(go_on(reads, saved(wrote)), expected)


def test_momentum_of_sgd_too(tmp_path: Path) -> None:
    write("tp", tmp_path / "a", momentum)
    assert_close(go_on("pp", tmp_path / "a", momentum), trained(momentum, STEPS + 1))


def test_the_same_layout_goes_on_bit_for_bit(saved: Callable[[str], Path]) -> None:
    def straight(runner: Runner) -> dict[str, Tensor]:
        train(runner, optimizer := adamw(runner.named_parameters()), STEPS + 1)
        return runner.state_dict() if optimizer else {}

    want, found = run("pp tp", straight)[0], go_on("pp tp", saved("pp tp"))
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def test_what_the_user_adds_comes_back_on_every_rank(tmp_path: Path) -> None:
    extra = {"epoch": 3, "best": 0.5, "order": torch.arange(3), "name": None, "shape": (1, 2)}
    write("pp", tmp_path / "a", extra=extra)
    for told in run("tp", lambda runner: stretto.load(tmp_path / "a", runner)):
        assert torch.equal(told.pop("order"), torch.arange(3))
        assert told == {"epoch": 3, "best": 0.5, "name": None, "shape": (1, 2)}


def test_the_options_of_groups_are_those_that_were_saved(saved: Callable[[str], Path]) -> None:
    def work(runner: Runner) -> list[tuple[float, float]]:
        optimizer = adamw(runner.named_parameters(), lr=7.0)
        stretto.load(saved("pp tp"), runner, optimizer)
        return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]

    assert run("tp", work) == [[(1e-2, 0.1), (5e-3, 0.0)]] * 2


# What is refused.

Work = Callable[[Runner, Path], Any]


def refused(layout: str, work: Callable[[Runner], Any]) -> str:
    """The error, which is the same on all ranks."""

    def attempt(runner: Runner) -> str:
        try:
            work(runner)
        except stretto.StrettoError as error:
            return str(error)
        return ""

    (error,) = set(run(layout, attempt))
    return str(error)


def load_with(make: Callable[[Runner], torch.optim.Optimizer]) -> Work:
    return lambda runner, place: stretto.load(place, runner, make(runner))


def adamw_of(runner: Runner) -> torch.optim.Optimizer:
    return adamw(runner.named_parameters())


def save_extra(runner: Runner, place: Path) -> None:
    stretto.save(place.parent / "b", runner, extra={"what": object})


REFUSALS: dict[str, tuple[Work, str]] = {
    "other groups": (load_with(lambda runner: torch.optim.AdamW(runner.parameters())), "groups of their own"),
    "another optimizer": (load_with(lambda r: momentum(r.named_parameters())), "state of AdamW"),
    "no folder": (lambda runner, place: stretto.load(place / "none", runner), "does not exist"),
    "no checkpoint": (lambda runner, place: stretto.load(place.parent / "mine", runner), "no complete"),
    "someone's folder": (lambda runner, place: stretto.save(place.parent / "mine", runner), "no checkpoint"),
    "an extra that cannot be read": (save_extra, "extra cannot be saved"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_all_ranks_refuse_the_same(saved: Callable[[str], Path], what: str) -> None:
    place = saved("tp")
    mine = place.parent / "mine" / "thesis.tex"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("x")
    work, word = REFUSALS[what]
    assert word in refused("dp", lambda runner: work(runner, place))
    assert [path.name for path in mine.parent.iterdir()] == ["thesis.tex"]
    assert not list(place.parent.glob("b*"))


def test_one_saved_without_an_optimizer(tmp_path: Path) -> None:
    run("one", lambda runner: stretto.save(tmp_path / "a", runner))
    assert "without an optimizer" in refused(
        "tp", lambda runner: stretto.load(tmp_path / "a", runner, adamw_of(runner))
    )
    run("tp", lambda runner: stretto.load(tmp_path / "a", runner))


@pytest.mark.parametrize(("layers", "word"), [(3, "lacks model.blocks.2"), (1, "no such parameter")])
def test_another_model(saved: Callable[[str], Path], layers: int, word: str) -> None:
    other = gpt(layers=layers, tie_embeddings=True, positions="learned").double()
    job = stretto.capture(other, batch_of(), next_token_loss, stretto.Parallel(microbatches=4))
    with pytest.raises(stretto.StrettoError, match=word):
        stretto.run_threads(
            lowered(job, "1f1b"), lambda _: other, lambda runner: stretto.load(saved("tp"), runner)
        )


def test_ranks_that_see_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two hosts with disks of their own: nothing is left that could be taken for a checkpoint."""
    monkeypatch.setattr(folder, "SEEN_WITHIN_S", 0.1)
    error = refused("pp", lambda runner: stretto.save(tmp_path / str(runner.rank) / "a", runner))
    assert str(tmp_path / "1" / "a.tmp") in error
    assert "rank 1" in error
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_rank_whose_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("pp", tmp_path / "a", extra="before")
    original = FileSystemWriter.write_data

    def full(writer: FileSystemWriter, plan: Any, planner: Any) -> Any:
        if plan.storage_data.prefix == "__1_":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(writer, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    assert "disk is full" in refused("pp", lambda runner: stretto.save(tmp_path / "a", runner))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert run("one", lambda runner: stretto.load(tmp_path / "a", runner)) == ["before"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted without root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full_keeps_what_was_saved(small_disk: Path) -> None:
    write("pp", small_disk / "a", extra="before")
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**16))
    assert "disk is full" in refused("pp", lambda runner: stretto.save(small_disk / "a", runner))
    assert sorted(path.name for path in small_disk.iterdir()) == ["a", "other"]
    assert run("one", lambda runner: stretto.load(small_disk / "a", runner)) == ["before"]


class Disk(io.BytesIO):
    """A file on a disk that is full after 4 KiB."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def throw(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("fail", "word"),
    [
        # PyTorch raises an error of its own, while it handles the system's.
        (lambda: torch.save(torch.zeros(1 << 18), Disk()), "disk is full"),
        (lambda: throw(RuntimeError(f"failed: {os.strerror(errno.EDQUOT)}")), "disk is full"),
        (
            lambda: throw(PermissionError(errno.EACCES, "Permission", "/No space left on device")),
            "Permission",
        ),
        (lambda: throw(RuntimeError("unexpected")), "unexpected"),
    ],
)
def test_why_a_file_could_not_be_written(fail: Callable[[], None], word: str) -> None:
    with pytest.raises(stretto.StrettoError, match=word), folder.Writing("it", "save elsewhere", "Nothing"):
        fail()


def test_a_save_that_was_killed_between_its_renames(tmp_path: Path) -> None:
    write("pp", tmp_path / "a", extra="before")
    (tmp_path / "a").rename(tmp_path / "a.old.tmp")
    assert run("one", lambda runner: stretto.load(tmp_path / "a", runner)) == ["before"]
    run("one", lambda runner: stretto.save(tmp_path / "a", runner, extra="after"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert not (tmp_path / "a" / folder.PROBE).exists()


class RowSteps(torch.optim.SGD):
    """Keeps a number for each row, which no update reads."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("rows", torch.zeros(len(p))).add_(1)
        super().step(closure)


def test_state_without_a_place_in_the_whole(tmp_path: Path) -> None:
    def work(runner: Runner) -> None:
        optimizer = RowSteps(runner.parameters(), lr=0.1)
        train(runner, optimizer, 1)
        stretto.save(tmp_path / "a", runner, optimizer)

    assert "is not known" in refused("tp", work)
    assert refused("pp", work) == ""


class Counted(nn.Linear):
    """With extra state."""

    seen: Any = 1

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def with_counted() -> Chain:
    model = Chain()
    model.layers[1] = Counted(8, 8).double()
    return model


def test_extra_state_of_the_model_is_kept(tmp_path: Path) -> None:
    def run_each(work: Callable[[Runner, Counted], Any], **layout: Any) -> list[Any]:
        models = [with_counted() for _ in range(3)]
        job = stretto.capture(models.pop(), rows(), mean_square, stretto.Parallel(**layout, microbatches=2))
        counted = [one.get_submodule("layers.1") for one in models]
        return stretto.run_threads(
            lowered(job, "1f1b"), models.__getitem__, lambda runner: work(runner, counted[runner.rank])
        )

    def write(runner: Runner, counted: Counted) -> None:
        counted.seen = torch.tensor([5.0])
        stretto.save(tmp_path / "it", runner)

    def read(runner: Runner, counted: Counted) -> Tensor:
        stretto.load(tmp_path / "it", runner)
        seen: Tensor = counted.seen
        return seen

    def refuse(runner: Runner, counted: Counted) -> None:
        counted.seen = io.BytesIO()
        with pytest.raises(stretto.UsageError, match="get_extra_state"):
            stretto.save(tmp_path / "it", runner)

    run_each(write, pp=2)
    assert run_each(read, dp=2) == [torch.tensor([5.0])] * 2
    run_each(refuse, dp=2)
