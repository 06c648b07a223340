"""The keys of the cluster file: their types, and what each is for."""

from __future__ import annotations

import re
from typing import Any, get_args

from dtrain.hostlist import MAX_HOSTS
from dtrain.runtime.layout import SCHEDULES, Recompute, Sharding
from dtrain.spec.hosts import HostList, Overrides, host_name_fault
from dtrain.spec.model import LAUNCH_ROLES
from dtrain.spec.ports import MAX_PORT, PortRange
from dtrain.spec.schema import (
    Choice,
    Duration,
    Field,
    Flag,
    Integer,
    ListOf,
    MapOf,
    Number,
    OneOf,
    Record,
    Text,
)
from dtrain.spec.strategies import STRATEGIES

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_INTERFACE = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,14}"
_TOPOLOGY = r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}"
_MODULE = r"[^\W\d]\w*(\.[^\W\d]\w*)*"


def _name(text: str) -> str:
    if re.fullmatch(_NAME, text):
        return ""
    return (
        "must be letters, digits, '.', '_' or '-', start with a letter or digit, "
        "and have at most 64 characters"
    )


def _variable(text: str) -> str:
    if re.fullmatch(_VARIABLE, text):
        return ""
    return "is not a variable's name: letters, digits and '_', not starting with a digit"


def _interface(text: str) -> str:
    if re.fullmatch(_INTERFACE, text):
        return ""
    return "must be one network interface, such as ib0 (as `ip link` shows it)"


def _address(text: str) -> str:
    return host_name_fault(text)[0]


def _option_safe(text: str) -> str:
    return "cannot start with '-'" if text.startswith("-") else ""


def _user(text: str) -> str:
    return "cannot hold spaces" if re.search(r"\s", text) else _option_safe(text)


def _script(text: str) -> str:
    return "cannot start with '-'; write it as ./-…" if text.startswith("-") else ""


def _module(text: str) -> str:
    if re.fullmatch(_MODULE, text) and not text.endswith(".py"):
        return ""
    if "/" in text or text.endswith(".py"):
        return "must be a module's name, such as my.train; a file goes in job.script"
    return "must be a module's name, such as my.train"


def _topology(text: str) -> str:
    if re.fullmatch(_TOPOLOGY, text):
        return ""
    return "must be the chips of a slice along two or three axes, such as 4x4 or 2x2x4"


def _run_dir(text: str) -> str:
    if text.startswith(("/", "~/")):
        return ""
    return "must start with '/' or '~/', because it is a folder on every node"


def _unix_group(text: str) -> str:
    if re.fullmatch(r"[^\s:/,-][^:/,\x00-\x1f\x7f]*", text) and not text.isdigit():
        return ""
    return "must be the name of a Unix group on the hosts"


_PORT = Integer(1, MAX_PORT)
_GPUS = OneOf(
    Integer(0, 1024, also=" or a list of GPU indices"),
    ListOf(Integer(0, 1023), unique=True, minimum=1, what="GPU indices"),
)
_SLOTS = Integer(1, 1024)
_ENV: MapOf[str] = MapOf(
    Text(empty=True), _variable, f"^{_VARIABLE}$", what="environment variables as NAME: value"
)
_TRANSPORT = Choice(("ssh", "local"))
_STRATEGY_NAMES = tuple(dict.fromkeys(name for known in STRATEGIES.values() for name in known))


class _Strategy(Text):
    """Any text here: which names are right depends on the framework, see checks."""

    def json_schema(self) -> dict[str, Any]:
        return {"enum": list(_STRATEGY_NAMES)}


SSH = Record(
    {
        "user": Field(
            Text(_user), "User to log in as; without it, ~/.ssh/config or your own name decides."
        ),
        "port": Field(_PORT, "Port of sshd; without it, ~/.ssh/config decides, else 22."),
        "identity": Field(
            Text(), "Private key file on this machine; without it, your agent and usual keys."
        ),
        "jump": Field(
            Text(_option_safe),
            "Host to go through, as [user@]host[:port]; several are separated by commas.",
        ),
        "known_hosts": Field(Text(), "File with the hosts' keys; without it, ~/.ssh/known_hosts."),
        "host_keys": Field(
            Choice(("strict", "accept-new")),
            "What to do about a host whose key is not known: refuse it (strict), or note its key "
            "the first time (accept-new).",
            default="strict",
        ),
        "config": Field(Text(), "OpenSSH client configuration to read; without it, ~/.ssh/config."),
        "connect_timeout": Field(
            Duration(0.1),
            "How long one attempt to connect and log in may take.",
            default=15,
        ),
    }
)

