#!/bin/bash
# Runs a command on two hosts made out of this one machine: network namespaces joined by a cable, with the files in
# common. To try several machines where there is but one; as root, with iproute2. In the repository, for example:
#   recipes/two_hosts.sh python train.py --accelerator cpu --num_nodes 2 --devices 2 --strategy ddp
#   recipes/two_hosts.sh 'fabric run --accelerator cpu --num_nodes 2 --devices 2 --strategy ddp \
#       --node_rank $NODE_RANK --main_address $MASTER_ADDR --main_port $MASTER_PORT train.py'
#   recipes/two_hosts.sh 'torchrun --nnodes 2 --nproc_per_node 2 \
#       --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT train.py --accelerator cpu'
# The quotes keep this shell from filling in what each host fills in for itself. Exits with the first host's code, or
# with the second's where the first has ended well. The hosts and all that runs on them end with this script.
set -e
name=host$$- pids=()
clean_up() {
    for i in 0 1; do
        ip netns pids $name$i | xargs -r kill -9
        ip netns del $name$i
    done 2>/dev/null
}
trap clean_up EXIT
trap 'kill "${pids[@]}"' TERM INT

ip netns add ${name}0
ip netns add ${name}1
ip link add eth0 netns ${name}0 type veth peer name eth0 netns ${name}1
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
for i in 0 1; do
    ip -n $name$i addr add 10.77.0.$((i + 1))/24 dev eth0
    ip -n $name$i link set eth0 up
    ip -n $name$i link set lo up
done
for i in 0 1; do
    NODE_RANK=$i ip netns exec $name$i unshare --uts \
        bash -c 'echo host$NODE_RANK > /proc/sys/kernel/hostname; exec bash -c "$1"' - "$*" &
    pids[i]=$!
done
set +e
for pid in "${pids[@]}"; do
    wait $pid
    result=$?
    while kill -0 $pid 2>/dev/null; do wait $pid; result=$?; done  # a signal has interrupted the first wait
    code=$((code ? code : result))
done
exit $code
