"""MLflow sees what a run does: `stretto train CONFIG output.callbacks='["examples/log_to_mlflow.py:Logger"]'`

Needs `pip install mlflow`; MLFLOW_TRACKING_URI says where to, by default into the folder `mlruns`.
"""

import mlflow

import stretto


class Logger(stretto.Callback):
    def on_start(self, run):
        mlflow.set_experiment("stretto")
        mlflow.start_run(run_name=run.settings.name)
        for table, keys in run.settings.model_dump(mode="json").items():
            mlflow.log_params(
                {f"{table}.{key}": one for key, one in keys.items()}
                if isinstance(keys, dict)
                else {table: keys}
            )

    def on_step(self, line):
        numbers = {key: float(one) for key, one in line.items() if isinstance(one, int | float)}
        mlflow.log_metrics(numbers, step=line["step"])

    on_eval = on_step

    def on_save(self, path):
        mlflow.set_tag("checkpoint", str(path))

    def on_end(self, error):
        mlflow.end_run("FINISHED" if error is None else "FAILED")
