"""Detection, on what real launchers set (torch 2.13, Slurm 22.05, Open MPI 4.1, MPICH 4.0) and on nonsense."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpkit import LaunchError, detect_launch
from ddpkit.launch.detection import first_host
from ddpkit.launch.launch import forgotten_launcher
from ddpkit.launch.process_tree import find_agent, outer_launch, typed_in_terminal
from ddpkit.rendezvous.store import share_over_pmi

MANY = "9" * 5000  # more digits than Python's int() takes
RANK = {"RANK": "3", "WORLD_SIZE": "4"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "23456"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "15", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
TORCHRUN = RANK | LOCAL | MASTER | ELASTIC | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3"}
SPAWN = {"DDPKIT_SPAWN": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | MASTER

# sbatch -N2 --ntasks-per-node=2: the script itself, a task of its srun, a task of its srun -N1 -n1
BODY = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
TASK = BODY | {
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
LONE_TASK = BODY | {
    "SLURM_NTASKS": "1",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "n2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
SALLOC = {"SLURM_JOB_ID": "11", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
INTERACTIVE_STEP = LONE_TASK | {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290", "SLURM_PTY_PORT": "33501"}
PTY = {"SLURM_NTASKS": "4", "SLURM_PTY_PORT": "39399"}
ONE_NODE = TASK | {
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}
CYCLIC = {"SLURM_DISTRIBUTION": "cyclic", "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "0", "SLURM_LOCALID": "2"}
ARBITRARY = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_DISTRIBUTION": "arbitrary"}
ARBITRARY_0 = TASK | ARBITRARY | {"SLURM_PROCID": "0", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
ARBITRARY_2 = TASK | ARBITRARY | {"SLURM_PROCID": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
HET = {"SLURM_HET_SIZE": "2", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1,2"}

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "3",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1254162433",
}
TWO_NODES = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "18", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}

JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "LSB_JOBID": "7",
    "LSB_MCPU_HOSTS": "launch 1 n1 42 n2 42",
    "LSB_DJOB_NUMPROC": "85",
    "PMIX_RANK": "3",
}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "40001",
}
SUBMITIT = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "4242",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
}
LONE_SUBMITIT = SUBMITIT | dict.fromkeys(["SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_LOCALID"], "0")
LONE_SUBMITIT |= {"SUBMITIT_LOCAL_NTASKS": "1"}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2Wd",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "11",
}
PALS = {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
}
DEEPSPEED = {"LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"} | RANK | {"LOCAL_RANK": "1"} | MASTER
CONTAINER = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}

ELSEWHERE = "10.0.0.9:23456"
PLAIN_RANKS = "platform 3/4 -/- -/- " + ELSEWHERE
SINGLE = "single 0/1 0/1 0/1 -:-"
LONE = "slurm 0/1 0/1 0/1 -:-"


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in env.items() if name not in names}


# name, environment, "kind rank/world size, local rank/local world size, node rank/nodes, address:port"
LAUNCHES: list[tuple[str, dict[str, str], str]] = [
    ("nothing", {}, SINGLE),
    ("variables of no launcher", {"PATH": "/bin", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0"}, SINGLE),
    ("only WORLD_SIZE=1", {"WORLD_SIZE": "1"}, SINGLE),
    ("a shell profile's MASTER_ADDR and MASTER_PORT", MASTER, SINGLE),
    ("a shell profile's WORLD_SIZE=1 and address", MASTER | {"WORLD_SIZE": "1"}, SINGLE),
    ("a shell profile's NODE_RANK", {"NODE_RANK": "3"}, SINGLE),
    ("a shell that has the name of a Slurm job", {"SLURM_JOB_NAME": "interactive"}, SINGLE),
    ("empty strings", dict.fromkeys(TORCHRUN | TASK | OPENMPI, ""), SINGLE),
    ("spawn", SPAWN, f"spawn 1/2 1/2 0/1 {ELSEWHERE}"),
    ("spawn in a Slurm step under Open MPI", TASK | OPENMPI | SPAWN, f"spawn 1/2 1/2 0/1 {ELSEWHERE}"),
    ("torchrun", TORCHRUN, f"torchrun 3/4 1/2 1/2 {ELSEWHERE}"),
    ("torchrun in a spawned rank", SPAWN | TORCHRUN, f"torchrun 3/4 1/2 1/2 {ELSEWHERE}"),
    ("torchrun of one process", TORCHRUN | dict.fromkeys(["RANK", "LOCAL_RANK", "GROUP_RANK"], "0")
     | dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"], "1"), f"torchrun 0/1 0/1 0/1 {ELSEWHERE}"),
    ("torchrun where NODE_RANK is preset", TORCHRUN | {"NODE_RANK": "5"}, f"torchrun 3/4 1/2 1/2 {ELSEWHERE}"),
    ("torchrun in srun, a task per node", TASK | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN,
     f"torchrun 3/4 1/2 1/2 {ELSEWHERE}"),
    ("torchrun in an sbatch script", BODY | TORCHRUN, f"torchrun 3/4 1/2 1/2 {ELSEWHERE}"),
    ("a platform with LOCAL_RANK", RANK | LOCAL | MASTER, f"platform 3/4 1/2 -/- {ELSEWHERE}"),
    ("a platform with NODE_RANK", RANK | LOCAL | MASTER | {"NODE_RANK": "1"}, f"platform 3/4 1/2 1/- {ELSEWHERE}"),
    ("a platform with GROUP_RANK", RANK | MASTER | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
     f"platform 3/4 -/- 1/2 {ELSEWHERE}"),
    ("a platform without LOCAL_RANK", RANK | MASTER, PLAIN_RANKS),
    ("a platform on one node", RANK | MASTER | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"},
     f"platform 3/4 3/4 0/1 {ELSEWHERE}"),
    ("a platform of one process", MASTER | {"RANK": "0", "WORLD_SIZE": "1"}, f"platform 0/1 0/1 0/1 {ELSEWHERE}"),
    ("a platform with blanks in its values", {k: f" {v}\n" for k, v in (RANK | MASTER).items()}, PLAIN_RANKS),
    ("a script that tells srun's tasks all four", TASK | RANK | MASTER, PLAIN_RANKS),
    ("another launcher in a task per node",
     TASK | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | RANK | MASTER, PLAIN_RANKS),
    ("another launcher in a lone task", LONE_TASK | RANK | MASTER, PLAIN_RANKS),
    ("srun on two nodes", TASK, "slurm 3/4 1/2 1/2 n1:28663"),
    ("srun on one node", ONE_NODE, "slurm 3/4 3/4 0/1 127.0.0.1:28663"),
    ("srun -m cyclic", TASK | CYCLIC, "slurm 3/4 2/- 0/2 n1:28663"),
    ("srun of two kinds of tasks (het)", TASK | HET | {"SLURM_PROCID": "2"}, "slurm 2/3 1/- 1/2 n1:28663"),
    ("srun -m arbitrary with an address", ARBITRARY_0 | {"MASTER_ADDR": "n2"}, "slurm 0/3 0/- 1/2 n2:28663"),
    ("srun --mpi=pmi2", ONE_NODE | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "13"},
     "slurm 3/4 3/4 0/1 127.0.0.1:28663"),
    ("srun --mpi=pmix", TASK | {"PMIX_RANK": "3"}, "slurm 3/4 1/2 1/2 n1:28663"),
    ("srun with a MASTER_ADDR from the script", TASK | {"MASTER_ADDR": "n1.lan"}, "slurm 3/4 1/2 1/2 n1.lan:28663"),
    ("srun with a MASTER_PORT from the script", TASK | {"MASTER_PORT": "2345"}, "slurm 3/4 1/2 1/2 n1:2345"),
    ("srun with address and WORLD_SIZE from the script", TASK | MASTER | {"WORLD_SIZE": "4"},
     f"slurm 3/4 1/2 1/2 {ELSEWHERE}"),
    ("srun with a LOCAL_RANK from a wrapper", TASK | LOCAL, "slurm 3/4 1/2 1/2 n1:28663"),
    ("srun from a shell of srun --pty", TASK | PTY, "slurm 3/4 1/2 1/2 n1:28663"),
    ("srun on one of a job's nodes", LONE_TASK, LONE),
    ("a lone task beside others that share an address", LONE_TASK | MASTER, LONE),
    ("srun --pty", LONE_TASK | {"SLURM_PTY_PORT": "36623"}, LONE),
    ("salloc's shell on a compute node", INTERACTIVE_STEP, LONE),
    ("salloc's shell", SALLOC, SINGLE),
    ("an sbatch script", BODY, SINGLE),
    ("a script of sbatch -N2", without(BODY, "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"), SINGLE),
    ("an array job", without(BODY, "SLURM_NTASKS") | {"SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_TASK_ID": "4"}, SINGLE),
    ("Open MPI", OPENMPI, "openmpi 3/4 3/4 0/1 -:-"),
    ("Open MPI without local ranks", {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"},
     "openmpi 3/8 -/- -/- -:-"),
    ("Open MPI on two nodes", OPENMPI | TWO_NODES, "openmpi 3/4 1/2 -/- -:-"),
    ("Open MPI with -x MASTER_ADDR", OPENMPI | TWO_NODES | MASTER, f"openmpi 3/4 1/2 -/- {ELSEWHERE}"),
    ("Open MPI in an sbatch script", BODY | OPENMPI, "openmpi 3/4 3/4 0/1 -:-"),
    ("Open MPI of one process", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "MASTER_PORT": "1"},
     "openmpi 0/1 0/1 0/1 -:-"),
    ("hydra", HYDRA, "pmi 3/4 3/4 0/1 -:-"),
    ("hydra in an sbatch script, over srun", TASK | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | HYDRA,
     "pmi 3/4 3/4 0/1 -:-"),
    ("PMI without local ranks", {"PMI_RANK": "3", "PMI_SIZE": "4"}, "pmi 3/4 -/- -/- -:-"),
    ("MVAPICH", MVAPICH | HYDRA, "mvapich 3/4 1/2 -/- -:-"),
    ("jsrun", JSRUN, "jsrun 3/4 1/2 -/- -:-"),
    ("jsrun with an address", JSRUN | MASTER, f"jsrun 3/4 1/2 -/- {ELSEWHERE}"),
    ("horovodrun", HOROVOD, "horovod 3/4 1/2 -/- -:-"),
    ("horovodrun in an sbatch script", BODY | HOROVOD, "horovod 3/4 1/2 -/- -:-"),
    ("submitit's LocalExecutor", SUBMITIT, "submitit 1/2 1/2 0/1 -:-"),
    ("submitit's LocalExecutor in salloc's shell", INTERACTIVE_STEP | SUBMITIT, "submitit 1/2 1/2 0/1 -:-"),
    ("one task of submitit's LocalExecutor", LONE_SUBMITIT, SINGLE),
    ("srun from one task of submitit's LocalExecutor", LONE_SUBMITIT | TASK, "slurm 3/4 1/2 1/2 n1:28663"),
    ("submitit under Slurm", TASK | {"SUBMITIT_EXECUTOR": "slurm"}, "slurm 3/4 1/2 1/2 n1:28663"),
    ("Flux", FLUX, "flux 3/4 1/- -/2 -:-"),
    ("Flux on one node", without(FLUX, "PMI_FD") | {"FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "3"},
     "flux 3/4 3/4 0/1 -:-"),
    ("one task of Flux", FLUX | {"FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "1",
     "FLUX_JOB_NNODES": "1"}, "flux 0/1 0/1 0/1 -:-"),
    ("Open MPI in Flux", FLUX | OPENMPI, "openmpi 3/4 3/4 0/1 -:-"),
    ("PALS", PALS, "pmi 3/4 1/2 -/- -:-"),
    ("DeepSpeed's launcher", DEEPSPEED, f"platform 3/4 1/- -/- {ELSEWHERE}"),
    ("a Kubeflow pod that is told its rank", MASTER | {"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2"},
     f"platform 1/2 -/- -/- {ELSEWHERE}"),
    ("one host of SageMaker", {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "8"}, SINGLE),
    ("a pod of one node", {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, SINGLE),
    ("a node of one", {"NODE_RANK": "0", "NNODES": "1"}, SINGLE),
    ("a pod of an indexed job", {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, SINGLE),
    ("a batch script of LSF", {"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "8", "LSB_MCPU_HOSTS": "n1 8"}, SINGLE),
    ("a batch script of LSF on two hosts", {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 4 n2 4"}, SINGLE),
    ("a batch script of PBS", {"PBS_JOBID": "7", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "NCPUS": "8"}, SINGLE),
    ("an element of an SGE array", {"JOB_ID": "7", "SGE_TASK_ID": "3", "NSLOTS": "8", "NHOSTS": "1"}, SINGLE),
    ("numbers that are no ranks", {"LORA_RANK": "16", "LORA_SIZE": "4", "DP_RANK": "0", "DP_SIZE": "1"}, SINGLE),
    ("a model's rank and size", {"LORA_RANK": "4", "LORA_SIZE": "16", "MATRIX_RANK": "2", "MATRIX_SIZE": "8"}, SINGLE),
    ("the number of a build", {"VC_BUILD_NUM": "123"}, SINGLE),
    ("a script's word for not distributed", {"LOCAL_RANK": "-1"}, SINGLE),
    ("the same in full", {"LOCAL_RANK": "-1", "RANK": "-1", "WORLD_SIZE": "1"}, SINGLE),
    ("the same under mpirun", OPENMPI | {"LOCAL_RANK": "-1"}, "openmpi 3/4 3/4 0/1 -:-"),
    ("a platform of one process, without an address", {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, SINGLE),
    ("the same with half an address", {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "23456"}, SINGLE),
    ("a batch shell that inherited a step's address", BODY | {"SLURM_SRUN_COMM_HOST": "10.0.0.1"}, SINGLE),
    ("Open MPI from a shell of srun --pty", TASK | PTY | OPENMPI | {"OMPI_COMM_WORLD_RANK": "0",
     "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
     "openmpi 0/1 0/1 0/1 -:-"),
    ("one task of a Flux instance in a Slurm step", TASK | FLUX | {"FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0",
     "FLUX_JOB_SIZE": "1", "FLUX_JOB_NNODES": "1"}, "flux 0/1 0/1 0/1 -:-"),
    ("a node of none", {"HOST_NUM": "2"}, SINGLE),
    ("a batch script's node and task", BODY | {"SLURM_NODEID": "0", "SLURM_LOCALID": "0"}, SINGLE),
    ("a name and a number of nodes", {"NODE_ID": "ip-10-0-0-1", "NUM_NODES": "2"}, SINGLE),
    ("a process and the number of those to start", {"PROCESS_ID": "4711", "NUM_PROCESSES": "4"}, SINGLE),
    ("the first task of LSF", {"LSB_JOBID": "7", "LSF_PM_TASKID": "1"}, SINGLE),
    ("one process that PRRTE started", {"RANK": "0", "WORLD_SIZE": "1", "PMIX_RANK": "0"} | MASTER,
     f"platform 0/1 0/1 0/1 {ELSEWHERE}"),
    ("a platform of one process in a batch script", BODY | {"RANK": "0", "WORLD_SIZE": "1"} | MASTER,
     f"platform 0/1 0/1 0/1 {ELSEWHERE}"),
    ("a container in a batch script", without(BODY, "SLURM_JOB_NODELIST", "SLURM_NODELIST"), SINGLE),
]  # fmt: skip

ALL_FOUR = "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"
# name, environment, what the message must name
BROKEN: list[tuple[str, dict[str, str], list[str]]] = [
    ("RANK alone", {"RANK": "0"}, ["WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set", "Found: RANK=0"]),
    ("RANK and WORLD_SIZE alone", RANK, ["MASTER_ADDR, MASTER_PORT are not set", "unset RANK, WORLD_SIZE"]),
    ("LOCAL_RANK alone", {"LOCAL_RANK": "0"}, [ALL_FOUR]),
    ("LOCAL_WORLD_SIZE alone", {"LOCAL_WORLD_SIZE": "2"}, [ALL_FOUR, "unset LOCAL_WORLD_SIZE"]),
    ("WORLD_SIZE alone", {"WORLD_SIZE": "2"}, ["RANK, MASTER_ADDR, MASTER_PORT are not set"]),
    ("WORLD_SIZE alone, and no number", {"WORLD_SIZE": "x"}, ["WORLD_SIZE=x is not an integer", "RANK, MASTER_ADDR"]),
    ("all but RANK", MASTER | {"WORLD_SIZE": "4"}, ["RANK is not set"]),
    ("an empty RANK", RANK | MASTER | {"RANK": ""}, ["RANK is not set"]),
    ("a negative RANK", RANK | MASTER | {"RANK": "-1"}, ["RANK=-1 is not an integer of at least 0"]),
    ("RANK = WORLD_SIZE", RANK | MASTER | {"RANK": "4"}, ["RANK=4 is not below WORLD_SIZE=4"]),
    ("everything at once", {"RANK": "x", "WORLD_SIZE": "0", "MASTER_PORT": "70000", "LOCAL_RANK": "-1"},
     ["MASTER_ADDR is not set", "RANK=x is not an integer of at least 0", "LOCAL_RANK=-1 is not an integer of at",
      "MASTER_PORT=70000 is not an integer from 1 to 65535", "WORLD_SIZE=0 is not an integer of at least 1"]),
    ("LOCAL_RANK = LOCAL_WORLD_SIZE", RANK | LOCAL | MASTER | {"LOCAL_RANK": "2"},
     ["LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"]),
    ("pods' RANK and WORLD_SIZE", MASTER | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"},
     ["LOCAL_RANK=3 is not below WORLD_SIZE=2", "LOCAL_WORLD_SIZE=8 is more than WORLD_SIZE=2", "not nodes"]),
    ("NODE_RANK=1 of one node", RANK | MASTER | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1"},
     ["NODE_RANK=1 is not below num_nodes=1"]),
    ("more nodes than processes", RANK | MASTER | {"GROUP_WORLD_SIZE": "5"},
     ["GROUP_WORLD_SIZE=5 is more than WORLD_SIZE=4"]),
    ("torchrun's run id alone", ELASTIC,
     ["torchrun", "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"]),
    ("torchrun without LOCAL_RANK", without(TORCHRUN, "LOCAL_RANK"), ["LOCAL_RANK is not set"]),
    ("spawn without an address", without(SPAWN, *MASTER), ["MASTER_ADDR, MASTER_PORT are not set"]),
    ("WORLD_SIZE exported, srun forgotten", BODY | MASTER | {"WORLD_SIZE": "4"},
     ["RANK is not set", "SLURM_NTASKS=4", "start the ranks with srun"]),
    ("RANK exported in a script: the same in all tasks", TASK | MASTER | {"RANK": "0", "WORLD_SIZE": "4"},
     ["RANK=0, WORLD_SIZE=4 contradict SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4"]),
    ("the number of nodes exported as WORLD_SIZE", TASK | MASTER | {"WORLD_SIZE": "2"},
     ["WORLD_SIZE=2 contradicts SLURM_STEP_NUM_TASKS=4"]),
    ("LOCAL_RANK exported in a script", TASK | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
     ["LOCAL_RANK=0 contradicts SLURM_LOCALID=1", "LOCAL_WORLD_SIZE=4 contradicts local_world_size=2"]),
    ("a platform's one rank, four times", MASTER | {"RANK": "0", "WORLD_SIZE": "1"} | OPENMPI,
     ["RANK=0, WORLD_SIZE=1 contradict OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4"]),
    ("srun -m arbitrary, rank 0", ARBITRARY_0, ["arbitrary", "export MASTER_ADDR"]),
    ("srun -m arbitrary, another rank", ARBITRARY_2, ["arbitrary", "export MASTER_ADDR"]),
    ("rank 0 elsewhere than on the first node", without(ARBITRARY_0, "SLURM_DISTRIBUTION"), ["export MASTER_ADDR"]),
    ("a rank of Slurm alone", {"SLURM_PROCID": "3"}, ["unset SLURM_PROCID"]),
    ("a rank of jsrun alone", {"JSM_NAMESPACE_RANK": "3"}, ["JSM_NAMESPACE_SIZE is not set"]),
    ("half of a step's variables", {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"},
     ["SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_STEP_ID are"]),
    ("a node that is not there", TASK | {"SLURM_NODEID": "2"}, ["SLURM_NODEID=2 is not below SLURM_STEP_NUM_NODES=2"]),
    ("a broken node list", TASK | {"SLURM_STEP_NODELIST": "n[1-"}, ["SLURM_STEP_NODELIST=n[1- is not a list of nodes"]),
    ("Open MPI's rank alone", {"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE is not set"]),
    ("Open MPI with half an address", OPENMPI | {"MASTER_ADDR": "n1"}, ["MASTER_PORT is not set"]),
    ("hydra's rank = size", HYDRA | {"PMI_RANK": "4"}, ["PMI_RANK=4 is not below PMI_SIZE=4"]),
    ("PMIx' rank alone", {"PMIX_RANK": "0"}, [ALL_FOUR, "Found: PMIX_RANK=0"]),
    ("pods that torchrun should start", {"PET_NNODES": "2"},
     [ALL_FOUR, "Found: PET_NNODES=2", "Start torchrun on each node: torchrun ",
      "if PET_NNODES is set, torchrun train.py"]),
    ("elastic pods", {"PET_NNODES": "1:4", "PET_NPROC_PER_NODE": "8"}, ["Found: PET_NNODES=1:4"]),
    ("hosts of SageMaker", {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}, ["unset SM_HOSTS"]),
    ("nodes of AWS Batch", {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"},
     ["unset AWS_BATCH_JOB_NUM_NODES"]),
    ("one process of Open MPI in each task of srun", TASK | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
     ["OMPI_COMM_WORLD_SIZE=1 contradicts SLURM_STEP_NUM_TASKS=4", "would run alone", "unset SLURM_STEP_NUM_TASKS"]),
    ("a platform of one process in each task of srun", TASK | MASTER | {"RANK": "0", "WORLD_SIZE": "1"},
     ["RANK=0, WORLD_SIZE=1 contradict SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4"]),
    ("the same under one process of Open MPI", TASK | MASTER | {"RANK": "0", "WORLD_SIZE": "1"}
     | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, ["WORLD_SIZE=1 contradicts SLURM_STEP_NUM_TASKS=4"]),
    ("a platform of one process on each node", MASTER | {"RANK": "0", "WORLD_SIZE": "1", "SKYPILOT_NUM_NODES": "2"},
     ["WORLD_SIZE=1 contradicts SKYPILOT_NUM_NODES=2"]),
    ("RANK beyond a WORLD_SIZE of 1", {"RANK": "1", "WORLD_SIZE": "1"}, ["RANK=1 is not below WORLD_SIZE=1"]),
    ("a container that passes on some of Slurm's variables", CONTAINER,
     ["Slurm step", "SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES", "unset SLURM_PROCID"]),
    ("submitit's number of tasks alone", {"SUBMITIT_LOCAL_NTASKS": "2"}, ["SUBMITIT_LOCAL_GLOBALID is not set"]),
    ("Flux' rank alone", {"FLUX_TASK_RANK": "1"}, ["FLUX_JOB_SIZE is not set", "unset FLUX_TASK_RANK"]),
    ("one rank for all tasks of Flux", FLUX | MASTER | {"RANK": "0", "WORLD_SIZE": "1"},
     ["contradict FLUX_TASK_RANK=3"]),
]  # fmt: skip


# who starts a process on each node: its name, what it sets on the first of two nodes, what it sets on a single one
NODES: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("SkyPilot", {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"}, {"SKYPILOT_NUM_NODES": "1"}),
    ("dstack", {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "2"}, {"DSTACK_NODES_NUM": "1"}),
    ("HTCondor", {"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "2"}, {"_CONDOR_PROCNO": "7"}),
    ("a LeaderWorkerSet", {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "2"}, {"LWS_GROUP_SIZE": "1"}),
    ("Beaker", {"BEAKER_REPLICA_RANK": "0", "BEAKER_REPLICA_COUNT": "2"}, {"BEAKER_REPLICA_RANK": "0"}),
    ("Base Command Platform", {"NGC_ARRAY_INDEX": "0", "NGC_ARRAY_SIZE": "2"}, {"NGC_ARRAY_SIZE": "1"}),
    ("Arnold", {"ARNOLD_ID": "0", "ARNOLD_WORKER_NUM": "2"}, {"ARNOLD_ID": "0", "ARNOLD_WORKER_NUM": "1"}),
    ("Volcano Engine", {"MLP_ROLE_INDEX": "0", "MLP_WORKER_NUM": "2"}, {"MLP_WORKER_NUM": "1"}),
    ("ModelArts", {"MA_NUM_HOSTS": "2"}, {"MA_NUM_HOSTS": "1", "VC_TASK_INDEX": "0"}),
    ("AWS Batch", {"AWS_BATCH_JOB_NUM_NODES": "2"}, {"AWS_BATCH_JOB_NUM_NODES": "1"}),
    ("Azure Batch", {"AZ_BATCH_NODE_LIST": "10.0.0.4;10.0.0.5"}, {"AZ_BATCH_NODE_LIST": "10.0.0.4"}),
    ("SageMaker", {"SM_HOSTS": '["a", "b"]'}, {"SM_HOSTS": '["a"]'}),
    ("Kubeflow", {"PET_NNODES": "2", "PET_NODE_RANK": "0"}, {"PET_NNODES": "1"}),
]  # fmt: skip


@pytest.mark.parametrize(("title", "several", "one"), NODES)
def test_a_platforms_node_is_told_to_start_torchrun(title: str, several: dict[str, str], one: dict[str, str]) -> None:
    assert detect_launch(one).kind == "single"
    with pytest.raises(LaunchError) as raised:
        detect_launch(several)
    text = str(raised.value)
    assert f"one of several nodes of {title}, but RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set." in text
    assert re.search("Start torchrun on each node: torchrun .*train.py; to run on one process, unset ", text)
    unset = text.rpartition("unset ")[2].rstrip(".").split(", ")
    assert detect_launch(without(several, *unset)).kind == "single"
    for launcher in (TORCHRUN, SPAWN, TASK, OPENMPI, RANK | MASTER):
        inside, outside = detect_launch(launcher | several), detect_launch(launcher)
        assert (inside.kind, inside.rank, inside.world_size) == (outside.kind, outside.rank, outside.world_size)
    assert outer_launch(several, detect_launch(TORCHRUN), TORCHRUN) is None


@pytest.mark.parametrize(("env", "expected"), [row[1:] for row in LAUNCHES], ids=[row[0] for row in LAUNCHES])
def test_each_environment_means_its_launch(env: dict[str, str], expected: str) -> None:
    launch = detect_launch(env)
    place = f"{launch.rank}/{launch.world_size} {launch.local_rank}/{launch.local_world_size}"
    shown = f"{launch.kind} {place} {launch.node_rank}/{launch.num_nodes} {launch.master_addr}:{launch.master_port}"
    assert shown.replace("None", "-") == expected
    used = [line.split("=", 1) for line in launch.evidence if "=" in line and " " not in line]
    assert all(env[name].strip() == value for name, value in used)
    assert launch.kind == "single" or used


@pytest.mark.parametrize(("env", "named"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_each_broken_environment_is_refused_with_everything_named(env: dict[str, str], named: list[str]) -> None:
    with pytest.raises(LaunchError) as raised:
        detect_launch(env)
    for words in named:
        assert words in str(raised.value)
    assert "to run on one process, unset" in str(raised.value)


def test_this_process_is_single_and_its_environment_is_the_default() -> None:
    assert detect_launch() == detect_launch(os.environ)
    assert detect_launch().kind == "single"
    with pytest.raises(AttributeError):
        detect_launch().rank = 1  # type: ignore[misc]


def test_a_forgotten_srun_is_told_and_nothing_else_is() -> None:
    for env in (BODY, SALLOC, INTERACTIVE_STEP):
        assert "SLURM_NTASKS=4" in (told := forgotten_launcher(detect_launch(env)) or "") and "srun" in told
    assert "SLURM_JOB_NUM_NODES=2" in str(forgotten_launcher(detect_launch(BODY | {"SLURM_NTASKS": ""})))
    for name in ("PBS_NUM_NODES", "NHOSTS", "PET_NPROC_PER_NODE"):
        assert f"{name}=2" in str(forgotten_launcher(detect_launch({name: "2"})))
    for env in ({}, MASTER, TASK, LONE_TASK, TASK | PTY, TORCHRUN | BODY, OPENMPI | BODY):
        assert forgotten_launcher(detect_launch(env)) is None


def test_steps_and_array_elements_get_ports_of_their_own() -> None:
    jobs = [TASK | {"SLURM_JOB_ID": f"{job}", "SLURM_STEP_ID": f"{step}"} for job in range(40) for step in range(5)]
    ports = [detect_launch(env).master_port for env in jobs]
    assert all(port is not None and 10_000 <= port < 29_500 for port in ports)
    assert len(set(ports)) >= 195  # of 200 in 19,500: one pair is expected to meet


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    places = draw(st.permutations([(node, local) for node, count in enumerate(counts) for local in range(count)]))
    first = places.index((0, 0))
    places[0], places[first] = places[first], places[0]  # rank 0 is on the first node unless -m arbitrary
    return counts, places


@given(_layouts())
def test_all_tasks_of_a_step_agree_and_have_different_ranks(layout: tuple[list[int], list[tuple[int, int]]]) -> None:
    counts, places = layout
    step = TASK | {"SLURM_STEP_NUM_TASKS": f"{len(places)}", "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]"}
    step |= {"SLURM_STEP_NUM_NODES": f"{len(counts)}", "SLURM_NTASKS": f"{len(places)}"}
    layout = ",".join(map(str, counts)) if len(set(counts)) > 1 else f"{counts[0]}(x{len(counts)})"
    step["SLURM_STEP_TASKS_PER_NODE"] = layout
    ranks = [
        detect_launch(step | {"SLURM_PROCID": f"{rank}", "SLURM_NODEID": f"{node}", "SLURM_LOCALID": f"{local}"})
        for rank, (node, local) in enumerate(places)
    ]
    assert [launch.rank for launch in ranks] == list(range(len(places)))
    assert [(launch.node_rank, launch.local_rank) for launch in ranks] == places
    assert all(launch.local_world_size in (None, counts[node]) for launch, (node, _) in zip(ranks, places, strict=True))
    assert len({(launch.master_addr, launch.master_port, launch.world_size, launch.num_nodes) for launch in ranks}) == 1


_VALUES = st.sampled_from(["", "0", "1", "2", "4", "5", "-1", "x", "1.0", "n1", "n[1-2]", "2(x2)", "1,3", "23456"])


@settings(max_examples=500)
@given(
    st.dictionaries(
        st.sampled_from(
            sorted(TORCHRUN | SPAWN | TASK | OPENMPI | HYDRA | MVAPICH | PTY | JSRUN | HOROVOD | SUBMITIT | FLUX | PALS)
        ),
        _VALUES,
    )
)
@example({"SUBMITIT_LOCAL_NODEID": "2", "SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_GLOBALID": "0"})
def test_whatever_the_environment_a_launch_is_consistent_or_refused(env: dict[str, str]) -> None:
    try:
        launch = detect_launch(env)
    except LaunchError:
        return
    assert 0 <= launch.rank < launch.world_size
    assert 0 <= (launch.local_rank or 0) < (launch.local_world_size or launch.world_size) <= launch.world_size
    assert 0 <= (launch.node_rank or 0) < (launch.num_nodes or launch.world_size) <= launch.world_size
    assert launch.master_port is None or 1 <= launch.master_port <= 65535


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("n1", "n1"),
        ("n[008-010]", "n008"),
        ("gpu-a[01-03,7],b5", "gpu-a01"),
        ("b5,gpu-a[01-03,7]", "b5"),
        ("c[1-2]-x[3,5].lan,c7", "c1-x3.lan"),
    ],
)
def test_the_first_host_of_a_list_is_the_one_that_scontrol_shows_first(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "n[", "n[1-2", "n]1", "n[]", "n[a-b]", "n[1-2]],m", "a,", ",a", "a b"])
def test_a_list_of_nodes_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of nodes"):
        first_host(text)


OUTER = {"RANK": "1", "WORLD_SIZE": "2"}
STEP_PER_NODE = TASK | {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
STEP_PER_NODE |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
KUBEFLOW = MASTER | {"RANK": "1", "WORLD_SIZE": "16", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}
# name, what torchrun's own environment was, number of its agents, whether the launch is nested
OUTSIDE: list[tuple[str, dict[str, str], int, bool]] = [
    ("a plain shell", {"PATH": "/bin"}, 1, False),
    ("an sbatch script", BODY, 1, False),
    ("a worker of another torchrun", TORCHRUN | OUTER, 1, True),
    ("the only worker of another torchrun", TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, 1, False),
    ("preset RANK and WORLD_SIZE", OUTER, 1, True),
    ("one pod of two, an agent in each", OUTER | MASTER, 2, False),
    ("one pod of two, a job in each", OUTER | MASTER, 1, True),
    ("a task per node, an agent in each", STEP_PER_NODE, 2, False),
    ("a task per node, agents in another order", STEP_PER_NODE | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}, 2, False),
    ("two tasks per node, agents for half of them", TASK, 2, True),
    ("ranks of Open MPI, a job in each", OPENMPI, 1, True),
    ("spawned ranks, a job in each", SPAWN, 1, True),
    ("a Kubeflow pod: WORLD_SIZE counts processes, RANK counts pods", KUBEFLOW, 2, False),
    ("a Kubeflow pod, a job in each", KUBEFLOW, 1, True),
    ("a lone Kubeflow pod of 16 processes", KUBEFLOW | {"RANK": "0", "PET_NNODES": "1"}, 1, False),
    ("an elastic job that has shrunk", STEP_PER_NODE | {"PET_NNODES": "1:2"}, 1, False),
    ("a worker of a platform's torchrun", TORCHRUN | OUTER | {"PET_NNODES": "1"}, 1, True),
    ("numbers that are none", {"RANK": "x", "WORLD_SIZE": "2"}, 1, False),
    ("RANK beyond WORLD_SIZE", {"RANK": "2", "WORLD_SIZE": "2"}, 1, False),
    ("RANK alone", {"RANK": "1"}, 1, False),
]  # fmt: skip


@pytest.mark.parametrize(("outside", "agents", "nested"), [row[1:] for row in OUTSIDE], ids=[row[0] for row in OUTSIDE])
def test_torchrun_inside_another_launch_is_told_from_one_agent_per_process(
    outside: dict[str, str], agents: int, nested: bool
) -> None:
    inside = TORCHRUN | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": f"{agents}", "LOCAL_WORLD_SIZE": f"{4 // agents}"}
    told = outer_launch(outside, detect_launch(inside), inside)
    assert (told is not None) == nested
    if told:
        assert re.search(rf"of another launch \(\w+=\d, \w+=\d+\), but its job has {agents} agent", told)
        assert "unset" in told


def test_only_torchrun_can_be_nested() -> None:
    assert outer_launch(OUTER, detect_launch(SPAWN), SPAWN | {"GROUP_WORLD_SIZE": "1"}) is None


WORKER = {"TORCHELASTIC_ERROR_FILE": "/tmp/e/0/error.json", "TORCHELASTIC_RUN_ID": "none", "RANK": "0"}


@contextmanager
def _shells(outside: dict[str, str], inside: dict[str, str]) -> Iterator[int]:
    """An agent's shell starts a wrapper's shell, which starts the worker's shell, whose process number this yields."""
    change = " ".join(f"{name}='{inside.get(name, '')}'" for name in WORKER)
    script = f"{change} sh -c 'sh -c \"echo \\$\\$; read line\"; true'; true"
    env = {"PATH": os.environ["PATH"]} | outside
    with subprocess.Popen(["sh", "-c", script], env=env, stdin=-1, stdout=-1, text=True) as agent:
        assert agent.stdin and agent.stdout
        try:
            yield int(agent.stdout.readline())
        finally:
            agent.stdin.close()


