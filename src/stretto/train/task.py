"""What a run trains: its data, its model and loss, and its report at the end.

Text is one kind of task: tokens, a model of `[model]`, its next-token loss, and a sample of text at the end.
A task of your own is a file of Python that `task.file` names, with a function `task(config, seed) -> Task`.
Every rank calls it, and so does the launcher: it must give the same each time. The room reads that file and
runs it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import extract_tb, format_list, walk_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stretto.batch import tree
from stretto.batch.loss import Loss
from stretto.config import MoESettings, TaskSettings, TrainSettings
from stretto.errors import StrettoError, UsageError, near_path
from stretto.files.say import Say, silent
from stretto.ir.stage_maps import is_own
from stretto.models.build import build_model, counted_loss_function
from stretto.models.gpt import IGNORED, count_targets, generate, inputs_and_targets
from stretto.models.moe import balance_loads
from stretto.schedule.csv import read_csv
from stretto.train.checkpoint_files import TOKENIZER
from stretto.train.encode import count
from stretto.train.rows import batches_of, by_step, example_of
from stretto.train.sources import Source, Sources
from stretto.train.text import given_tokenizer

if TYPE_CHECKING:
    from stretto.runtime import Runner  # which a launcher does without

FUNCTION = "task"
"""What the file of a task defines."""
MODULE = "stretto_task_"
"""How the modules of such files are called: this and the file's name."""
KEPT = "task.sha256"
"""What a checkpoint keeps of a task of your own: its digest."""

SAMPLE_PROMPT_TOKENS = 16
"""How much held-out text a sample continues: a line or two of code, enough to see whether it goes on well."""
SAMPLE_TEMPERATURE = 0.8
"""Below 1, so that small models stay readable. Assumed."""

Batches = Callable[[int, int], Any]
"""(step, global_batch) -> the batch of a step: a tree of tensors whose first dim is `global_batch`, or less
in a smaller last batch; its shapes may differ between steps. It must follow from the two alone, noise
included, so that a resumed run goes on with the same."""

AfterStep = Callable[["Runner", dict[str, torch.Tensor]], None]
"""(runner, metrics) -> nothing. Every rank calls it after the optimizer's step, with what the loss function
returned besides its loss, the same on all ranks; what it leaves in `metrics` is logged. It may write into the
Runner's buffers, as `models.moe.balance_loads` does."""

Report = Callable[[nn.Module, Path, Say], Mapping[str, Any]]
"""(model, folder, say) -> what the run's summary is to have besides its own. At the end rank 0 calls it with
the trained model on the CPU, in eval() mode, without gradients; it may write files (samples, pictures) into
the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run trains.

    model: makes it with fresh weights, the same each time; under `torch.device("meta")` it has no values.
    loss: as `stretto.capture` takes it. train, held_out: batches. digest: equal for equal data. fill: where
    the model's parameters come without values (`models.build.hollow`), gives a Runner those that its rank
    has; every rank calls it. after_step: what a step does besides the optimizer's. report: what to do at the
    end, if anything. unit, size: in what speed is counted, and how many of it one sample has.
    """

    model: Callable[[], nn.Module]
    loss: Loss
    train: Batches
    held_out: Batches
    digest: str
    fill: Callable[[Runner, nn.Module], None] | None = None
    after_step: AfterStep | None = None
    report: Report | None = None
    unit: str = "samples"
    size: int = 1
    held_out_words: tuple[str, str] = ("", "")
    """What is printed at the end after the held-out loss: its unit, and what to compare it with."""
    example: Callable[[int], Any] | None = None
    """global_batch -> a batch of the largest shape, whose values do not count, where batches have several:
    its plan is made first, the others at the first step that needs them."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """What the run's summary has besides its own."""
    where: str = ""
    """Where the data is."""
    kept: tuple[str, str] = ("", "")
    """Name and content of a file that checkpoints have, the same in one to go on from."""
    vocab_size: int = 0
    """Of text, how many tokens there are."""
    state: Callable[[], dict[str, Any]] | None = None
    restore: Callable[[Mapping[str, Any]], None] | None = None
    """Where batches do not follow from the step at once, as those of a stream: what a checkpoint has of the
    data as JSON, with its `digest`; and how a run goes on from that."""
    key: str = "task.file"
    source: str = "what task.file makes"
    differing: str = "the file differs, or what it reads"
    """For messages: the setting that data comes from, in words, and why it may differ between machines."""

    def first_batch(self, global_batch: int) -> Any:
        """What the first plan is for."""
        return self.train(0, global_batch) if self.example is None else self.example(global_batch)

    def counted(self, batch: Any) -> int:
        """How many of `unit` a batch has. Of rows that are filled up, what is predicted counts."""
        if self.example is None or not isinstance(batch, Mapping):
            return tree.rows(batch) * self.size
        return int(count_targets(batch))


