"""The keys below `job`: what runs on the machines."""

from __future__ import annotations

from typing import Any, get_args

from dtrain.hostlist import MAX_HOSTS
from dtrain.spec import progress_line
from dtrain.spec import value_rules as rules
from dtrain.spec.layout_keys import EXPECTED, LAYOUT, TRAINING
from dtrain.spec.model import LAUNCH_ROLES, EngineName, Framework, RendezvousBackend, SuccessPolicy
from dtrain.spec.placeholders import NAMES
from dtrain.spec.ports import PortRange
from dtrain.spec.scalars import Choice, Duration, Integer, Text
from dtrain.spec.schema import Field, ListOf, OneOf, SectionType
from dtrain.spec.strategies import STRATEGIES
from dtrain.spec.words import Words

_STRATEGY_NAMES = tuple(dict.fromkeys(name for known in STRATEGIES.values() for name in known))


class _Strategy(Text):
    """Accepts any text, because the valid names depend on the framework: see `checks`."""

    def json_schema(self) -> dict[str, Any]:
        return {"enum": list(_STRATEGY_NAMES)}


JOB = SectionType(
    {
        "framework": Field(
            Choice(get_args(Framework)),
            "The framework of the program: torch, tensorflow, jax, or none for any other.",
            required=True,
            example="torch",
        ),
        "strategy": Field(
            _Strategy(),
            "How the script distributes training. It sets the number of processes on each host. "
            "With auto, dtrain chooses from the hosts and job.layout, and prints its choice. "
            + " ".join(
                f"{framework}: {', '.join(known)}." for framework, known in STRATEGIES.items()
            ),
            otherwise="auto if job.layout is given, else none",
            example="fsdp",
        ),
        "script": Field(
            Text(rules.script),
            "Python file to run on every host, relative to the workdir; a file whose name ends in "
            ".sh runs under bash.",
            otherwise="job.module or job.command",
            example="train.py",
        ),
        "module": Field(
            Text(rules.module),
            "Python module to run with `python -m`, instead of a script.",
            otherwise="job.script",
            example="my.train",
        ),
        "command": Field(
            Words(Text(lines=True), program=True),
            "Any program with its arguments, instead of a script: a list with an item for each, or "
            "a string that is split at spaces and may have quotes, as in a shell. Placeholders in "
            f"command, args and env: {', '.join(f'{{{name}}}' for name in NAMES)}.",
            otherwise="job.script",
            example='[./train, --rank, "{rank}"]',
        ),
        "per": Field(
            Choice(("gpu", "host")),
            "Start one process for each GPU (or slot), or one for each host with all its GPUs.",
            otherwise="gpu; host for tensorflow and strategy data_parallel",
            example="host",
        ),
        "binding": Field(
            Choice(("node", "none")),
            "Bind each process, before it starts, to the cores and the memory of its GPU's NUMA "
            "node. With none, or without GPUs, nothing is bound.",
            default="node",
            example="none",
        ),
        "args": Field(
            Words(Text(empty=True, lines=True)),
            "Arguments of the program, as a list or a string (see command). dtrain passes each "
            "item exactly as written, with placeholders filled in.",
            otherwise="none",
            example="[--config, gpt.yaml, --lr, 1e-5]",
        ),
        "workdir": Field(
            Text(),
            "Working folder of the workers on the hosts.",
            otherwise="where sync puts the files, else the home folder (with transport: local, "
            "the cluster file's folder)",
            example="~/runs/gpt",
        ),
        "setup": Field(
            OneOf(Text(lines=True), ListOf(Text(lines=True)), wrap=True),
            "Shell lines to run on each host before its workers. Workers inherit the variables and "
            "limits that they set.",
            otherwise="none",
            example="[source ~/env.sh, ulimit -n 65536]",
        ),
        "container": Field(
            SectionType(
                {
                    "image": Field(
                        Text(rules.one_word),
                        "Image that every host has: a name (docker, podman, enroot), or a file "
                        "(apptainer, enroot).",
                        required=True,
                        example="nvcr.io/nvidia/pytorch:25.06-py3",
                    ),
                    "engine": Field(
                        Choice(get_args(EngineName)),
                        "Program that runs containers on the hosts. pyxis is a plugin of Slurm; "
                        "where Slurm does not have it, apptainer takes its place.",
                        otherwise="docker; on Slurm pyxis",
                        example="podman",
                    ),
                    "mounts": Field(
                        ListOf(
                            Text(rules.mount),
                            advice="write a list: [/data, ~/cache:/cache, /models:/models:ro]",
                        ),
                        "Folders and files of the host that workers see, as SOURCE[:TARGET][:ro]. "
                        "The working folder and the run's folder are always mounted.",
                        otherwise="none",
                        example="[/data, ~/cache:/cache, /models:/models:ro]",
                    ),
                    "options": Field(
                        Words(Text()),
                        "More options of the engine's command, after those of dtrain; a list or a "
                        "string (see job.command).",
                        otherwise="none",
                        example='[--ulimit, "memlock=-1"]',
                    ),
                }
            ),
            "Run each worker in a container. cluster.python and the program are then inside; the "
            "setup lines run outside.",
            otherwise="workers run on the host itself",
        ),
        "sync": Field(
            SectionType(
                {
                    "source": Field(
                        Text(),
                        "Folder on this machine to send, relative to the cluster file.",
                        default=".",
                        example="src",
                    ),
                    "exclude": Field(
                        ListOf(Text(), advice='write a list: [".git", "*.pt"]'),
                        "Patterns of files to leave out, as in .gitignore.",
                        otherwise="nothing is left out",
                        example='[.git, .venv, "*.pt"]',
                    ),
                }
            ),
            "A folder to send to every host before the launch.",
        ),
        "env": Field(
            rules.ENV,
            "Environment variables of every worker. Variables that dtrain sets are refused.",
            otherwise="none",
            example="{NCCL_DEBUG: WARN}",
        ),
        "secrets": Field(
            ListOf(
                rules.VARIABLE,
                unique=True,
                advice="write a list of variable names: [WANDB_API_KEY]",
            ),
            "Variables to pass to the workers from your own environment. Their values never "
            "appear in dtrain's own messages and records, dry runs or process lists.",
            otherwise="none",
            example="[WANDB_API_KEY]",
        ),
        "roles": Field(
            SectionType(
                {
                    role: Field(
                        Integer(0, 1 if role in ("chief", "evaluator") else 16384),
                        f"Number of {role} tasks.",
                        otherwise="0",
                        example="1" if role in ("chief", "evaluator") else "4",
                    )
                    for role in LAUNCH_ROLES
                }
            ),
            "TensorFlow tasks by type.",
            otherwise="one worker on each host",
            only="tensorflow",
        ),
        "rendezvous": Field(
            SectionType(
                {
                    "backend": Field(
                        Choice(get_args(RendezvousBackend)),
                        "How torch workers find each other. direct: dtrain sets the complete "
                        "environment of each rank. static and c10d: torchrun runs on every host.",
                        default="direct",
                        example="c10d",
                        only="torch",
                    ),
                    "port": Field(
                        rules.PORT,
                        "Port on the first host where workers meet. With TensorFlow: the first "
                        "port of the tasks.",
                        otherwise="each launch draws a free port from `ports`",
                        example="29511",
                    ),
                    "ports": Field(
                        PortRange(),
                        "Ports that a launch may draw from. Allow them in the firewall.",
                        default="29500-30523",
                        example="40000-40099",
                    ),
                }
            ),
            "How workers find each other.",
        ),
        "layout": Field(
            LAYOUT,
            "How the model is split. `dtrain plan --output FILE` writes it. With tensorflow, dtrain"
            " only passes it to the script, in DTRAIN_LAYOUT.",
            otherwise="what the strategy implies",
        ),
        "training": Field(
            TRAINING,
            "Batch, sequence length and precision, for the planner and for the script, which gets "
            "them in DTRAIN_TRAINING.",
        ),
        "expected": Field(
            EXPECTED,
            "What `dtrain plan` expects of the layout; `dtrain plan --output FILE` writes it. The "
            "launch compares the run with it.",
            otherwise="no comparison",
        ),
        "restart": Field(
            SectionType(
                {
                    "max": Field(
                        Integer(0, 1000),
                        "How many times dtrain restarts a failed job.",
                        default=0,
                        example="3",
                    ),
                    "node_timeout": Field(
                        Duration(1),
                        "How long a host may be unreachable before it counts as lost.",
                        default=300,
                        example="2m",
                    ),
                }
            ),
            "What to do when a worker or a host fails.",
        ),
        "elastic": Field(
            SectionType(
                {
                    "min_hosts": Field(
                        Integer(1, MAX_HOSTS),
                        "The fewest hosts on which the job continues.",
                        required=True,
                        example="6",
                    )
                }
            ),
            "Restart without a lost host if no spare is left. The sizes tensor, pipeline, context "
            "and expert stay the same, and data shrinks (TensorFlow: the number of workers).",
            otherwise="the job ends",
        ),
        "success_policy": Field(
            Choice(get_args(SuccessPolicy)),
            "Which processes must end with status 0 for the job to succeed: those of all hosts, or "
            "those of the first host alone. With first_host, dtrain then stops the others, such as "
            "servers and workers of Ray; one that fails before then fails the job.",
            default="all_hosts",
            example="first_host",
        ),
        "progress": Field(
            SectionType(
                {
                    "line": Field(
                        OneOf(
                            Text(progress_line.fault),
                            ListOf(Text(progress_line.fault), minimum=1),
                            wrap=True,
                        ),
                        "A line of the output, or several, in which {step}, {total} and {loss} "
                        "stand for numbers, other names in braces for further numbers, and * for "
                        "any text.",
                        required=True,
                        example='"step {step}/{total} * loss {loss}"',
                    ),
                    "total": Field(
                        Integer(1, 10**15),
                        "The number of steps, if the line does not have it.",
                        otherwise="the time left is not shown",
                        example="5000",
                    ),
                }
            ),
            "Where the program prints its steps, if it does not report them with dtrain.runtime.",
            otherwise="only reports of dtrain.runtime count",
        ),
        "watchdog": Field(
            SectionType(
                {
                    "silence": Field(
                        Duration(1),
                        "The longest time without output and without progress from any worker.",
                        required=True,
                        example="10m",
                    ),
                    "then": Field(
                        Choice(("report", "stop", "restart")),
                        "What to do after the report on where every worker waits.",
                        default="stop",
                        example="restart",
                    ),
                }
            ),
            "What to do with a job that hangs.",
            otherwise="a hanging job is not detected",
        ),
        "grace": Field(
            Duration(),
            "How long workers have to finish after TERM before they get KILL.",
            default=10,
            example="1m",
        ),
        "on_disconnect": Field(
            Choice(("stop", "keep")),
            "What the hosts do with the job if they hear nothing from the launcher for the time "
            "in `lease`.",
            default="keep",
            example="stop",
        ),
        "lease": Field(
            Duration(15),
            "How long the hosts wait for the launcher before on_disconnect applies.",
            default=300,
            example="15m",
        ),
    }
)
