#!/bin/bash
# Names N idle GPUs of this machine: no process on them, less than 5 % of their memory in use. 1 where N is not given.
#   CUDA_VISIBLE_DEVICES=$(recipes/idle_gpus.sh 2) python train.py --accelerator cuda
# Where there are too few it says so and names none; with `--accelerator cuda` the training does not go to the CPU then.
wanted=${1:-1}
fail() {
    echo "idle_gpus.sh: $1" >&2
    exit 1
}
[[ $wanted =~ ^[1-9][0-9]*$ ]] || fail "how many? got '$wanted'"
command -v nvidia-smi >/dev/null || fail "this machine has no nvidia-smi"
gpus=$(nvidia-smi --query-gpu=uuid,memory.used,memory.total --format=csv,noheader,nounits) || fail "$gpus"
busy=$(nvidia-smi --query-compute-apps=gpu_uuid --format=csv,noheader) || fail "$busy"
idle=() all=0
while IFS=', ' read -r uuid used total; do
    all=$((all + 1))
    [[ $busy != *"$uuid"* ]] && ((20 * used < total)) && idle+=("$uuid")
done <<<"$gpus"
((${#idle[@]} >= wanted)) || fail "$wanted GPU(s) wanted, but ${#idle[@]} of $all are idle"
IFS=,
echo "${idle[*]:0:wanted}" # by UUID: CUDA may number them in another order than nvidia-smi
