"""A Ray cluster of two nodes on this machine, of three CPUs each. A line at its input ends the second, the end both."""

from __future__ import annotations

import sys

#: Nodes listen at 127.0.0.1 only. Drivers have to say so, or Ray looks for them at the machine's own address.
LOOPBACK = "import ray._private.services as services\nservices.get_node_ip_address = lambda address=None: '127.0.0.1'"

if __name__ == "__main__":
    exec(LOOPBACK)
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 3, "memory": 2 << 30, "object_store_memory": 200 << 20, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(shutdown_at_exit=True)
    cluster.add_node(include_dashboard=False, **common)
    second = cluster.add_node(**common)
    print(f"address {cluster.address} of both", flush=True)
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        print("one left", flush=True)
        sys.stdin.read()
    cluster.shutdown()