OVERRIDE = Record(
    {
        "address": Field(
            Text(_address),
            "What the other hosts reach this host by, an IP address or a name, if its name in "
            "`hosts` is not it.",
        ),
        "port": Field(_PORT, "Port of this host's sshd."),
        "user": Field(Text(_user), "User to log in as on this host."),
        "gpus": Field(_GPUS, "GPUs of this host: how many, or the list of their indices."),
        "slots": Field(_SLOTS, "Worker processes on this host if it has no GPUs."),
        "interface": Field(
            Text(_interface), "This host's network interface for collectives, e.g. ib0."
        ),
        "env": Field(_ENV, "Environment of this host's workers, over job.env."),
        "python": Field(Text(_option_safe), "Python of this host."),
        "transport": Field(_TRANSPORT, "How to reach this host: by SSH, or as this machine."),
        "ssh": Field(SSH, "How to log in to this host, where it differs from cluster.ssh."),
    }
)

CLUSTER = Record(
    {
        "hosts": Field(
            HostList(needed=True),
            "The machines, in node-rank order; brackets stand for many: gpu[01-08,11].",
            required=True,
        ),
        "gpus": Field(
            _GPUS,
            "GPUs of each host: how many, or the list of their indices; 0 means CPU workers.",
        ),
        "slots": Field(_SLOTS, "Worker processes on each host without GPUs (one if left out)."),
        "gpu": Field(
            Text(), "Name of the GPU in the hardware table, e.g. a100-80gb; for `dtrain plan`."
        ),
        "tpu": Field(
            Text(_topology, f"^{_TOPOLOGY}$"),
            "Topology of the TPU slice that the hosts make up, as its chips along each axis, e.g. "
            "4x4; for strategy tpu, whose script runs on the first host.",
        ),
        "network": Field(
            Record(
                {
                    "interface": Field(
                        Text(_interface),
                        "Network interface for collectives on every host, e.g. ib0.",
                    ),
                    "gbps": Field(
                        Number(above=0),
                        "Bandwidth of one host in Gbit/s, all NICs together; for `dtrain plan`.",
                    ),
                }
            ),
            "The network between the hosts.",
        ),
        "transport": Field(
            _TRANSPORT,
            "How to reach the hosts: by SSH, or as this machine (local), for trying things out.",
            default="ssh",
        ),
        "ssh": Field(SSH, "How to log in; what is left out comes from ~/.ssh/config."),
        "python": Field(
            Text(_option_safe),
            "Python on the hosts, for the workers and for dtrain's agent: 3.8 or newer.",
            default="python3",
        ),
        "run_dir": Field(
            Text(_run_dir),
            "Folder on each host under which runs keep their logs and state.",
            default="~/.dtrain",
        ),
        "trust_group": Field(
            Text(_unix_group),
            "Unix group on the hosts whose members you trust: they may own and write to "
            "job.workdir, cluster.run_dir and the folders above them, which are refused otherwise.",
        ),
        "overrides": Field(
            Overrides(OVERRIDE),
            "What differs on single hosts, by name or host list; later ones win over earlier.",
        ),
        "spares": Field(HostList(), "Hosts that stand by to replace one that fails."),
    }
)

_SIZE = Integer(1, 1_000_000)

