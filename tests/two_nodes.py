"""A Ray cluster of two nodes in a process of its own, which loses one when told.

Not in pytest's own process: what Ray's cluster keeps there may abort it after the shutdown.
Its arguments are the CPUs and GPUs of the second node, which need not be real; the first has one
CPU. Prints the address; a line on standard input removes the second node, its end stops all.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=int(sys.argv[1]), num_gpus=int(sys.argv[2]))
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    if sys.stdin.readline():
        cluster.remove_node(second, allow_graceful=False)
        print("removed", flush=True)
        sys.stdin.read()
    cluster.global_state.disconnect()
    cluster.shutdown()


if __name__ == "__main__":
    main()
