"""MLflow sees what a run does: `output.callbacks = ["examples/log_to_mlflow.py:Logger"]`.

Needs `pip install mlflow`; MLFLOW_TRACKING_URI says where to, by default into the folder `mlruns`.
"""

import mlflow

import stretto
from stretto.files.settings_file import flat


class Logger(stretto.Callback):
    def on_start(self, run):
        mlflow.set_experiment("stretto")
        mlflow.start_run(run_name=run.settings.name)
        mlflow.log_params(dict(flat(run.settings.model_dump(mode="json"))))

    def on_step(self, line):
        numbers = {key: float(one) for key, one in line.items() if isinstance(one, int | float)}
        mlflow.log_metrics(numbers, step=line["step"])

    on_eval = on_step

    def on_save(self, path):
        mlflow.set_tag("checkpoint", str(path))

    def on_end(self, error):
        mlflow.end_run("FINISHED" if error is None else "FAILED")
