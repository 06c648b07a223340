"""The command line that runs a worker in a container, for each engine. Pure.

All engines get the same container: the host's network, process ids and shared memory, every GPU,
the user's own user id, and the working folder and the run's folder under their own paths. Only the
file system is the image's. So a worker stays an ordinary process of the host, which signals,
stacks and exit codes reach as without a container, and workers of one host share GPU memory.

The program that the agent starts is the engine's client:

- The client of docker and podman passes the worker's output on, and exits with its status (128
  more than the signal that ended it). The worker is no child of it.
- apptainer and enroot set up the container and become the worker.

The options are those of `docker run` (docs.docker.com/reference/cli/docker/container/run),
podman-run(1), apptainer-exec(1) and doc/cmd/start.md of NVIDIA/enroot.

No value of the environment is on a command line: clients take a variable's value from their own
environment (`--env NAME`; apptainer: APPTAINERENV_NAME). Exceptions are the few variables that
would change the client itself, which are no secrets, see `_BY_VALUE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from dtrain.environ.template import NodeSlot, Template
from dtrain.records import dataclass
from dtrain.spec.model import Container, EngineName, Mount
from dtrain.spec.program import CLIENTS_OWN

WORKDIR = Template(NodeSlot("$dtrain_workdir", "$dtrain_workdir", "workdir"))
RUN_DIR = Template(NodeSlot("$DTRAIN_RUN_DIR", "$DTRAIN_RUN_DIR", "run_dir"))
_HOME = Template(NodeSlot("$HOME", "$HOME", "home"))
_USER = NodeSlot("$(id -u):$(id -g)", "$(id -u):$(id -g)", "user")
_IDS = '$([ "$(id -u)" = 0 ] && echo host || echo keep-id)'
_USER_NAMESPACE = NodeSlot(_IDS, _IDS, "user_namespace")
"""Rootless podman keeps the user's id only if asked, and podman run by root refuses to."""

_BY_VALUE = ("DTRAIN_RUN_DIR", *CLIENTS_OWN)
"""Variables with their values on the command line. DTRAIN_RUN_DIR would mark the client as a
process of the run. None can be a secret."""


@dataclass(frozen=True, slots=True)
class Enclosure:
    """What the node needs to know about the containers of a host, besides each command line."""

    program: str
    """The engine's client."""
    prefix: str
    """Goes in front of a variable's name in the environment of the client."""
    left_out: tuple[str, ...]
    """Variables that the client does not take from the environment of the workers."""
    waits: bool
    """Whether the client waits for the worker, which then is no child of it."""
    remove: tuple[str, ...]
    """Command that ends and removes the containers; empty if they end with their processes."""


@dataclass(frozen=True, slots=True)
class ContainerProcess:
    name: str
    """Of the container: unique on the host."""
    environment: Mapping[str, str]
    """The variables that the launch plan sets."""
    others: tuple[str, ...]
    """Further variables, whose values only the node knows: secrets, for example."""
    gpus: bool
    """Whether it uses GPUs."""


def command(container: Container, worker: ContainerProcess) -> tuple[str, ...]:
    """The words in front of a worker's own command."""
    return tuple(_COMMANDS[container.engine](container, worker))


def enclosure(container: Container, workers: Iterable[ContainerProcess]) -> Enclosure:
    """The containers of a host's workers."""
    engine = container.engine
    by_name = engine not in ("apptainer", "pyxis")
    remove: tuple[str, ...] = ()
    if engine in ("docker", "podman"):
        missing_is_fine = ("--ignore",) if engine == "podman" else ()
        names = (worker.name for worker in workers)
        remove = (engine, "rm", "--force", *missing_is_fine, *names)
    return Enclosure(
        program="apptainer" if engine == "pyxis" else engine,
        prefix="" if by_name else "APPTAINERENV_",
        left_out=_BY_VALUE if by_name else (),
        waits=bool(remove),
        remove=remove,
    )


def _docker(container: Container, worker: ContainerProcess) -> Iterator[str]:
    yield from ("docker", "run", *_isolation(worker), "--user", Template(_USER))
    if worker.gpus:
        yield from ("--gpus", "all")
    yield from _rest(container, worker)


def _podman(container: Container, worker: ContainerProcess) -> Iterator[str]:
    yield from ("podman", "run", *_isolation(worker))
    yield from (Template("--userns=", _USER_NAMESPACE), "--user", Template(_USER))
    if worker.gpus:
        yield from ("--device", "nvidia.com/gpu=all")
    yield from _rest(container, worker)


