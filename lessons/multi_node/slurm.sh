#!/bin/sh
# Starts the daemons of `slurm.py`. Runs as process 1 of the new namespaces and ends, with all others, when its standard
# input is closed.
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /run/slurm/state
cd /run/slurm
ip link set lo up
ip link add br0 type bridge
ip addr add 10.97.0.254/24 dev br0
ip link set br0 up
printf '127.0.0.1 localhost\n10.97.0.254 login\n' > hosts
for i in $(seq 0 $LAST); do
    ip netns add node$i
    ip link add port$i type veth peer name eth0 netns node$i
    ip link set port$i master br0 up
    ip -n node$i link set lo up
    ip -n node$i addr add 10.97.0.$((i + 1))/24 dev eth0
    ip -n node$i link set eth0 up
    echo "10.97.0.$((i + 1)) node$i" >> hosts
done
mount --bind hosts /etc/hosts
hostname login
printf %s "$CONFIGURATION" > slurm.conf
unset CONFIGURATION
head -c 1024 /dev/urandom > key
chmod 600 key
munged --force --key-file key --socket munge.sock --pid-file munge.pid --log-file munge.log --seed-file seed
slurmctld
for i in $(seq 0 $LAST); do
    nsenter --net=/run/netns/node$i unshare --uts sh -c "hostname node$i && exec slurmd -N node$i"
done
for i in $(seq 300); do
    test "$(sinfo --noheader --Node --format=%t | grep -c idle)" = $((LAST + 1)) && echo ready && exec cat
    sleep 0.1
done
sinfo --Node
cat *.log
