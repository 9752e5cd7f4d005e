"""The ten-line program that every launcher runs."""

import sys

import ddpkit

with ddpkit.distributed() as job:
    mean = ddpkit.all_reduce_mean(float(job.rank))
    place = f"rank {job.rank}/{job.world_size} local {job.local_rank}/{job.local_world_size}"
    sys.stdout.write(f"{place} node {job.node_rank}/{job.num_nodes} {job.launcher} mean {mean:g}\n")