LAYOUT = Record(
    {
        "tensor": Field(
            _SIZE,
            "GPUs over which each layer is split; without it 1, with strategy tensor those of a "
            "host.",
        ),
        "pipeline": Field(
            _SIZE,
            "Stages into which the layers are cut; without it 1, with strategy pipeline all GPUs.",
        ),
        "virtual_pipeline": Field(
            _SIZE, "Pieces of each stage in an interleaved pipeline schedule.", default=1
        ),
        "schedule": Field(
            Choice(SCHEDULES),
            "Order of a pipeline's micro-batches: all forward passes first (gpipe), each backward "
            "pass as soon as it can be (1f1b, interleaved where virtual_pipeline is more than 1), "
            "or zero-bubble orders that split the backward pass (zb-1p, zb-v), for pipeline alone.",
            default="1f1b",
        ),
        "context": Field(_SIZE, "GPUs over which each sequence is split.", default=1),
        "expert": Field(
            _SIZE, "GPUs over which experts are spread, taken from the data ranks.", default=1
        ),
        "data": Field(
            _SIZE,
            "Replicas or shards that see different data; without it, what the strategy leaves of "
            "the workers (with 3d or none: 1).",
        ),
        "sharding": Field(
            Choice(get_args(Sharding)),
            "What the data ranks share out instead of each keeping it all: optimizer (ZeRO-1), "
            "gradients too (ZeRO-2), parameters too (full: ZeRO-3, FSDP), or all of it within "
            "groups that are copies of each other (hybrid: HSDP); without it, what the strategy "
            "says, else none.",
        ),
        "shard": Field(
            _SIZE, "Data ranks in one group of hybrid sharding; the groups hold the same."
        ),
        "micro_batch": Field(
            _SIZE,
            "Sequences in one forward pass of one replica; without it, what global_batch leaves, "
            "else 1.",
        ),
        "grad_accumulation": Field(
            _SIZE,
            "Micro-batches of one replica in one optimizer step; without it, what global_batch "
            "leaves, else 1, or twice the stages of a pipeline.",
        ),
        "recompute": Field(
            Choice(get_args(Recompute)),
            "Activations that are computed again in the backward pass to save memory.",
            default="none",
        ),
        "sequence_parallel": Field(
            Flag(),
            "Whether what tensor parallelism leaves whole is split along the sequence.",
            default=False,
        ),
        "offload": Field(
            Flag(), "Whether optimizer states live in the hosts' memory.", default=False
        ),
    }
)

TRAINING = Record(
    {
        "global_batch": Field(Integer(1, 10**9), "Sequences or samples in one optimizer step."),
        "precision": Field(
            Choice(("fp32", "tf32", "fp16", "bf16", "fp8")), "Number format of the computation."
        ),
        "seq_len": Field(Integer(1, 10**9), "Tokens in one sequence."),
    }
)

