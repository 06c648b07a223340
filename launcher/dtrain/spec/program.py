"""What `job` runs: a script, a module or a command, with a process for each GPU or each host."""

from __future__ import annotations

from dtrain.spec.machines import machines
from dtrain.spec.model import Mount
from dtrain.spec.problems import Problems, TextSpan
from dtrain.spec.schema import Section
from dtrain.spec.source import Sequence
from dtrain.spec.strategies import STRATEGIES
from dtrain.spec.value_rules import mount

PROGRAMS = ("script", "module", "command")

CLIENTS_OWN = ("HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "TMPDIR")
"""Variables that change the client of a container engine."""

_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
}
"""The modules of launchers."""
_WORDS = 8
"""How many words of a command may precede a launcher, as in `uv run` or `env A=b`, at most."""


def check_program(job: Section, problems: Problems) -> None:
    """Check that the file gives exactly one program."""
    given = [key for key in PROGRAMS if key in job]
    if len(given) > 1:
        last = max(map(job.key_place, given), key=lambda place: (place.line, place.column))
        problems.add(f"job has both a {given[0]} and a {given[1]}", last, "keep the one to run")
    if not given and job.misspelled.isdisjoint(PROGRAMS):
        problems.add(
            "job has no program to run",
            job.head,
            "add 'script: train.py', 'module: my.train' for `python -m my.train`, or 'command: "
            "[…]' for any other program",
        )


def check_container(job: Section, problems: Problems) -> None:
    """No secret is a variable that the client of a container engine uses itself, and no two mounts
    have one target."""
    for item in job.texts("secrets") if "container" in job else ():
        if item.text in CLIENTS_OWN:
            problems.add(
                f"{item.text} cannot be a secret of a job in containers: it changes the engine "
                "itself",
                item.place,
                "set it in job.env, or in the image",
            )
    container = job.section("container")
    taken = {(job.get("workdir") or "~").rstrip("/"): "which is always mounted: job.workdir"}
    for item in container.texts("mounts"):
        if mount(item.text):
            continue  # not valid, which was reported
        target = Mount.parse(item.text).target.rstrip("/")
        if target in taken:
            problems.add(
                f"a container cannot have another mount at {target}, {taken[target]}",
                item.place,
                "remove it, or mount it at a folder of its own: SOURCE:TARGET",
            )
        taken[target] = "the target of a mount before it"


def check_per(cluster: Section, job: Section, problems: Problems) -> None:
    """Check `job.per` against the framework, the strategy and a program that starts processes."""
    per, framework = job.get("per"), job.get("framework")
    if not job.sound("per", "framework", "strategy") or framework is None:
        return
    if framework == "tensorflow" and per == "gpu":
        problems.add(
            "tensorflow does not use per: it runs one task on each host, or the tasks in job.roles",
            job.place("per"),
            "remove per; to divide the GPUs among 8 workers, for example, add 'roles: {worker: 8}'",
        )
        return
    name = job.get("strategy")
    strategy = STRATEGIES[framework].get(name or "")
    if strategy and name not in ("none", "auto") and framework != "tensorflow":
        wanted = "host" if strategy.processes == "host" else "gpu"
        if per not in (None, wanted):
            problems.add(
                f"the strategy {name} runs one process for each {wanted.upper()}"
                if wanted == "gpu"
                else f"the strategy {name} runs one process on the host",
                job.place("per"),
                "remove per, or use 'strategy: none'",
            )
            return
        per = wanted
    if framework != "tensorflow":
        _check_launcher(cluster, job, per, problems)


def _check_launcher(cluster: Section, job: Section, per: str | None, problems: Problems) -> None:
    """Check that a launcher, which starts a process for each GPU, runs once per host."""
    found = _launcher(job)
    if found is None:
        return
    launcher, place = found
    backend = job.section("rendezvous").get("backend", "direct")
    if backend != "direct" and job.get("framework") == "torch":
        problems.add(
            f"'backend: {backend}' starts torchrun, which would start {launcher}",
            place,
            "remove backend, and add 'per: host' to job",
        )
        return
    hosts = machines(cluster, cluster.get("hosts", ())) if "hosts" in cluster.values else ()
    workers = max((host.workers for host in hosts), default=1)
    if per == "host" or workers == 1:
        return
    options = {
        "torchrun": "--nnodes={nodes} --nproc-per-node={gpus} --node-rank={node_rank} "
        "--master-addr={master_addr} --master-port={master_port}",
        "accelerate launch": "--num_machines={nodes} --num_processes={total_gpus} "
        "--machine_rank={node_rank} --main_process_ip={master_addr} "
        "--main_process_port={master_port}",
        "deepspeed": "--hostfile=FILE --no_ssh --node_rank={node_rank} "
        "--master_addr={master_addr} --master_port={master_port}",
    }[launcher]
    problems.add(
        f"{launcher} starts a process for each GPU itself, and each host would start it "
        f"{workers} times",
        place,
        f"add 'per: host' to job, and give it these arguments: {options}; or let dtrain start "
        f"the ranks: name the script in job.script, without {launcher}",
    )


def _launcher(job: Section) -> tuple[str, TextSpan] | None:
    """The launcher in the job's program, with its position; None if there is none."""
    if launcher := _MODULES.get(job.get("module", "")):
        return launcher, job.place("module")
    words = ["", *(word.rpartition("/")[2] for word in job.get("command", ())[:_WORDS]), ""]
    node = job.entries["command"].value if "command" in job else None
    for at, word in enumerate(words[1:-1]):
        if word.endswith(".py"):
            break
        if launcher := _started(words[at], word, words[at + 2]):
            place = node.items[at].place if isinstance(node, Sequence) else job.place("command")
            return launcher, place
    return None


def _started(before: str, word: str, after: str) -> str | None:
    """The launcher that a word of a command starts."""
    if word == "-m":
        return _MODULES.get(after)
    if word == "torchrun":
        return word
    if (word, after) == ("accelerate", "launch"):
        return "accelerate launch"
    # After an option it is a package or an environment: `uv run --with deepspeed x.py`.
    if word == "deepspeed" and (before == "--" or not before.startswith("-")):
        return word if after.startswith("-") or after.endswith(".py") else None
    return None