def check_files(settings: TrainSettings) -> None:
    """Raises UsageError for files that settings name and planning reads, before anything takes long."""
    schedule = settings.parallel.schedule
    if isinstance(schedule, str) and is_own(schedule):
        read_csv(schedule)


def own_task(settings: TaskSettings, seed: int) -> Task:
    """The task that a file defines. Raises UsageError for a file that cannot be read or run, and for one that
    gives no task."""
    path, what = Path(settings.file).expanduser(), f"task.file = {settings.file!r}"
    try:
        code = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{what} cannot be read ({error.strerror}): {near_path(path, '{} ')}give "
            "a file of Python, relative to the working directory"
        ) from None
    if path.suffix != ".py":
        raise UsageError(f"{what} is no file of Python: its name must end in .py")
    try:
        module = run_file(path)
        make = getattr(module, FUNCTION, None)
        made = make(dict(settings.config), seed) if callable(make) else None
    except StrettoError:
        raise
    except (Exception, SystemExit) as error:
        config = f", with task.config = {dict(settings.config)}"
        raise UsageError(f"{what}{_line(error, path)}: {_in_words(error)}{config}") from error
    if not isinstance(made, Task):
        raise UsageError(
            f"{what} has no function {FUNCTION}(config, seed) that returns a stretto.train.task.Task, "
            f"and not {made!r:.60}"
        )
    digest = hashlib.sha256(code + made.digest.encode()).hexdigest()
    return replace(made, digest=digest, where=made.where or str(path), kept=(KEPT, digest))


def run_file(path: Path) -> ModuleType:
    """A file of Python as a module, which is known by its name while it runs and from then on, as dataclasses
    need it. Raises what it raises."""
    name = f"{MODULE}{path.stem}_{hashlib.sha256(bytes(path.absolute())).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def of_user(error: BaseException) -> str | None:
    """The message for an error that the code of a task's file raised, or let through, later than its function
    `task`: file, function and line, and what of the traceback is from there on. None for others."""
    frames = [*walk_tb(error.__traceback__)]
    own = [
        at
        for at, (frame, _) in enumerate(frames)
        if str(frame.f_globals.get("__name__", "")).startswith(MODULE)
    ]
    if not own:
        return None
    last, line = frames[own[-1]]
    trace = "".join(format_list(extract_tb(error.__traceback__)[own[0] :])).rstrip()
    return (
        f"task.file: {frames[own[0]][0].f_code.co_name}() in {last.f_code.co_filename}, line "
        f"{line}, ended with {_in_words(error)}\n{trace}\n{_in_words(error)}"
    )


def _line(error: BaseException, path: Path) -> str:
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename) == path]
    lines += [error.lineno] if isinstance(error, SyntaxError) else []
    return f", line {lines[-1]}" if lines else ""


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# Text and other data.


