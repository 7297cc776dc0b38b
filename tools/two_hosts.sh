#!/bin/bash
# Runs a command on two hosts, host0 and host1, made out of this one machine: network namespaces joined by a cable, with
# the files in common. To try several machines where there is but one; as root, with iproute2. In the repository:
#   tools/two_hosts.sh python train.py --accelerator cpu --num_nodes 2 --devices 2 --strategy ddp
#   tools/two_hosts.sh 'fabric run --accelerator cpu --num_nodes 2 --devices 2 --strategy ddp --node_rank $NODE_RANK \
#       --main_address $MASTER_ADDR --main_port $MASTER_PORT train.py'
#   tools/two_hosts.sh 'torchrun --nnodes 2 --nproc_per_node 2 --node_rank $NODE_RANK --master_addr $MASTER_ADDR \
#       --master_port $MASTER_PORT train.py --accelerator cpu'
#   TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 tools/two_hosts.sh torchrun --nnodes 1:2 --nproc_per_node 2 \
#       --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint host0:29500 train.py --accelerator cpu --resume auto
# In quotes, $NODE_RANK and the others are those of each host. Exits with the code of host0, or, where that is 0, of
# host1. The hosts, and all that runs on them, end with this script.
name=two_hosts_$$_ hosts=$(mktemp) pids=() code=0
clean_up() {
    for i in 0 1; do
        ip netns pids $name$i | xargs -r kill -9
        ip netns del $name$i
    done 2>/dev/null
    rm "$hosts"
}
trap clean_up EXIT
trap 'kill "${pids[@]}"' TERM INT

printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 host0' '10.77.0.2 host1' >"$hosts"
set -e
for i in 0 1; do ip netns add $name$i; done
ip link add eth0 netns ${name}0 type veth peer name eth0 netns ${name}1
for i in 0 1; do
    ip -n $name$i addr add 10.77.0.$((i + 1))/24 dev eth0
    ip -n $name$i link set eth0 up
    ip -n $name$i link set lo up
done
export MASTER_ADDR=host0 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
start='echo host$NODE_RANK >/proc/sys/kernel/hostname && mount --bind $0 /etc/hosts && exec bash -c "$1"'
for i in 0 1; do
    NODE_RANK=$i ip netns exec $name$i unshare --uts bash -c "$start" "$hosts" "$*" &
    pids+=($!)
done
set +e
for pid in "${pids[@]}"; do
    wait $pid
    result=$?
    while kill -0 $pid 2>/dev/null; do wait $pid; result=$?; done # a signal ends the first wait early
    code=$((code ? code : result))
done
exit $code
