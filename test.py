"""Evaluates a run of train.py, on any number of devices, each sample once.

python test.py --out_dir 20261121-093000-train_out
python test.py --out_dir train_out --checkpoint last --split val --predictions
"""

from config import TestConfig, TrainConfig
from runtime import cli

if __name__ == "__main__":
    CONFIG = cli.parse_or_exit(cli.parse_test, TestConfig)  # before the heavy imports, as in train.py

from data import build_datasets
from runtime.evaluation import TestRun, run_test
from runtime.launch import run_and_exit
from runtime.loader import Loader, eval_batches
from train import build_metrics, build_model, validate


def test(run: TestRun):
    """Evaluates the weights of a checkpoint, in each process."""
    fabric = run.fabric
    config = run.train_config
    model = build_model(config, run.dataset)
    run.load_weights(model)
    model = fabric.setup_module(model)
    metrics = run.metrics(build_metrics(config, run.dataset))
    batch_size = run.config.batch_size or config.micro_batch_size or config.effective_batch_size
    batches = eval_batches(len(run.dataset), batch_size, fabric)
    loader = Loader(fabric, run.dataset, batches, config, run.resources)
    run.report(validate(fabric, config, model, loader, metrics))


def main(config: TestConfig) -> int:
    """Evaluates the run in `config.out_dir`. Returns the exit code. Raises ConfigError and RunError."""
    return run_test(test, build_datasets, config, TrainConfig)


if __name__ == "__main__":
    run_and_exit(main, CONFIG)
