"""A Ray cluster of several nodes on this machine, for a test that speaks to it over pipes.

Runs in the environment of integration/ray.txt. It prints the cluster's address, then obeys lines:
`add` a node with one CPU, or with numbers of CPUs and GPUs, `remove` the node of that number as a
crash does. Each is answered by a line. It ends with its stdin.
"""

import argparse
import sys

from ray.cluster_utils import Cluster

OBJECT_STORE = 100 << 20  # bytes; nothing of Serve's lies in it


def main() -> None:
    """Run the cluster until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("nodes", type=int, help="beside the head, which has no CPU")
    arguments = parser.parse_args()
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE)
        for _ in range(arguments.nodes)
    ]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        verb, *rest = line.split()
        if verb == "remove":
            cluster.remove_node(nodes[int(rest[0])], allow_graceful=False)
        else:
            cpus, gpus = map(int, rest or ("1", "0"))  # Ray counts GPUs, and looks for none
            nodes.append(
                cluster.add_node(num_cpus=cpus, num_gpus=gpus, object_store_memory=OBJECT_STORE)
            )
        print(verb, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