def _isolation(worker: ContainerProcess) -> tuple[str, ...]:
    # SELinux would deny access to the mounted folders, and the daemon would keep a copy of all
    # output.
    return (
        *("--rm", "--name", worker.name, "--pull=never", "--log-driver=none"),
        *("--network=host", "--ipc=host", "--pid=host", "--security-opt", "label=disable"),
    )


def _rest(container: Container, worker: ContainerProcess) -> Iterator[str]:
    """The words of docker's command line that podman copies."""
    for mount in _mounts(container):
        yield from ("--mount", _mount(mount))
    yield from ("--workdir", WORKDIR, "--entrypoint", "")
    yield from _environment(worker)
    yield from (*container.options, container.image)


def _apptainer(container: Container, worker: ContainerProcess) -> Iterator[str]:
    yield from ("apptainer", "exec", "--cleanenv")
    if worker.gpus:
        yield "--nv"
    for mount in _mounts(container):
        yield from ("--mount", _mount(mount))
    if container.engine == "pyxis":  # in its place; the options are those of pyxis
        image = container.image
        source = f"docker://{image}" if _is_reference(image) else _path(image)
        yield from ("--pwd", WORKDIR, source)
    else:
        yield from ("--pwd", WORKDIR, *container.options, _path(container.image))


def pyxis(container: Container, runs: str) -> Iterator[str]:
    """The options of srun that run its tasks in containers, where Slurm has the plugin pyxis.
    ``runs`` is the folder of the runs, as a part of a template."""
    image = container.image
    if _is_reference(image):
        registry, slash, rest = image.partition("/")
        if slash and ("." in registry or ":" in registry or registry == "localhost"):
            image = f"{registry}#{rest}"
    mounts: list[str] = []
    for mount in (*container.mounts, Mount(WORKDIR, WORKDIR), Mount(runs, runs)):
        mounts += [_path(mount.source), ":", _path(mount.target)]
        mounts += [":ro,"] if mount.read_only else [","]
    yield Template("--container-image=", _path(image))
    yield Template("--container-mounts=", *mounts[:-1], mounts[-1].removesuffix(","))
    yield from ("--container-writable", "--no-container-mount-home", *container.options)


def _is_reference(image: str) -> bool:
    """Whether an image is the name of one in a registry, and not a file."""
    path = image.startswith(("/", "~", ".")) or "://" in image
    return not path and not image.endswith((".sif", ".sqsh"))


def _enroot(container: Container, worker: ContainerProcess) -> Iterator[str]:
    yield from ("enroot", "start", "--rw")
    for mount in _mounts(container):
        options = "x-create=auto,bind" + (",ro" if mount.read_only else "")
        yield from (
            "--mount",
            Template(_path(mount.source), ":", _path(mount.target), ":none:", options),
        )
    if worker.gpus:
        yield from ("--env", "NVIDIA_VISIBLE_DEVICES=all")
        yield from ("--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    yield from _environment(worker)
    # It has no option for the working folder.
    yield from (*container.options, _path(container.image))
    yield from ("sh", "-c", 'cd "$0" && exec "$@"', WORKDIR)


_COMMANDS: Mapping[EngineName, Callable[[Container, ContainerProcess], Iterator[str]]] = {
    "docker": _docker,
    "podman": _podman,
    "apptainer": _apptainer,
    "enroot": _enroot,
    "pyxis": _apptainer,
}


def _environment(worker: ContainerProcess) -> Iterator[str]:
    values = {"HOME": RUN_DIR, "DTRAIN_RUN_DIR": RUN_DIR, **worker.environment}
    for name in _BY_VALUE:
        if name in values:
            yield from ("--env", Template(f"{name}=", values[name]))
    for name in sorted({*values, *worker.others}.difference(_BY_VALUE)):
        yield from ("--env", name)


def _mounts(container: Container) -> Iterator[Mount]:
    yield from container.mounts
    yield from (Mount(WORKDIR, WORKDIR), Mount(RUN_DIR, RUN_DIR))


def _mount(mount: Mount) -> str:
    words: list[str] = ["type=bind,src=", _path(mount.source), ",dst=", _path(mount.target)]
    return Template(*words, ",ro" if mount.read_only else "")


def _path(text: str) -> str:
    return Template(_HOME, text[1:]) if text.startswith("~/") else text
