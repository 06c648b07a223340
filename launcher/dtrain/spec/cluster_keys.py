"""The keys below `cluster`: the machines, and how to reach them."""

from __future__ import annotations

from typing import get_args

from dtrain.hostlist import MAX_HOSTS
from dtrain.spec import value_rules as rules
from dtrain.spec.hosts import HostList, Overrides
from dtrain.spec.kubernetes_keys import KUBERNETES
from dtrain.spec.model import HostKeys
from dtrain.spec.scalars import Choice, Duration, Integer, Number, Text
from dtrain.spec.schema import Field, SectionType
from dtrain.spec.slurm_keys import SLURM

SSH = SectionType(
    {
        "user": Field(
            Text(rules.one_word),
            "SSH user.",
            otherwise="from the SSH configuration, else your own user name",
            example="ml",
        ),
        "port": Field(
            rules.PORT,
            "Port of sshd.",
            otherwise="from the SSH configuration, else 22",
            example="2222",
        ),
        "identity": Field(
            Text(),
            "Private key file on this machine.",
            otherwise="your SSH agent and your usual keys",
            example="~/.ssh/cluster",
        ),
        "jump": Field(
            Text(rules.option_safe),
            "Jump host, as [user@]host[:port]. Separate several with commas.",
            otherwise="ProxyJump in the SSH configuration, else none",
            example="bastion",
        ),
        "known_hosts": Field(
            Text(),
            "File with the host keys.",
            otherwise="from the SSH configuration, else ~/.ssh/known_hosts",
            example="./known_hosts",
        ),
        "host_keys": Field(
            Choice(get_args(HostKeys)),
            "What to do with a host whose key is unknown: strict refuses the host; accept-new "
            "records the key on the first connection. A changed key is always refused.",
            default="strict",
            example="accept-new",
        ),
        "config": Field(
            Text(),
            "OpenSSH client configuration file to read.",
            otherwise="~/.ssh/config",
            example="./ssh_config",
        ),
        "connect_timeout": Field(
            Duration(0.1),
            "Time limit for one attempt to connect and log in.",
            default=15,
            example="30s",
        ),
    }
)

OVERRIDE = SectionType(
    {
        "address": Field(
            Text(rules.address),
            "IP address or name by which the other hosts reach this host.",
            otherwise="the host's name in `hosts`",
            example="10.0.0.13",
        ),
        "port": Field(
            rules.PORT, "Port of this host's sshd.", otherwise="ssh.port", example="2222"
        ),
        "user": Field(
            Text(rules.one_word), "SSH user on this host.", otherwise="ssh.user", example="ubuntu"
        ),
        "gpus": Field(
            rules.GPUS,
            "GPUs of this host: a count, or a list of GPU indices.",
            otherwise="cluster.gpus",
            example="[0, 1, 2, 3]",
        ),
        "gpu": Field(
            rules.GPU,
            "Name of this host's GPU in the planner's hardware table.",
            otherwise="cluster.gpu",
            example="h100",
        ),
        "slots": Field(
            rules.SLOTS,
            "Worker processes on this host if it has no GPUs.",
            otherwise="cluster.slots",
            example="4",
        ),
        "interface": Field(
            Text(rules.interface),
            "This host's network interface for collectives.",
            otherwise="cluster.network.interface",
            example="ens5",
        ),
        "env": Field(
            rules.ENV,
            "Environment variables of this host's workers. They override job.env.",
            example="{NCCL_DEBUG: INFO}",
        ),
        "python": Field(
            Text(rules.option_safe),
            "Python interpreter on this host.",
            otherwise="cluster.python",
            example="python3.11",
        ),
        "transport": Field(
            rules.TRANSPORT,
            "How to reach this host: ssh, or local for processes on this machine.",
            otherwise="cluster.transport",
            example="local",
        ),
        "ssh": Field(SSH, "SSH settings of this host. They override cluster.ssh."),
    }
)

CLUSTER = SectionType(
    {
        "hosts": Field(
            HostList(needed=True),
            "The machines, in node-rank order. Brackets expand to several names: gpu[01-08,11].",
            required=True,
            unless=("slurm", "kubernetes"),
            example='["gpu[01-08]"]',
        ),
        "slurm": Field(
            SLURM,
            "Run the job on Slurm, which chooses the machines. Needs `nodes` instead of `hosts`.",
        ),
        "kubernetes": Field(
            KUBERNETES,
            "Run the job on Kubernetes, as one pod for each machine. Needs `nodes` instead of "
            "`hosts`.",
        ),
        "nodes": Field(
            Integer(1, MAX_HOSTS),
            "Number of machines that Slurm allocates, or of pods on Kubernetes.",
            otherwise="required with `slurm` and `kubernetes`",
            example="8",
        ),
        "gpus": Field(
            rules.GPUS,
            "GPUs of each host: a count, or a list of GPU indices. With 0, workers use the CPU.",
            otherwise="none; each host needs gpus or slots, here or in overrides",
            example="8",
        ),
        "slots": Field(
            rules.SLOTS,
            "Worker processes on each host that has no GPUs.",
            otherwise="1",
            example="4",
        ),
        "gpu": Field(
            rules.GPU,
            "Name of the GPU in the planner's hardware table, for `dtrain plan`.",
            otherwise="set it with `dtrain plan --gpu`",
            example="h100",
        ),
        "tpu": Field(
            rules.TOPOLOGY,
            "Topology of the TPU slice that the hosts form: its chips along each axis. For the "
            "strategy tpu, whose script runs on the first host.",
            otherwise="no TPUs",
            example="4x4",
            only="tensorflow",
        ),
        "network": Field(
            SectionType(
                {
                    "interface": Field(
                        Text(rules.interface),
                        "Network interface for collectives on every host.",
                        otherwise="NCCL and Gloo choose",
                        example="ib0",
                    ),
                    "gbps": Field(
                        Number(),
                        "Bandwidth of one host in Gbit/s, all NICs together, for `dtrain plan`.",
                        otherwise="from the planner's hardware table",
                        example="1600",
                    ),
                }
            ),
            "The network between the hosts.",
        ),
        "transport": Field(
            rules.TRANSPORT,
            "How to reach the hosts: ssh, or local for processes on this machine.",
            default="ssh",
            example="local",
        ),
        "ssh": Field(SSH, "SSH settings. They override the SSH configuration."),
        "python": Field(
            Text(rules.option_safe),
            "Python interpreter on the hosts, 3.8 or newer, for the workers and dtrain's agent. "
            "That of a conda or virtual environment needs no activation: its folder comes first in "
            "PATH.",
            default="python3",
            example="/opt/venv/bin/python",
        ),
        "run_dir": Field(
            Text(rules.run_dir),
            "Folder on each host for the logs and the state of runs.",
            default="~/.dtrain",
            example="/scratch/runs",
        ),
        "trust_group": Field(
            Text(rules.unix_group),
            "Unix group on the hosts whose members you trust. They may own and write to "
            "job.workdir, cluster.run_dir and the folders above them.",
            otherwise="dtrain refuses folders that another user can change",
            example="lab",
        ),
        "overrides": Field(
            Overrides(OVERRIDE),
            "Settings of single hosts, by host name or host list. A later entry overrides an "
            "earlier one.",
            example="{gpu03: {address: 10.0.0.13, gpus: 4}}",
        ),
        "spares": Field(
            HostList(),
            "Standby hosts. One of them replaces a host that fails.",
            otherwise="none",
            example='["gpu[09-10]"]',
        ),
    }
)
