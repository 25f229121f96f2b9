"""Weights & Biases sees what a run does: `output.callbacks = ["examples/log_to_wandb.py:Logger"]`.

Needs `pip install wandb`; WANDB_MODE=offline keeps all on this machine.
"""

import wandb

import stretto


class Logger(stretto.Callback):
    def on_start(self, run):
        name = run.settings.name
        # The same id goes on with the same curves where the run goes on from a checkpoint.
        self.run = wandb.init(
            project="stretto", name=name, id=name, resume="allow", config=run.settings.model_dump(mode="json")
        )

    def on_step(self, line):
        self.run.log({key: one for key, one in line.items() if key != "step"}, step=line["step"])

    on_eval = on_step

    def on_end(self, error):
        self.run.finish(exit_code=0 if error is None else 1)