@pytest.mark.parametrize("unset", [[], ["TORCHELASTIC_ERROR_FILE"]], ids=["error file", "run id and rank"])
def test_the_agent_is_found_behind_a_wrapper(unset: list[str]) -> None:
    inside = WORKER | dict.fromkeys(unset, "")
    outer = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_ERROR_FILE": "/tmp/e/1/error.json",
    }
    for outside in ({"MARK": "shell"}, outer):
        with _shells(outside, inside) as pid:
            found = find_agent(inside, pid)
            assert found is not None and found.env.items() >= outside.items()


def test_an_agent_that_cannot_be_seen_is_none() -> None:
    assert find_agent(WORKER, 2**30) is None
    assert find_agent(dict.fromkeys(["TORCHELASTIC_RUN_ID", "RANK"]), os.getpid()) is None  # type: ignore[arg-type]


@pytest.mark.storm
def test_real_torchrun_inside_torchrun_is_seen_and_the_outer_one_is_fine(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    (pids := tmp_path / "pids").mkdir()
    (tmp_path / "hold.sh").write_text('>"pids/$$"\nuntil [ -e go ]; do sleep 0.05; done\n')
    inner = shlex.join([*torchrun, "--nproc-per-node=1", "sh", "hold.sh"])
    (tmp_path / "rank.sh").write_text(
        f'if [ "$RANK" = 0 ]; then exec {inner}; fi\nuntil [ -e go ]; do sleep 0.05; done\n'
    )
    command = [*torchrun, "--nproc-per-node=2", "sh", "rank.sh"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 600
            while not (files := list(pids.iterdir())):
                assert process.poll() is None and time.monotonic() < deadline, "the inner job did not start"
                time.sleep(0.05)
            for path in files:
                pid = int(path.name)
                worker, agent = _environ(pid), _parent(pid)
                seen = find_agent(worker, pid)
                assert seen is not None and seen.env["WORLD_SIZE"] == "2" and seen.env == _environ(agent)
                assert seen.pid == agent and not seen.lost()
                assert "of 2 of another launch" in str(outer_launch(seen.env, detect_launch(worker), worker))
                outside = find_agent(seen.env, agent)
                assert outside is not None and "TORCHELASTIC_RUN_ID" not in outside.env
                assert outer_launch(outside.env, detect_launch(seen.env), seen.env) is None
        finally:
            (tmp_path / "go").touch()
    assert process.returncode == 0


def _environ(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def _parent(pid: int) -> int:
    return int(next(line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "PPid" in line))


def test_a_program_typed_into_the_shell_of_a_step_is_told_by_its_terminal() -> None:
    shell = ONE_NODE | PTY | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "1"}
    code = "import fcntl, sys, termios\nif sys.stdin.isatty(): fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    code += "print(flush=True)\ninput()"
    keyboard, terminal = os.openpty()
    with os.fdopen(keyboard, "wb", buffering=0), os.fdopen(terminal, "wb", buffering=0):
        for stdin in (terminal, subprocess.PIPE):
            command = [sys.executable, "-c", code]
            with subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, start_new_session=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                given = shell | {"SLURM_TASK_PID": f"{process.pid}"}
                environments = [shell, given, TASK | PTY, LONE_TASK | PTY, without(shell, "SLURM_PTY_PORT")]
                answers = [typed_in_terminal(detect_launch(env), env, process.pid) for env in environments]
                process.kill()
            assert answers == [stdin == terminal, False, False, False, False]
    assert not typed_in_terminal(detect_launch(shell), shell, 2**30)


@pytest.mark.parametrize("text", [MANY, "٣", "²", "-1", "1.5", "0x10", " "])
@pytest.mark.parametrize("env", [TORCHRUN, SPAWN, TASK, LONE_TASK, BODY, RANK | MASTER])
def test_numbers_of_any_length_and_alphabet_are_read_or_refused(env: dict[str, str], text: str) -> None:
    for name in env:
        try:
            launch = detect_launch(env | {name: text})
        except LaunchError as error:
            assert len(str(error)) < 6000 and "set_int_max_str_digits" not in str(error)
        else:
            outer_launch(env | {"PET_NNODES": text}, launch, env | {name: text})
            outer_launch(env, launch, env | {"GROUP_WORLD_SIZE": text})


@pytest.mark.parametrize("text", [MANY, "x", "9" * 20, "-1", "999999"])  # of which none is open here
def test_a_strange_descriptor_of_hydra_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_FD", text)
    with pytest.raises(LaunchError, match="does not answer on the descriptor in PMI_FD"):
        share_over_pmi(None)


def test_a_file_that_has_the_number_of_hydras_descriptor_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "data", "w+b") as file:
        monkeypatch.setenv("PMI_FD", f"{file.fileno()}")
        with pytest.raises(LaunchError, match="does not answer on the descriptor in PMI_FD"):
            share_over_pmi(None)
        assert file.tell() == 0 and os.path.getsize(file.name) == 0