JOB = Record(
    {
        "framework": Field(
            Choice(("torch", "tensorflow")),
            "The framework of the training script: torch or tensorflow.",
            required=True,
        ),
        "strategy": Field(
            _Strategy(),
            "How the script distributes training; it decides how many processes each host gets. "
            "With auto, the hosts and job.layout decide, and what was chosen is said; without a "
            "strategy, a layout is taken as with auto, and else the script does it all. "
            + " ".join(
                f"{framework}: {', '.join(known)}." for framework, known in STRATEGIES.items()
            ),
        ),
        "script": Field(
            Text(_script), "Python file to run on every host, relative to the workdir."
        ),
        "module": Field(Text(_module), "Python module to run as `python -m`, instead of a script."),
        "args": Field(
            ListOf(Text(empty=True), advice="write each argument as its own item: [--epochs, 3]"),
            "Arguments of the script, each one item, passed exactly as written.",
        ),
        "workdir": Field(
            Text(),
            "Folder on the hosts in which workers start; without it, where sync puts the files, "
            "else the home folder (with transport: local, the cluster file's folder).",
        ),
        "setup": Field(
            OneOf(Text(), ListOf(Text()), wrap=True),
            "Shell lines to run on each host before its workers, which inherit what they set: "
            "source ~/env.sh, ulimit -n 65536.",
        ),
        "sync": Field(
            Record(
                {
                    "source": Field(
                        Text(),
                        "Folder on this machine to send, relative to the cluster file.",
                        default=".",
                    ),
                    "exclude": Field(
                        ListOf(Text(), advice='write a list: [".git", "*.pt"]'),
                        "Patterns of files to leave out, as in .gitignore.",
                    ),
                }
            ),
            "Send a folder to every host before the launch.",
        ),
        "env": Field(
            _ENV, "Environment of every worker; what dtrain sets itself cannot be set here."
        ),
        "secrets": Field(
            ListOf(
                Text(_variable, f"^{_VARIABLE}$"),
                unique=True,
                advice="write a list of variable names: [WANDB_API_KEY]",
            ),
            "Variables to pass on from your own environment; their values never show in logs, "
            "dry runs or process lists.",
        ),
        "roles": Field(
            Record(
                {
                    role: Field(
                        Integer(0, 1 if role in ("chief", "evaluator") else 16384),
                        f"Number of {role} tasks.",
                    )
                    for role in LAUNCH_ROLES
                }
            ),
            "TensorFlow tasks by type; without it, there is one worker on each host.",
        ),
        "rendezvous": Field(
            Record(
                {
                    "backend": Field(
                        Choice(("direct", "static", "c10d")),
                        "How torch workers find each other: started with complete environments "
                        "(direct), or through torchrun (static, c10d).",
                        default="direct",
                    ),
                    "port": Field(
                        _PORT,
                        "Port on the first host where workers meet (TensorFlow: the first of the "
                        "tasks' ports); without it, each launch draws a free one from `ports`.",
                    ),
                    "ports": Field(
                        PortRange(),
                        "Ports that a launch may draw from, for a firewall to allow.",
                        default="29500-30523",
                    ),
                }
            ),
            "How workers find each other.",
        ),
        "layout": Field(LAYOUT, "How the model is split; `dtrain plan --output FILE` writes it."),
        "training": Field(
            TRAINING, "What is trained, for planning and for the script (in DTRAIN_TRAINING)."
        ),
        "restart": Field(
            Record(
                {
                    "max": Field(
                        Integer(0, 1000),
                        "How often a failed job is started again before giving up.",
                        default=0,
                    ),
                    "node_timeout": Field(
                        Duration(1),
                        "How long a host may be out of reach before it counts as lost.",
                        default=300,
                    ),
                }
            ),
            "What to do when a worker or a host fails.",
        ),
        "elastic": Field(
            Record(
                {
                    "min_hosts": Field(
                        Integer(1, MAX_HOSTS),
                        "With how few hosts the job still goes on.",
                        required=True,
                    ),
                }
            ),
            "Start the job again without a host that was lost, where no spare is left: tensor, "
            "pipeline, context and expert stay, and data shrinks (TensorFlow: the workers).",
        ),
        "watchdog": Field(
            Record(
                {
                    "silence": Field(
                        Duration(1),
                        "How long no worker may write or tell of progress, e.g. 10m.",
                        required=True,
                    ),
                    "then": Field(
                        Choice(("report", "stop", "restart")),
                        "What happens once it has been told where every worker waits.",
                        default="stop",
                    ),
                }
            ),
            "What to do with a job that has fallen silent.",
        ),
        "grace": Field(
            Duration(),
            "How long workers have to finish between being asked to stop and being killed.",
            default=10,
        ),
        "on_disconnect": Field(
            Choice(("stop", "keep")),
            "Whether the job stops or goes on when nothing is heard from this machine for the "
            "time of `lease`.",
            default="keep",
        ),
        "lease": Field(
            Duration(15),
            "How long hosts wait for word from this machine before on_disconnect applies.",
            default=300,
        ),
    }
)

CLUSTER_FILE = Record(
    {
        "name": Field(
            Text(_name, f"^{_NAME}$"),
            "Name of the job, in logs and folder names; without it, the file's name.",
        ),
        "cluster": Field(CLUSTER, "The machines, and how to reach them.", required=True),
        "job": Field(JOB, "What runs on them.", required=True),
    },
    title="the cluster file",
)

HOMES = CLUSTER_FILE.homes()


def json_schema() -> dict[str, Any]:
    """The cluster file's format as JSON Schema, draft 2020-12, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dtrain cluster file",
        "description": "A list of machines, and the training job to launch on them.",
        **CLUSTER_FILE.json_schema(),
    }
