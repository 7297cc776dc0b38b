#!/bin/bash
# Names N idle GPUs of this machine: no process on them, less than 5 % of their memory in use. 1 where N is not given.
#   CUDA_VISIBLE_DEVICES=$(tools/idle_gpus.sh 2) python train.py --accelerator cuda
# Where CUDA_VISIBLE_DEVICES is set, as in the allocation of a scheduler, it names none but those. Where there are too
# few it says so and names none; with `--accelerator cuda` the training does not go to the CPU then. A GPU looks idle
# until a training is on it: two calls in the same seconds may name the same.
wanted=${1:-1}
fail() {
    echo "idle_gpus.sh: $1" >&2
    exit 1
}
[[ $wanted =~ ^[1-9][0-9]*$ ]] || fail "how many? got '$wanted'"
command -v nvidia-smi >/dev/null || fail "this machine has no nvidia-smi"
gpus=$(nvidia-smi --query-gpu=index,uuid,memory.used,memory.total --format=csv,noheader,nounits) || fail "$gpus"
busy=$(nvidia-smi --query-compute-apps=gpu_uuid --format=csv,noheader) || fail "$busy"
visible=,${CUDA_VISIBLE_DEVICES-all}, # numbers or UUIDs; set and empty: none
idle=() all=0
while IFS=', ' read -r index uuid used total; do
    [[ $visible == ,all, || $visible == *,"$index",* || $visible == *,"$uuid",* ]] || continue
    all=$((all + 1))
    [[ $used =~ ^[0-9]+$ && $total =~ ^[0-9]+$ ]] || used=0 total=1 # [N/A], as where it is the CPU's memory
    [[ $busy != *"$uuid"* ]] && ((20 * used < total)) && idle+=("$uuid")
done <<<"$gpus"
((${#idle[@]} >= wanted)) || fail "$wanted GPU(s) wanted, but ${#idle[@]} of $all are idle"
IFS=,
echo "${idle[*]:0:wanted}" # by UUID: CUDA may number them in another order than nvidia-smi
