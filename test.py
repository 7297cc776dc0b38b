"""Evaluates a run of train.py, on any number of devices, each sample once.

python test.py --out_dir 20261121-093000-train_out
python test.py --out_dir train_out --checkpoint last --split val --predictions
"""

from config import EvalConfig, TrainConfig
from runtime import cli

if __name__ == "__main__":
    CONFIG = cli.parse_or_exit(cli.parse_test, EvalConfig)  # before the heavy imports, as in train.py

import torch

from data import build_datasets
from runtime.evaluation import EvalRun, Outputs, run_test
from runtime.launch import run_and_exit
from runtime.loader import Loader, eval_batches
from runtime.ranks import gather_batches
from train import build_metrics, build_model, validate


def test(run: EvalRun):
    """Evaluates the weights of a checkpoint, in each process."""
    fabric = run.fabric
    config = run.train_config
    model = build_model(config, run.dataset)
    run.load_weights(model)
    model = fabric.setup_module(model)
    metrics = build_metrics(config, run.dataset).to(fabric.device)
    batch_size = run.config.batch_size or run.micro_batch_size
    batches = eval_batches(len(run.dataset), batch_size, fabric)
    loader = Loader(fabric, run.dataset, batches, config)
    # Of compute_loss in each batch: tensors with a row per sample, such as logits and targets.
    outputs = Outputs(is_kept=run.config.predictions)
    results = validate(fabric, config, model, loader, metrics, kept=outputs)
    run.report(results, outputs)
    if run.config.predictions:
        kept = gather_batches(outputs.kept)  # of all ranks, in the order of the samples; on rank 0 alone
        run.save("predictions", [torch.cat(parts) for parts in zip(*kept, strict=True)])


def main(config: EvalConfig) -> int:
    """Evaluates the run in `config.out_dir`. Returns the exit code. Raises ConfigError and RunError."""
    return run_test(test, build_datasets, config, TrainConfig)


if __name__ == "__main__":
    run_and_exit(main, CONFIG)
