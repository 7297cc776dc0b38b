"""What the tests of this folder take for your project: the one file here that you edit. Make thresholds, delays,
warm-ups and what comes every N epochs small in SMALL: what acts after the ten steps of a run is not tried."""

# The options of a run of 10 steps, in epochs of 4. A step has two micro-batches. Every step is logged; 5 and 10 are
# validated; 7 and 10 are saved. It is killed in step 10, and resumed after step 7, in the middle of an epoch, so that
# what comes every 2, 3, 5 or 6 steps is out of phase. Add what your project needs, such as a data_dir, or a size for a
# large model. A relative data_dir begins at the repository. Where the data are elsewhere, as for CI, commit a few
# samples of each set, and add their folder, such as "data_dir": "tests/data". A run takes 64 samples for training and
# 80 for validation; fewer of the latter do.
SMALL = {
    "root_dir": ".",
    "out_dir": "run",
    "accelerator": "cpu",
    "devices": "1",
    "num_nodes": "1",
    "precision": "32-true",  # 16-mixed needs a GPU
    "compile": "none",  # takes a minute, and may change the bits of a resume
    "num_workers": "0",
    "effective_batch_size": "16",
    "micro_batch_size": "8",
    "max_steps": "10",
    "warmup_epochs": "1",
    "limit_train_batches": "4",
    "limit_val_batches": "5",  # 80 samples: parts of 27, 27 and 26 on one process, ten of 8 on two
    "log_interval": "1",
    "val_interval": "5",
    "checkpoint_interval": "7",
    "max_grad_norm": "0.1",  # so that it clips
    "num_checkpoint_keep": "0",
    "logger_name": "csv",
}
# The columns of metrics.csv that are measured, and differ from run to run. If you log another one, add it.
MEASURED = {"samples_per_second", "data_wait", "peak_memory_mb", "tokens_per_second", "mfu"}

# How far the losses, and the results of a validation, of two processes may be from those of one: rounding of float32,
# relative to the largest. (In other precisions as much more as their numbers are coarser.) It grows where a network has
# kinks, such as ReLU, or an adversary. With BatchNorm, whose statistics are those of the first process, give the second
# a larger value, or convert it as docs/training.md does.
TRAIN_TOLERANCE = 1e-6
VAL_TOLERANCE = 1e-6
SCORE = 10  # times as much for a metric, which may divide by a difference, as R2 does
# Where a validation draws random numbers, two processes may be as many times farther from one as another seed is. Right
# edits were up to 3 times as far, sums over a batch in place of means more than 400 times. The largest distance of four
# seeds counts. Of a result that is normally distributed, they are as near by chance in one of 10,000 cases.
RANDOM_TOLERANCE = 10
# Results of a validation that are not compared, since they depend on the size of a batch, as a contrastive loss does.
BY_BATCH: set[str] = set()  # such as {"val/loss"}
SHARED_SAMPLES = 0.01  # the share of the samples of a set that may be in another set, too
WORKERS = "2"  # data workers of one of the resumes; 0 where a dataset cannot have any
HANGS = 60  # seconds with hardly any work, after which a process is taken to hang
