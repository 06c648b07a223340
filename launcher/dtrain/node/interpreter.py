"""Facts about the job's own interpreter, for `dtrain check`.

Runs like the job's workers: with their interpreter, folder and environment, after the setup lines.
Writes an object of JSON, on one line, to the descriptor in DTRAIN_REPORT_FD. Each part may fail on
its own: a framework that cannot be imported is a fact. Each launch runs it, so it imports little.
Python 3.8.
"""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Callable

    from dtrain.node.importer import Importer

    Json = dict[str, Any]


def limits() -> Json:
    import resource

    found: Json = {}
    for name in ("memlock", "nofile", "nproc"):
        soft = resource.getrlimit(getattr(resource, "RLIMIT_" + name.upper()))[0]
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def packages() -> Json:
    from importlib.metadata import distributions

    found: Json = {}
    for one in distributions():
        name = one.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), one.version)
    return found


def distributed(name: str) -> str | None:
    """The version of the distribution of the same name as a package."""
    from importlib.metadata import PackageNotFoundError, version

    for variant in ("", "-cpu", "-rocm", "-intel"):
        try:
            return version(name + variant)
        except PackageNotFoundError:
            continue
    return None


def installed(name: str) -> Json | None:
    """The version of a package, without its slow import. Importing torch.version would take long,
    too: it imports typing."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    specs = (finder.find_spec(name, None) for finder in finders)
    spec = next(filter(None, specs), None)
    if spec is None or not spec.submodule_search_locations:
        return None
    keys = {"__version__": "version", "cuda": "cuda", "hip": "hip"}
    found: Json = {}
    try:
        with open(os.path.join(next(iter(spec.submodule_search_locations)), "version.py")) as file:
            for line in file:  # such as "cuda: Optional[str] = '12.8'"
                variable, _, value = line.strip().partition(" = ")
                key = keys.get(variable.partition(":")[0])
                if key and value[:1] in ("'", '"') and value[:1] == value[-1:]:
                    found[key] = value[1:-1]
    except (OSError, ValueError):  # some packages have no such file
        pass
    return found if "version" in found else {**found, "version": distributed(name)}


def imported(name: str) -> Json:
    """What a framework says after its import."""
    from importlib import import_module
    from importlib.util import find_spec

    if find_spec(name) is None:
        return {"missing": True}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return FRAMEWORKS[name](import_module(name))


def look_at_torch(torch: Any) -> Json:
    found: Json = {"version": str(torch.__version__), "cuda": torch.version.cuda}
    found["hip"] = getattr(torch.version, "hip", None)
    found["gpus"] = torch.cuda.device_count()
    found["distributed"] = torch.distributed.is_available()
    if found["distributed"]:
        found["nccl"] = None
        if torch.distributed.is_nccl_available() and found["cuda"]:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if found["gpus"] and torch.cuda.is_available():
        found["architectures"] = torch.cuda.get_arch_list()
        found["capability"] = "%d.%d" % torch.cuda.get_device_capability(0)
    return found


def look_at_tensorflow(tf: Any) -> Json:
    build = tf.sysconfig.get_build_info()
    return {
        "version": tf.__version__,
        "cuda": build.get("cuda_version"),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }


def look_at_jax(jax: Any) -> Json:
    return {"version": jax.__version__}


FRAMEWORKS: dict[str, Callable[[Any], Json]] = {
    "torch": look_at_torch,
    "tensorflow": look_at_tensorflow,
    "jax": look_at_jax,
}


def executable(program: str) -> bool:
    """Whether a worker can execute it. The folder of the job's Python is on its PATH, too."""
    folders = [""]
    if "/" not in program:
        folders = [*os.get_exec_path(), os.path.dirname(sys.executable)]
    paths = [os.path.join(folder, program) for folder in folders]
    return any(os.path.isfile(path) and os.access(path, os.X_OK) for path in paths)


def attempt(probe: Callable[[], Json]) -> Json:
    try:
        return probe()
    except BaseException as failure:  # noqa: BLE001 - the failure is the fact
        words = str(failure).strip().splitlines() or [""]
        return {"error": "%s: %s" % (type(failure).__name__, words[0])}


def to_json(value: Any) -> str:
    """``value`` as JSON. To import json would take a third of this program's time."""
    if isinstance(value, dict):
        return "{%s}" % ",".join(to_json(key) + ":" + to_json(value[key]) for key in value)
    if isinstance(value, list):
        return "[%s]" % ",".join(map(to_json, value))
    if isinstance(value, str):
        units = value.encode("utf-16-be", "surrogatepass").hex()
        return '"%s"' % "".join("\\u" + units[at : at + 4] for at in range(0, len(units), 4))
    return "null" if value is None else str(value).lower()  # a number or a bool


def look(options: Json) -> Json:
    """All facts. ``options``: see `dtrain.session.facts.gather_order`."""
    found: Json = {
        "python": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "limits": attempt(limits),
    }
    if options.get("packages"):
        found["packages"] = attempt(packages)
    framework = options["framework"]
    if framework == "none":
        pass
    elif options.get("import"):
        found["framework"] = attempt(lambda: imported(framework))
    else:
        found["framework"] = attempt(lambda: installed(framework) or {"missing": True})
    if options.get("module"):
        from importlib.util import find_spec

        # Finding a submodule imports its package.
        name = options["module"] if options.get("import") else options["module"].split(".")[0]
        sys.path.insert(0, os.getcwd())
        found["module_found"] = attempt(lambda: {"found": find_spec(name) is not None})
    if options.get("program"):
        found["program_found"] = attempt(lambda: {"found": executable(options["program"])})
    return found


def main(stream: BinaryIO, importer: Importer) -> None:
    found = look(marshal.load(stream))
    with os.fdopen(int(os.environ["DTRAIN_REPORT_FD"]), "w") as report:
        report.write(to_json(found) + "\n")
    os._exit(0)  # an orderly end takes 4 ms
