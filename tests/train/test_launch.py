"""The launcher's one message; what is refused before a rank is started; a rank among the others."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.saving.pretrained import write_pretrained
from tests.train.tiny import write_settings
from torch.distributed import HashStore, ProcessGroupGloo
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from stretto.config import Parallel, TrainSettings, load_settings
from stretto.errors import LostRankError, StrettoError, UsageError
from stretto.models.build import build_model
from stretto.train import launch, preload, world
from stretto.train.failure import Cause, RankFailure, failure_of, record_failure, recorded_failures
from stretto.train.interrupt import Interrupted, Interrupts
from stretto.train.job import layout_of_run
from stretto.train.launch import explain
from stretto.train.preload import threads
from stretto.train.progress import Progress
from stretto.train.trainer import Trainer
from stretto.train.world import World, check_graph, check_kinds, device_for, device_note, join, what_to_check


@pytest.fixture
def settings(tmp_path: Path) -> TrainSettings:
    return TrainSettings.model_validate({"parallel": {"pp": 2}, "output": {"run_dir": str(tmp_path)}})


def failure(rank: int, cause: Cause, at_s: float, message: str = "it", status: int = 1) -> RankFailure:
    return RankFailure(rank, cause, message, status, 7, at_s)


LOST, REFUSED, INTERRUPTED = Cause.LOST, Cause.REFUSED, Cause.INTERRUPTED


@pytest.mark.parametrize(
    ("failures", "exits", "status", "words"),
    [
        # A rank that died without a record comes before those who missed it.
        ([failure(0, LOST, 1.0)], {0: 1, 1: -9}, 1, "rank 1 was lost after step 7: SIGKILL .* no checkpoint"),
        # The first cause, and not its effects.
        (
            [failure(0, REFUSED, 3.0), failure(1, LOST, 1.0), failure(2, REFUSED, 2.0, "no such thing", 2)],
            {0: 1, 1: 1, 2: 2},
            2,
            "no such thing",
        ),
        (
            [failure(0, LOST, 2.0), failure(1, INTERRUPTED, 1.0, "SIGTERM", 143)],
            {0: 1, 1: 143},
            143,
            "rank 1 was ended by SIGTERM after step 7",
        ),
    ],
    ids=["killed", "refused", "interrupted"],
)
def test_the_first_cause_is_printed(
    settings: TrainSettings,
    tmp_path: Path,
    failures: list[RankFailure],
    exits: dict[int, int],
    status: int,
    words: str,
) -> None:
    assert not record_failure(failures[0])
    for one in failures:
        assert record_failure(one, tmp_path)
    ended, message = explain(settings, recorded_failures(tmp_path), exits)
    assert ended == status
    assert re.match(f"stretto: {words}", message), message


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_launcher_under_nohup_outlives_its_terminal(
    settings: TrainSettings, tmp_path: Path, handler: signal.Handlers
) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with launch._environment(settings, tmp_path, 0.0):
            taken = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGHUP")
        with Interrupts(lambda _: None):
            ours = signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    ignored = handler is signal.SIG_IGN
    assert ("SIGHUP" not in taken) == ignored
    assert (ours is signal.SIG_IGN) == ignored


def test_what_ends_a_rank_is_known(settings: TrainSettings) -> None:
    assert failure_of(LostRankError("gone", 3), 0, 1, None).lost == 3
    closed = RuntimeError("[pair.cc:1] Connection closed by peer [127.0.0.1]:1")
    assert failure_of(closed, 0, 1, None).cause is Cause.LOST
    assert failure_of(UsageError("wrong"), 0, 1, None).status == 2
    ecc = failure_of(torch.AcceleratorError("CUDA error: uncorrectable ECC error"), 3, 1, None)
    assert (ecc.cause, "its device failed (CUDA error: uncorrectable" in ecc.message) == (Cause.LOST, True)
    wrong_index = failure_of(torch.AcceleratorError("CUDA error: device-side assert triggered"), 3, 1, None)
    assert (wrong_index.cause, "AcceleratorError: CUDA error" in wrong_index.message) == (Cause.CRASHED, True)
    crash = failure_of(RuntimeError("shapes differ"), 0, 1, None)
    assert crash.cause is Cause.CRASHED
    assert explain(settings, [crash], {0: 1}) == (1, "RuntimeError: shapes differ")
    # A library may have turned the signal's exception into one of its own.
    interrupted = failure_of(closed, 0, 1, Interrupted(15))
    assert (interrupted.cause, interrupted.message, interrupted.status) == (INTERRUPTED, "SIGTERM", 143)


@pytest.mark.parametrize(
    ("room", "name"),
    [(Interrupts, "ending"), (Progress, "stop")],
    ids=["heard late", "while it ends"],
)
def test_a_rank_that_is_stopped_while_it_says_what_it_misses_still_says_it(
    room: type, name: str, settings: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher sees a rank die at the same moment as the rank's neighbours, and stops these."""

    def stopped(self: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        before(self)

    before = getattr(room, name)

    def missed(_: Trainer) -> None:
        raise RuntimeError("[gloo] Connection closed by peer")

    monkeypatch.setenv("STRETTO_RECORDS_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "environment", lambda: World(0, 2, 2))
    monkeypatch.setattr(launch, "join", lambda world: world)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(room, name, stopped)
    monkeypatch.setattr(Trainer, "run", missed)
    with pytest.raises(SystemExit):
        launch._work(settings)
    assert [one.rank for one in recorded_failures(tmp_path)] == [0]


def test_a_rank_ends_even_where_nothing_can_be_written(
    settings: TrainSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Closed:
        def flush(self) -> None:
            raise BrokenPipeError

    place = World(1, 2)
    trainer = Trainer(settings, place)
    monkeypatch.setenv("STRETTO_RECORDS_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught:
        launch._end(trainer, failure(1, Cause.REFUSED, 1.0, "no such thing", 2))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "stretto: no such thing\n"
    monkeypatch.setattr(sys, "stderr", Closed())
    with pytest.raises(SystemExit):
        launch._end(trainer, failure(1, Cause.INTERRUPTED, 1.0))


def test_the_launcher_waits_for_ranks_that_end_only_when_they_are_stuck(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have as long as any process, and hear of the signal after it."""
    gave_up: list[int] = []

    def launched(*_: object) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except Interrupted as error:
            time.sleep(0.3)  # as long as ranks take to end
            return error.status
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr("stretto.train.interrupt.STUCK_S", 0.05)
    monkeypatch.setattr("os._exit", gave_up.append)
    monkeypatch.setattr(launch, "_check", lambda *_: None)
    monkeypatch.setattr(launch, "_launch", launched)
    assert launch.start(settings, ["stretto"]) == 130
    assert gave_up == []


@pytest.mark.parametrize(("cause", "starts"), [(Cause.LOST, 2), (Cause.CRASHED, 1), (REFUSED, 1)])
def test_ranks_are_started_again_unless_one_failed_by_itself(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch, cause: Cause, starts: int
) -> None:
    """Also where another one was killed."""
    begun: list[int] = []

    def elastic_launch(*_: object) -> Any:
        def ranks(*_: object) -> None:
            begun.append(1)
            assert record_failure(failure(0, cause, 1.0))
            exits = {rank: ProcessFailure(rank, 1, code, "") for rank, code in ((0, 1), (1, -9))}
            raise ChildFailedError("ranks", exits)

        return ranks

    monkeypatch.setattr(launch, "elastic_launch", elastic_launch)
    with Interrupts(lambda _: None) as interrupts:
        assert launch._launch(settings, ["stretto"], None, interrupts, 0.0, 1) == 1
    assert len(begun) == starts


def test_a_signal_between_two_starts_of_ranks_says_what_is_left(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object) -> tuple[int, str, bool]:
        checkpoint = settings.checkpoint_dir / "step-000005"
        checkpoint.mkdir(parents=True)
        monkeypatch.setattr(launch, "what_is_left", lambda _: f"last checkpoint {checkpoint.name}")
        return 1, "stretto: rank 1 was lost", True

    def newest(_: object) -> None:
        if settings.checkpoint_dir.exists():
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(launch, "_check", lambda *_: None)
    monkeypatch.setattr(launch, "_launch_once", lost)
    monkeypatch.setattr(launch, "_newest", newest)
    assert launch.start(settings, ["stretto"], max_restarts=1) == 143
    told = capsys.readouterr().err
    assert "restart 1 of 1" in told
    assert told.endswith("last checkpoint step-000005\n")


def test_no_thread_outlives_a_run_and_holds_what_it_trained() -> None:
    """It would free tensors while the interpreter ends, which PyTorch answers with an abort."""

    class Kept:
        def stuck(self, _: Interrupted) -> None:
            raise AssertionError("no one asked for an end")

    kept = Kept()
    gone = weakref.ref(kept)
    for _ in range(20):
        with Interrupts(kept.stuck):
            pass
        assert "signals" not in [thread.name for thread in threading.enumerate()]
    del kept
    assert gone() is None


def test_a_vocabulary_that_stays_whole_is_told_with_the_setting_that_pads_it(tmp_path: Path) -> None:
    config = write_settings(tmp_path)
    said: list[str] = []
    for change in ("model.vocab_size=301", "model.vocab_size=302"):
        settings = load_settings(config, [change, "parallel.tp=2"])
        assert layout_of_run(build_model(settings.model, 300, 0), settings, said.append).tensor is not None
    assert len(said) == 2  # the embedding and the head of the odd one
    assert all(line.startswith("note: ") and line.endswith("(model.vocab_size = 302)") for line in said)
    assert (
        layout_of_run(build_model(settings.model, 300, 0), load_settings(config), said.append).tensor is None
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.hidden=33", "multiple of heads"),
        ("data.paths=['/nowhere']", "/nowhere does not exist"),
        ("checkpoint.resume=nowhere", "nowhere does not exist"),
        ("model.vocab_size=20", "vocab_size = 20"),
        ("parallel.tp=4", "multiple of parallel.tp = 4"),
        ("model.mlp_ratio=0.9", "29 features"),
        ('parallel.tp_plan={"side"="colwise"}', "'side'"),
    ],
)
def test_wrong_settings_are_found_before_a_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, message: str
) -> None:
    def fail(*_: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "_launch", fail)
    with pytest.raises(StrettoError, match=message) as caught:
        launch.start(load_settings(write_settings(tmp_path, pp=2), ["parallel.tp=2", change]), ["stretto"])
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[2] / "examples").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_example_fits_its_layout(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if example.stem in ("adapter", "pretrained"):
        monkeypatch.chdir(tmp_path)
        write_pretrained(tmp_path / "llama", "llama", vocab_size=4096)
    settings = load_settings(example)
    # The one is for planning alone; the others train on a machine of two cores.
    assert settings.parallel.world == (1024 if example.stem == "gpt3_175b" else 2)
    with torch.device("meta"):
        model = build_model(settings.model, settings.data.vocab_size, 0)
    said: list[str] = []
    assert (layout_of_run(model, settings, said.append).tensor is None) == (settings.parallel.tp == 1)
    assert said == []


# A rank among the others.


CPU, ALONE = torch.device("cpu"), World()


@pytest.fixture
def accelerators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with two of them, with one whose driver PyTorch does not see, or one of another kind."""
    what = request.param
    monkeypatch.setattr(preload, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: what == "two")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: what == "xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    if what == "unseen":
        (tmp_path / "nvidia0").touch()


MANY = World(size=4, local_size=4)


@pytest.mark.parametrize(
    ("accelerators", "here", "device", "note", "refusal"),
    [
        ("two", ALONE, torch.device("cuda", 0), None, None),
        ("two", World(7, 8, 2, local_rank=1), torch.device("cuda", 1), None, None),
        ("two", MANY, CPU, "too few for its 4 ranks", "has 2: choose a layout"),
        ("none", ALONE, CPU, None, r"has 0: .*training.device = 'cpu'"),
        ("unseen", ALONE, CPU, "NVIDIA, which this PyTorch", "accelerators of NVIDIA, .* install"),
        ("xpu", ALONE, CPU, "kind 'xpu'", "kind 'xpu'"),
    ],
    indirect=["accelerators"],
)
@pytest.mark.usefixtures("accelerators")
def test_a_rank_has_an_accelerator_where_there_is_one_for_each(
    here: World, device: torch.device, note: str | None, refusal: str | None
) -> None:
    assert device_for("auto", here) == device
    assert device_for("cpu", here) == CPU
    assert device_note("cpu", here) is None, "as it was asked for"
    assert (device_note("auto", here) is None) if note is None else note in str(device_note("auto", here))
    if refusal is None:
        assert device_for("cuda", here) == device
    else:
        with pytest.raises(UsageError, match=refusal):
            device_for("cuda", here)


def test_a_step_is_replayed_on_accelerators_only() -> None:
    check_graph(True, torch.device("cuda", 0))
    check_graph(False, CPU)
    with pytest.raises(UsageError, match="processors"):
        check_graph(True, CPU)


@pytest.mark.parametrize(
    ("size", "layout", "words"),
    [
        (2, {"pp": 2, "tp": 2, "dp": 2}, "parallel.pp = 2 times .*dp = 2 times .*tp = 2 needs 8 ranks"),
        (1, {"tp": 2}, "parallel.tp = 2 needs 2 ranks"),
        (3, {}, "parallel.pp = 1 needs 1 rank, but WORLD_SIZE is 3"),
        (8, {"pp": 2, "tp": 2, "dp": 2}, None),
    ],
)
def test_there_are_as_many_ranks_as_the_layout_needs(
    size: int, layout: dict[str, int], words: str | None
) -> None:
    if words is None:
        world.check_size(World(0, size), Parallel(**layout))
    else:
        with pytest.raises(UsageError, match=words):
            world.check_size(World(0, size), Parallel(**layout))


def test_the_environment_names_the_rank_and_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [threads(None, n) for n in (1, 3, 16)] == [8, 2, 1]
    assert threads(5, 2) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(None, 1) == 3
    assert world.crowding(4, 2) is None
    assert "8 ranks of 2 threads share 8 cores" in str(world.crowding(8, 2))
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RANK = 'one'"):
        world.environment()


def test_ranks_of_two_kinds_are_refused_on_all() -> None:
    store = HashStore()
    store.set("device/0", "cuda")
    with pytest.raises(UsageError, match="rank 1 would compute on a processor and rank 0 on an accelerator"):
        check_kinds(store, 1, 2, CPU)
    store.set("device/0", "cpu")
    check_kinds(store, 1, 2, CPU)


def test_a_port_that_another_program_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "2"}
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(StrettoError, match=f"could not meet .*:{port}: .*another program has the port"):
            join(World(rank=0, size=2, local_size=2))


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(RuntimeError) as caught:
        ProcessGroupGloo.create_device(interface="none0")
    assert "'none0'" in what_to_check(caught.value, 2)
    other = RuntimeError("The client socket has timed out after 300000ms")
    assert "MASTER_ADDR" in what_to_check(other, 2)
