#!/bin/bash
# Runs the commands of docs/first_gpu.md in an empty folder and writes a report to be pasted into an issue.
#   docs/first_gpu.sh            # those of one GPU, and of two where there are two; about 10 minutes
# Exits with the number of commands that failed.
repo=$(cd "$(dirname "$0")/.." && pwd)
train="python $repo/train.py --accelerator cuda"
test="python $repo/test.py --accelerator cuda"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if ((gpus == 0)); then
    python -c 'import torch; print("torch", torch.__version__, "finds no GPU; it was built for CUDA", torch.version.cuda)' >&2
    exit 1
fi
folder=$(mktemp -d) report=$PWD/first_gpu_report.md failed=0
cd "$folder" || exit

# try WHAT-MUST-BE-SEEN COMMAND: a regular expression of the output, and a command that ends with code 0
try() {
    echo "... $2"
    local began=$SECONDS code=0
    bash -c "$2" >output 2>&1 || code=$?
    if [[ $code == 0 ]] && grep -Eq -- "$1" output; then
        echo "- ok, $((SECONDS - began)) s: \`$2\`" >>"$report"
        grep -Eo -- "$1" output | tail -1 | sed 's/^/    /' >>"$report"
    else
        failed=$((failed + 1))
        printf -- '- **FAILED**, code %s, without `%s`: `%s`\n```\n%s\n```\n' "$code" "$1" "$2" "$(tail -40 output)" >>"$report"
    fi
}

echo "# First GPU" >"$report"
try '.+, .+' "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
try 'torch .* cuda .*' "python -c 'import torch; print(\"torch\", torch.__version__, \"cuda\", torch.version.cuda)'"
try 'commit .*' "git -C $repo log -1 --format='commit %h'"

try 'finished after 4 of 4' "$train --devices 1 --fast_run --log_interval 1"
try 'best val/accuracy 0.9[0-9]*' "$train --devices 1 --epochs 8"
try 'accuracy 0.9[0-9]*' "$test --out_dir train_out --devices 1"
try 'accuracy 0.9[0-9]*' "python $repo/test.py --accelerator cpu --out_dir train_out --devices 1"
try 'resumed from .*' "$train --devices 1 --resume train_out --epochs 9"
for precision in bf16-mixed 16-mixed bf16-true; do
    try 'best val/accuracy 0.[89][0-9]*' "$train --devices 1 --epochs 8 --precision $precision --out_dir $precision"
done
try 'finished after 38 of 38' "$train --devices 1 --epochs 2 --num_workers 2 --micro_batch_size 16 --max_grad_norm 1"
for mode in default reduce-overhead; do
    try 'finished after 38 of 38' "$train --devices 1 --epochs 2 --compile $mode"
done
# Two processes on one GPU: NCCL takes them for two machines. Not by LL128, see first_gpu.md.
names="MASTER_ADDR=127.0.0.1 MASTER_PORT=29507 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_PROTO=Simple"
both() { echo "for i in 0 1; do NODE_RANK=\$i NCCL_HOSTID=host\$i $names $* & done; wait"; }
try 'finished after 38 of 38' "$(both "$train --devices 1 --num_nodes 2 --strategy ddp --epochs 2 --out_dir nccl")"
try 'finished after 57 of 57' "$(both "$train --devices 1 --num_nodes 2 --strategy ddp --epochs 3 --resume nccl")"
try '^[0-9]+ passed.*' "python -m pytest -m gpu -p no:cacheprovider $repo/tests/template/test_gpu.py"

if ((gpus > 1)); then
    try 'effective_batch_size 64 = 2 device' "$train --devices 2 --epochs 8 --out_dir two"
    try 'accuracy 0.9[0-9]*' "$test --out_dir two --devices 2"
    try 'resumed from .*' "$train --devices 1, --strategy auto --resume two --epochs 9"
    try 'finished after 38 of 38' "torchrun --nproc_per_node 2 $repo/train.py --accelerator cuda --epochs 2"
    # dp trains like one device: the same losses, up to rounding.
    try 'the losses differ by at most 0.0[0-4]' "
        $train --devices 1 --epochs 2 --dropout 0 --logger_name csv --out_dir one
        $train --devices 2 --epochs 2 --dropout 0 --logger_name csv --out_dir dp --strategy dp
        python - <<'PYTHON'
import csv, glob

losses = [
    [float(row['train/loss']) for row in csv.DictReader(open(glob.glob(f'*-{name}/logs/csv/metrics.csv')[0]))]
    for name in ('one', 'dp')
]
print('the losses differ by at most', f'{max(abs(x - y) for x, y in zip(*losses, strict=True)):.4f}')
PYTHON"
    # A rank that is killed: the other one ends, at the latest 60 seconds after --timeout. It may be killed by NCCL, and
    # then says nothing.
    try 'the run has ended' "$train --devices 2 --epochs 2000 --timeout 30 --out_dir killed & run=\$!
        sleep 40; kill -9 \$(pgrep -P \$run -f train.py | head -1)
        timeout 150 tail --pid=\$run -f /dev/null && echo the run has ended"
    try 'finished after 38 of 38' "git clone -q $repo sharded && git -C sharded apply recipes/cluster/sharded.patch &&
        python sharded/train.py --accelerator cuda --devices 2 --epochs 2 --out_dir sharded-out \
        --strategy model_parallel"
fi
echo "$failed failed; the report is $report"
exit "$failed"
