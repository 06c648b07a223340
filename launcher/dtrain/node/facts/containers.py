"""Facts about the container engine of the job, its image, and its access to GPUs."""

from __future__ import annotations

import os

from dtrain.node.facts.files import expand
from dtrain.node.facts.programs import plain, run
from dtrain.node.files import find_program, listed, read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder

CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
MAX_SPEC = 1 << 20
"""Bytes of a CDI file to search."""


def containers(request: GatherOrder) -> Json:
    """``engine``: whether it is there. ``failed``: why it does not work. ``image``: whether the
    host has it. ``gpus``: whether containers can have the GPUs, if that is known."""
    wanted = request["container"]
    if wanted is None:
        return {}
    name, image = wanted["engine"], wanted["image"]
    program = find_program(name)
    found: Json = {"engine": program is not None}
    if program is None:
        return found
    if name in ("docker", "podman"):
        status, out, err = run([program, "images", "--quiet", image], environment=plain())
        if status != 0:
            found["failed"] = (err or out).strip()[-1000:] or "no answer"
            return found
        # `inspect` also knows an image by an id or a digest.
        inspect = [program, "image", "inspect", image]
        found["image"] = bool(out.strip()) or run(inspect, environment=plain())[0] == 0
    elif name == "enroot" and "/" not in image:
        made = run([program, "list"], environment=plain())[1].split()
        found["image"] = image in made or os.path.exists(path_of(request, image))
    elif "://" not in image:
        found["image"] = os.path.exists(path_of(request, image))
    found["gpus"] = has_gpus(name, program)
    return found


def path_of(request: GatherOrder, image: str) -> str:
    """A relative path starts at the working folder."""
    return os.path.join(expand(request["workdir"]), expand(image) if image[:1] == "~" else image)


def has_gpus(engine: str, program: str) -> bool | None:
    """Whether NVIDIA's Container Toolkit is set up for the engine."""
    if engine == "podman":
        return has_cdi_file()
    if engine == "enroot":
        return find_program("nvidia-container-cli") is not None
    if engine == "apptainer":  # finds the libraries itself
        return None
    runtimes = run([program, "info", "--format", "{{json .Runtimes}}"], environment=plain())[1]
    hook = find_program("nvidia-container-runtime-hook")
    return "nvidia" in runtimes or hook is not None or has_cdi_file()


def has_cdi_file() -> bool:
    """Whether a file of the Container Device Interface describes NVIDIA's GPUs."""
    paths = (os.path.join(folder, name) for folder in CDI_FOLDERS for name in listed(folder))
    specs = (path for path in paths if path.endswith((".yaml", ".json")))
    return any(b"nvidia.com/gpu" in (read_file(path, MAX_SPEC) or b"") for path in specs)
