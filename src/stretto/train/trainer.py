"""Training from settings, as one of the ranks: from data to a trained model, a report and checkpoints.

    1. Data, model, capture, plan: every rank does the same, on what they have agreed to be the same.
    2. A Runner for this rank's stages and parts, one for evaluation, and AdamW; the rest of the model is
       dropped.
    3. Go on from a checkpoint, if there is one.
    4. The steps: batch, forward and backward, clip, update; now and then a line, a measurement, a checkpoint.
    5. The end: held-out loss; then the ranks part, and rank 0 adds the task's report, and predicted against
       measured.

Everything random or ordered is a function of seeds and the step, so that a resumed run goes on bit for bit.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from stretto.batch.loss import has_metrics, loss_alone
from stretto.capturing import capture
from stretto.config import TrainSettings
from stretto.errors import RunError
from stretto.files.say import silent
from stretto.ir.metrics import ObservedRun
from stretto.ir.timeline import Timeline
from stretto.ir.work import Work
from stretto.planning.make_plan import plan as make_plan
from stretto.report.grid import fitted
from stretto.report.load import dropped_words
from stretto.runtime import Runner
from stretto.saving import face
from stretto.train.agreement import agreed_checkpoint, check_shared, take_folders
from stretto.train.callbacks import Callbacks, RunStart, made_of
from stretto.train.checkpoint import check_state
from stretto.train.checkpoint_files import latest_in
from stretto.train.clip import GradientClip
from stretto.train.failure import enter_phase, is_launched
from stretto.train.going_on import (
    Checkpoint,
    check_compatible,
    find_checkpoint,
    finished_words,
    is_finished,
)
from stretto.train.heldout import Evaluation, held_out_steps
from stretto.train.interrupt import Interrupted, Interrupts
from stretto.train.job import kept_by, layout_of_run, move
from stretto.train.optimizer import learning_rate, make_optimizer, state_of
from stretto.train.peers import heartbeat
from stretto.train.progress import Progress
from stretto.train.replan import plans_of
from stretto.train.results import (
    Board,
    Metrics,
    Results,
    begin_run,
    finish,
    observed_line,
    set_earlier_aside,
    speed_line,
)
from stretto.train.saves import Saves
from stretto.train.task import Task, task_of
from stretto.train.world import World, device_note, leave


class Trainer:
    """One rank's training run. `step` counts optimizer steps done; it may be read at any time. `missed` is
    called, by another thread, with the number of a rank that gives no sign of life, and its phase.
    `interrupts`: where signals come."""

    def __init__(self, settings: TrainSettings, world: World, progress: Progress | None = None) -> None:
        """Nothing happens yet; `run` does everything. progress: shows it, from before there was a trainer."""
        self.settings = settings
        self.world = world
        self.step = 0
        self.missed: Callable[[int, str], None] = lambda rank, phase: None
        self.interrupts = Interrupts(lambda _: None)
        self.progress = progress if progress is not None else Progress(world.rank == 0)
        self.progress.steps, self.progress.log_every = settings.training.steps, settings.training.log_every
        self.callbacks = Callbacks()
        self.timelines: list[Timeline] = []
        self._step_s: list[float] = []
        self._returned: dict[str, Any] = {}
        self._works: dict[int, Work] = {}
        self._held_out_at: tuple[int, float] | None = None
        self._seen: ObservedRun | None = None
        self._locks = ExitStack()

    def run(self) -> None:
        """Steps 1 to 5; every rank must call it. Raises StrettoError for what the user can mend."""
        try:
            with heartbeat(self.world, self.missed):
                results = self._trained()
            # They part here, because a long sample may take more time than they would wait for rank 0.
            leave(self.world)
            enter_phase("the report")
            if results is not None and self.world.rank == 0:
                finish(results, self.progress.say)
        finally:
            self.progress.stop()  # also where it has ended before its first step
            self._locks.close()

    def _trained(self) -> Results | None:
        """Steps 1 to 4, and the held-out loss; None for a run that had come to its end before."""
        task = self._prepare()
        if task is None:
            return None
        with self.progress, self.callbacks, self._saves:
            self._train(task)
            return Results(
                settings=self.settings,
                plan=self.runner.plan,
                task=task,
                steps=self.step,
                losses=tuple(self._losses),
                step_s=tuple(self._step_s),
                held_out_loss=self._held_out(),
                timelines=tuple(self.timelines),
                seen=self._seen,
                checkpoint=latest_in(self.settings.checkpoint_dir),
                started_at_s=self.progress.started_at_s,
            )

    # Steps 1 to 3.

    def _prepare(self) -> Task | None:
        """None for a run that has come to its end, which stays as it is."""
        settings, say = self.settings, self.progress.say
        begin = self.progress.begin
        note = device_note(settings.training.device, self.world)
        if note is not None and not is_launched():  # the launcher has printed it
            say(f"note: {note}")
        begin("looking at the run's folders")
        take_folders(self.world, settings, self._locks)
        # The launcher has prepared it, and printed so.
        task = task_of(settings, silent if is_launched() else say, begin)
        start = agreed_checkpoint(self.world, settings, task, partial(find_checkpoint, settings))
        if start is not None:
            for line in check_compatible(*start, settings, task):
                say(f"note: {line}")
        if self._is_finished(start):
            say(finished_words(settings))
            return None
        if start is not None:
            check_state(start[1], settings.optimizer)
        check_shared(self.world, settings.checkpoint_dir)
        begin("capturing the model")
        model, loss = task.model(), task.loss
        batch = task.first_batch(settings.training.global_batch)
        layout_of_run(model, settings, say)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is not sharded over ", UserWarning)  # just printed
            device = self.world.device.type
            job = capture(model, batch, loss, settings.layout, precision=settings.precision, device=device)
        kept = kept_by(settings, say)
        begin("planning")
        plan = make_plan(
            job,
            cluster="local",
            order=settings.planning.order,
            steps=settings.training.steps,
            search_s=settings.planning.search_s,
            optimizer=state_of(settings.optimizer),
            say=self.progress.detail if self.world.rank == 0 else None,
            kept=kept,
        )
        for line in fitted(str(plan)).splitlines():
            say(line)
        move(model, plan, self.world.rank, self.world.device)
        several = task.example is not None or settings.task is not None  # shapes of batches
        self.runner = Runner(
            plan,
            model,
            seed=settings.training.seed,
            empty=task.fill is not None,
            compile=settings.compile,
            cuda_graph=settings.cuda_graph,
            optimizer=partial(make_optimizer, settings=settings.optimizer) if job.updates else None,
            plan_for=plans_of(settings, task, plan, kept, device, say) if several else None,
        )
        del job  # which has the model
        begin("preparing the held-out loss")
        held_out = batch if task.example is None else task.held_out(0, settings.training.global_batch)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is not sharded over ", UserWarning)
            self.evaluation = Evaluation(
                *(self.runner, model, held_out, loss),
                parallel=settings.parallel,
                order=settings.planning.order,
                steps=held_out_steps(settings.training),
                search_s=settings.planning.search_s,
                kept=None if kept is None else replace(kept, say=silent),  # printed for the training
                say=self.progress.detail,
            )
        parameters = sum(p.numel() for p in model.parameters())
        say(
            f"model: {type(model).__name__}, {parameters / 1e6:.2f} million parameters, "
            f"{settings.precision}, on {self.world.device_words()}"
        )
        warmup = settings.lr_schedule.warmup_steps
        if warmup > settings.training.steps:
            say(
                f"note: the run ends after {settings.training.steps} of lr_schedule.warmup_steps = {warmup}, "
                "before the rate is at its highest"
            )
        if task.fill is not None and start is None:
            begin("reading weights")
            task.fill(self.runner, model)
            say(f"started from the weights of {settings.model.pretrained or task.where}")
        # The Runners keep what their stages use; the rest of the model goes.
        del model
        gc.collect()
        self.clip: GradientClip | None = None
        if self.runner.optimizer is not None:
            self.optimizer = self.runner.optimizer
        else:
            self.optimizer = make_optimizer([*self.runner.parameters()], settings.optimizer)
            self.clip = GradientClip(self.runner, settings.optimizer.grad_clip_norm)
        self._task = task
        self.progress.unit = task.unit
        self._losses: list[float] = []
        begin("the first step")
        if start is not None:
            state, path = start
            # The settings of this run decide the optimizer's options.
            face.fill(path, self.runner, self.optimizer, options=False)
            self.step = state.step
            self.runner.state.steps = state.draws
            if task.restore is not None and state.data is not None:
                task.restore(state.data)
            say(f"resumed from {path}, after step {state.step}")
        if self.world.rank == 0:
            set_earlier_aside(settings, start is not None, say)
            begin_run(settings.run_dir, settings, plan)
            run = RunStart(settings, plan, settings.run_dir, self.step)
            board = [Board()] if settings.output.tensorboard else []
            self.callbacks = Callbacks([Metrics(run.folder, self.step), *board, *made_of(settings)])
            self.callbacks.call("on_start", run)
        saved = partial(self.callbacks.call, "on_save")
        self._saves = Saves(settings, task, self.runner, self.optimizer, saved)
        return task

    def _is_finished(self, start: Checkpoint | None) -> bool:
        """Whether this very run has come to its end, as rank 0 sees it."""
        return self.world.all_gather(is_finished(self.settings, start))[0]

    # Step 4.

    def _train(self, task: Task) -> None:
        training = self.settings.training
        if self.step >= training.steps:
            self.progress.say(
                f"all {training.steps} steps are done; set training.steps higher to go on, or start again "
                "with --no-resume"
            )
        enter_phase("training")
        with self.interrupts.noting():
            self._take_steps(task)

    def _take_steps(self, task: Task) -> None:
        training, exposed = self.settings.training, None
        while self.step < training.steps:
            begin_s = time.perf_counter()
            batch = task.train(self.step, training.global_batch)
            loss, rate, norm = self._one_step(batch)
            step_s = time.perf_counter() - begin_s
            self._losses.append(loss)
            self._step_s.append(step_s)
            line: dict[str, Any] = {"step": self.step, "loss": loss, "lr": rate, "grad_norm": norm}
            count = task.counted(batch)
            line |= {"metrics": self._returned} if self._returned else {}
            line |= speed_line(task.unit, count, step_s, self.world.size, self._work())
            gathered = self._gather_timeline()
            if gathered is not None:
                exposed = line["exposed_fraction"] = gathered
            self._look(line)
            self.callbacks.call("on_step", line)
            self.progress.show({**line, "step_s": statistics.median(self._step_s[-20:])}, exposed)
            last = self.step == training.steps
            if training.eval_every and self.step % training.eval_every == 0 and not last:
                held_out = self._held_out()
                dropped = "" if self._seen is None else dropped_words(self._seen.evaluation)
                words = f" ({dropped})" if dropped else ""
                self.progress.say(f"step {self.step}: held-out loss {held_out:.4f}{words}")
            self._save_and_end(last)

    def _save_and_end(self, last: bool) -> None:
        """Between two steps, on which ranks agree: a checkpoint where one is due, or a rank was asked to end.

        Raises Interrupted then, and StrettoError for a checkpoint that could not be written.
        """
        every = self.settings.checkpoint.every_steps
        if last or (every and self.step % every == 0):
            self._saves.save(self.step, beside=not last)
        asked, failed = self.world.most(self.interrupts.asked, self._saves.look())
        if failed or last:
            self._saves.wait()
        if asked:
            if self._saves.step != self.step:
                self._saves.save(self.step, beside=False)
            self._saves.wait()
            raise Interrupted(asked)

    def _one_step(self, batch: Any) -> tuple[float, float, float]:
        """Loss, learning rate and gradient norm of the next step, which is then done."""
        settings = self.settings
        rate = learning_rate(settings.lr_schedule, settings.optimizer.lr, settings.training.steps, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        stepped = self.runner.step(batch)
        queued = loss_alone(stepped), self.runner.grad_norm if self.clip is None else self.clip()
        loss, norm = map(float, queued)  # asked for once both are queued: an accelerator goes on meanwhile
        if not math.isfinite(loss) or not math.isfinite(norm):
            what = "nothing was updated" if self.clip is not None else "parameters were updated by it"
            raise RunError(
                f"step {self.step + 1}: the loss is {loss} and the gradient's norm {norm}; {what}. "
                "Lower optimizer.lr, or warm up longer (lr_schedule.warmup_steps), and resume"
            )
        if self.clip is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        returned = stepped[1] if has_metrics(stepped) else {}
        if self._task.after_step is not None:
            self._task.after_step(self.runner, returned)
        self._returned = {name: one.tolist() for name, one in returned.items()}
        self.step += 1
        return loss, rate, norm

    def _work(self) -> Work:
        """That of the plan which the last step took."""
        plan = self.runner.plan_of_step
        if id(plan) not in self._works:
            self._works[id(plan)] = plan.work
        return self._works[id(plan)]

    def _gather_timeline(self) -> float | None:
        """On steps that are logged or traced: the share of the step that is exposed communication. Steps that
        are replayed have no timeline, and the last that has one is taken for all that are traced."""
        training, traced = self.settings.training, self.settings.output.trace_steps
        # Reports compare with the first plan's prediction.
        trace = self.step > training.steps - traced and self.runner.plan_of_step is self.runner.plan
        if self.runner.replayed:
            if trace and not self.timelines:
                self.timelines.append(self.runner.timeline())
            return None
        if not trace and self.step % training.log_every:
            return None
        timeline = self.runner.timeline()
        if trace:
            self.timelines.append(timeline)
        return sum(timeline.exposed_us.values()) / timeline.step_us

    def _look(self, line: dict[str, Any]) -> None:
        """On steps that are logged, and after the last: what the model lets see of those since."""
        training = self.settings.training
        if self.step % training.log_every and self.step != training.steps:
            return
        seen = self.runner.observed()
        if seen:
            before = self.step - seen[0].steps
            known = self._seen or ObservedRun(before, before, (), ())
            self._seen = replace(known, last=before).and_then(self.step, seen)
            line["observed"] = observed_line(seen)

    def _held_out(self) -> float:
        """The held-out loss after the steps done; measured once for each."""
        if self._held_out_at is None or self._held_out_at[0] != self.step:
            training = self.settings.training
            batches = (
                self._task.held_out(number, training.global_batch) for number in range(training.eval_batches)
            )
            self._held_out_at = (self.step, self.evaluation.loss(batches))
            line: dict[str, Any] = {"step": self.step, "held_out_loss": self._held_out_at[1]}
            seen = self.evaluation.observed()
            if seen:
                line["observed"] = observed_line(seen)
                self._seen = replace(self._seen or ObservedRun(self.step, self.step, (), ()), evaluation=seen)
            self.callbacks.call("on_eval", line)
        return self._held_out_at[1]