def task_of(settings: TrainSettings, say: Say, begin: Say = silent) -> Task:
    """What the settings say to train: text, or a task of your own. `say` takes notices, `begin` what takes
    long, before it begins.

    Raises UsageError for text that cannot be read, and for a file that gives no task.
    """
    check_files(settings)
    if settings.task is not None:
        begin(f"making the task of {settings.task.file}")
        return own_task(settings.task, settings.training.seed)
    if settings.model.pretrained is not None or settings.data.tokenizer is not None:
        begin("reading the tokenizer")
    given = given_tokenizer(settings.model, settings.data.tokenizer)
    return data_task(settings, Sources(settings, given, say, begin).all())


def data_task(settings: TrainSettings, data: Source) -> Task:
    """Data that is prepared, as a task."""
    training, length, tokenizer = settings.training, settings.data.sequence_length, data.tokenizer
    kept = (KEPT, data.digest) if tokenizer is None else (TOKENIZER, tokenizer.to_str())
    held_out = by_step(data.held_out)

    def report(model: nn.Module, folder: Path, say: Say) -> Mapping[str, Any]:
        assert tokenizer is not None
        ids, labels = inputs_and_targets(held_out(0, 1))
        # Of a chat or a pair what comes before the first answer, else some tokens.
        answers = torch.nonzero(labels[0] != IGNORED)[0].item() + 1
        prompt = ids[0, : answers if answers > 1 else SAMPLE_PROMPT_TOKENS]
        generator = torch.Generator().manual_seed(training.seed)
        made = generate(model, prompt, training.sample_tokens, SAMPLE_TEMPERATURE, generator, length).tolist()
        before, after = (tokenizer.decode(part) for part in (made[: len(prompt)], made[len(prompt) :]))
        say("")
        say(f"a sample, continuing held-out text {before!r}:")
        for line in after.splitlines():
            say(f"  | {line}")
        return {"sample": after}

    source = settings.model.pretrained
    vocab_size = settings.data.vocab_size if tokenizer is None else count(tokenizer)

    def make() -> nn.Module:
        return build_model(settings.model, vocab_size, training.seed, empty=source is not None)

    def fill(runner: Runner, model: nn.Module) -> None:
        from stretto.saving import pretrained  # with all that a Runner needs, which a launcher does without

        assert source is not None
        pretrained.fill(runner, model, source)

    def state() -> dict[str, Any]:
        return {"digest": data.digest, "streams": {of: one.state for of, one in data.streams.items()}}

    def restore(state: Mapping[str, Any]) -> None:
        for of, stream in data.streams.items():
            if of not in state["streams"]:
                raise UsageError(
                    f"{stream.key}.stream is another than those of the checkpoint, which has no place in it: "
                    "set [data] back (held_out_fraction, too), or start again with --no-resume"
                )
            stream.restore(state["streams"][of])

    entropy = data.unigram_entropy_nats
    alone = "" if entropy is None else f"; token frequencies alone give {entropy:.4f}"
    return Task(
        model=make,
        fill=fill if source is not None else None,
        loss=counted_loss_function(settings.model),
        train=batches_of(settings, data.train, data.table),
        held_out=held_out,
        example=None if settings.data.is_windows else example_of(settings.data),
        digest=data.digest,
        after_step=_balance(settings),
        report=report if training.sample_tokens and tokenizer is not None else None,
        unit="tokens",
        size=length,
        held_out_words=(" nats a token", alone),
        summary={} if entropy is None else {"unigram_entropy": entropy},
        where=data.where,
        kept=kept,
        state=state,
        restore=restore,
        key="data.sources" if settings.data.sources else "data.paths",
        source="the data",
        differing="the data differs, or the tokenizers package",
        vocab_size=vocab_size,
    )


def _balance(settings: TrainSettings) -> AfterStep | None:
    """For routers whose biases follow their experts' loads."""
    model = settings.model
    if not isinstance(model, MoESettings) or not model.bias_rate:
        return None
    rate = model.bias_rate
    return lambda runner, metrics: balance_loads(runner.named_buffers(), metrics, rate)
