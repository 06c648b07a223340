"""Checks that every host has the container engine, the image, and the GPU toolkit."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.checks.evidence import Evidence, Facts, HostFacts
from dtrain.checks.finding import Finding
from dtrain.spec.model import Container

_SUBJECT = "container"
_INSTALL = {
    "docker": "see docs.docker.com/engine/install",
    "podman": "apt-get install podman (or dnf)",
    "apptainer": "see apptainer.org/docs/admin/latest/installation.html",
    "enroot": "see github.com/NVIDIA/enroot",
}
_DENIED = "permission denied"


def judge(evidence: Evidence) -> Iterator[Finding]:
    container = evidence.plan.job.container
    if container is None:
        return
    for host in evidence.hosts:
        found = host.fact("container")
        # The setup lines, which have not run here, may find the engine.
        unknown = evidence.plan.job.setup and not found.get("engine")
        if found and not unknown:
            yield from _judge(container, host, found)


def _judge(container: Container, host: HostFacts, found: Facts) -> Iterator[Finding]:
    engine = container.engine
    if not found["engine"]:
        yield host.error(
            _SUBJECT,
            f"{engine} is not installed",
            f"job.container.engine, {engine}, is on every host",
            f"install it there ({_INSTALL[engine]}), or name another engine",
        )
    elif "failed" in found:
        denied = _DENIED in found["failed"].lower()
        yield host.error(
            _SUBJECT,
            f"{engine} does not work: {found['failed'].splitlines()[-1]}",
            f"your user can run {engine}",
            "run there: sudo usermod -aG docker $USER, and log in again"
            if denied and engine == "docker"
            else f"run there: {engine} info",
        )
    elif found.get("image") is False:
        yield host.error(
            _SUBJECT,
            f"{engine} has no image {container.image}",
            "every host has the image: a launch does not pull it",
            _remedy(container),
        )
    if found.get("gpus") is False and host.part.host.gpus:
        yield host.error(
            _SUBJECT,
            f"{engine} cannot give GPUs to containers",
            "NVIDIA's Container Toolkit is installed and set up",
            _toolkit(engine),
        )


def _remedy(container: Container) -> str:
    engine, image = container.engine, container.image
    if engine in ("docker", "podman"):
        return f"run there: {engine} pull {image}"
    verb = "pull" if engine == "apptainer" else "import -o"
    return f"copy it there, or run there: {engine} {verb} {image} docker://IMAGE"


def _toolkit(engine: str) -> str:
    return {
        "docker": "install nvidia-container-toolkit there, then run: sudo nvidia-ctk runtime"
        " configure --runtime=docker && sudo systemctl restart docker",
        "podman": "install nvidia-container-toolkit there, then run: sudo nvidia-ctk cdi generate"
        " --output=/etc/cdi/nvidia.yaml",
    }.get(engine, "install libnvidia-container-tools there")
