"""Checks that setup, interpreter, framework and packages work and are the same on all hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dtrain.checks.evidence import Evidence, Facts, HostFacts
from dtrain.checks.finding import HOSTS, Finding, warning
from dtrain.checks.skew import differing, first_of, outliers
from dtrain.wording import counted

_OLD_GLIBC = (2, 28)
"""The minimum for wheels of PyTorch since 2.6 and of TensorFlow."""

_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.MULTILINE)
"""Starts the stack that Python prints below the message of a fatal error."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    for host in evidence.hosts:
        answer = host.fact("interpreter")
        if answer and "unsafe" not in answer:  # `files` reports unsafe folders
            yield from _works(evidence, host, answer)
    yield from _python(evidence)
    yield from _framework(evidence)
    yield from _packages(evidence)


def _works(evidence: Evidence, host: HostFacts, answer: Facts) -> Iterator[Finding]:
    setup = evidence.plan.job.setup
    python = host.part.python
    printed = _THREAD.split(answer.get("output") or "")[0]
    last = printed.strip().rpartition("\n")[2] or "no output"
    if "failed_setup" in answer and setup:
        step = answer["failed_setup"]
        how = "timed out" if answer["status"] is None else "failed"
        yield host.error(
            "setup",
            f"line {step} of job.setup ({setup[step - 1]}) {how}: {last}",
            "every line of job.setup succeeds",
            "run the line there by hand and correct it",
        )
    elif "python" not in answer:
        late = answer.get("status") is None
        own = "" if evidence.plan.slurm else f" (or cluster.overrides.{HOSTS}.python)"
        remedy = f"set cluster.python{own} to a working interpreter"
        if "No module named 'encodings'" in printed:  # it has no standard library
            remedy = (
                f"unset PYTHONHOME, if job.env, job.setup or a login script sets it; or {remedy}"
            )
        elif "Too many open files" in printed:
            remedy = (
                "raise the limit of open files: `ulimit -n` in job.setup or a login script, nofile"
                " in /etc/security/limits.conf"
            )
        yield host.error(
            "python",
            f"{python} " + ("timed out" if late else f"does not run: {last}"),
            "the job's interpreter runs on every host",
            remedy,
        )
    elif answer.get("module_found") == {"found": False}:
        yield host.error(
            "module",
            f"{python} cannot find the module {evidence.plan.job.module}",
            "job.module can be imported in job.workdir",
            "set job.workdir to its parent folder, or install the module there",
        )
    elif answer.get("program_found") == {"found": False} and evidence.plan.job.command:
        program = evidence.plan.job.command[0]
        yield host.error(
            "program",
            f"there is no program {program}" + ("" if "/" in program else " on PATH"),
            "every host can run the program of job.command",
            "install it there, or correct job.command; the folder of cluster.python is on PATH,"
            " and job.setup can add others",
        )


def _python(evidence: Evidence) -> Iterator[Finding]:
    versions = {
        host.name: "Python " + ".".join(version.split(".")[:2])
        for host in evidence.hosts
        if (version := host.fact("interpreter").get("python"))
    }
    for outlier in outliers(versions):
        yield outlier.warning(
            "python",
            "the same version on all hosts: pickled objects and packages depend on it",
            f"set {evidence.python_key} to a {outlier.usual}",
        )


def _framework(evidence: Evidence) -> Iterator[Finding]:
    name = evidence.plan.job.framework
    versions: dict[str, str] = {}
    builds: dict[str, str] = {}
    nccl: dict[str, str] = {}
    for host in evidence.hosts:
        found = host.fact("interpreter").get("framework")
        if found is None:
            continue
        if found.get("missing") or "error" in found:
            yield _does_not_import(evidence, host, found)
            continue
        if found.get("version"):
            versions[host.name] = f"{name} {found['version']}"
        if found.get("nccl"):
            nccl[host.name] = f"NCCL {found['nccl']}"
        if found.get("cuda"):
            builds[host.name] = f"{name} for CUDA {found['cuda']}"
        yield from _devices(host, name, found)
    for outlier in outliers(versions):
        first = evidence[outlier.hosts[0]]
        yield outlier.error(
            name,
            "the same version on all hosts: collectives of different versions fail or hang",
            f"run there: {_install(first, name, outlier.usual.split()[-1])}",
        )
    if len(set(versions.values())) < 2:
        for outlier in outliers(builds):
            yield outlier.warning(
                "cuda",
                "the same build on all hosts: each build has its own NCCL and kernels",
                f"install the same {name} wheel on all hosts",
            )
        for outlier in outliers(nccl):
            yield outlier.error(
                "nccl",
                "the same version on all hosts",
                f"install the same {name} wheel and nvidia-nccl package; check LD_LIBRARY_PATH and"
                " LD_PRELOAD there for another libnccl.so",
            )


def _does_not_import(evidence: Evidence, host: HostFacts, found: Facts) -> Finding:
    name = evidence.plan.job.framework
    python = host.part.python
    versions = [
        str(other["version"])
        for peer in evidence.hosts
        if (other := peer.fact("interpreter").get("framework")) and other.get("version")
    ]
    seen = f"{name} is not installed for {python}"
    remedy = f"run there: {_install(host, name, versions[0] if versions else '')}"
    if "error" in found:
        seen = f"{python} cannot import {name}: {found['error']}"
    else:
        keys = "cluster.python (for one host, cluster.overrides.HOST.python)"
        remedy += f"; if another Python there has {name}, set {keys} to it"
    libc = host.fact("machine").get("libc", "")
    numbers = tuple(map(int, re.findall(r"\d+", libc)))
    if libc.startswith("glibc") and numbers < _OLD_GLIBC:
        remedy = (
            f"current wheels need glibc 2.28, and the host has {libc}: run the job in a container,"
            f" or set {evidence.python_key} to an interpreter from conda-forge"
        )
    expected = f"the job's interpreter can import {name}"
    return host.error(name, seen, expected, remedy)


def _devices(host: HostFacts, name: str, found: Facts) -> Iterator[Finding]:
    wanted = len(host.part.host.gpus)
    if found.get("distributed") is False:
        yield host.error(
            name,
            f"torch {found.get('version')} was built without torch.distributed",
            "a build with torch.distributed",
            f"run there: {host.part.python} -m pip install --force-reinstall torch",
        )
    if not wanted or "gpus" not in found or "error" in host.facts.get("gpus", {}):
        return
    driver = host.fact("gpus").get("cuda")
    built = found.get("cuda")
    if name == "torch" and not built and not found.get("hip"):
        yield host.error(
            name,
            f"torch {found.get('version')} is a CPU-only build",
            f"a build for the {counted(wanted, 'GPU')} that the job uses there",
            f"run there: {host.part.python} -m pip install --force-reinstall torch {_BUILDS}",
        )
    elif built and driver and _major(built) > _major(driver) > 0:
        yield host.error(
            name,
            f"{name} is built for CUDA {built}; the driver there supports CUDA up to {driver}",
            "a driver that supports the CUDA version of the framework",
            f"install a newer NVIDIA driver, or a {name} built for CUDA {_major(driver)}",
        )
    elif found["gpus"] < wanted:
        yield host.error(
            name,
            f"{name} sees {found['gpus']} of the {counted(wanted, 'GPU')} that the job uses there",
            "the framework can use every GPU",
            "check `nvidia-smi -L`, permissions of /dev/nvidia*, and CUDA_VISIBLE_DEVICES there",
        )
    elif not _supported(found):
        yield host.error(
            name,
            f"{name} {found.get('version')} has no code for GPUs of compute capability"
            f" {found['capability']} (it has {', '.join(found['architectures'])})",
            "a build with code for these GPUs",
            f"run there: {host.part.python} -m pip install --upgrade {name}",
        )


def _supported(found: Facts) -> bool:
    """Whether the build has code for the GPU. A binary (sm) runs on its major architecture, from
    its minor version up. PTX (compute) runs on all newer architectures."""
    if not found.get("capability") or not found.get("architectures"):
        return True
    major, minor = map(int, found["capability"].split("."))
    for name in found["architectures"]:
        kind, _, digits = name.partition("_")
        digits = re.sub(r"\D", "", digits)
        if kind not in ("sm", "compute") or len(digits) < 2:
            return True  # Names of ROCm, such as gfx942, are not comparable.
        built = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and built[0] == major and built[1] <= minor:
            return True
        if kind == "compute" and built <= (major, minor):
            return True
    return False


def _packages(evidence: Evidence) -> Iterator[Finding]:
    job = evidence.plan.job
    tables = {
        host.name: {
            name: version for name, version in found.items() if name not in (job.framework, "pip")
        }
        for host in evidence.hosts
        if (found := host.fact("interpreter").get("packages")) and "error" not in found
    }
    if len(tables) < 2:
        return
    for host, names in differing(tables).items():
        there = [f"{name} {tables[host].get(name, 'missing')}" for name in sorted(names)]
        yield warning(
            "packages",
            [host],
            f"different from most hosts: {first_of(there)}",
            "the same versions on all hosts",
            "install one requirements file on all hosts, or set cluster.python to an environment"
            " on a shared file system",
        )


_BUILDS = "with the --index-url for that build from 'Get Started' on pytorch.org"


def _install(host: HostFacts, name: str, version: str) -> str:
    """The command that installs a framework. Builds that are not on PyPI come from PyTorch's own
    index."""
    command = f"{host.part.python} -m pip install '{name}=={version}'"
    if not version:
        command = f"{host.part.python} -m pip install {name}"
    build = version.partition("+")[2]
    if name == "torch" and re.fullmatch(r"(cu|rocm|cpu|xpu)[0-9.]*", build):
        command += f" {_BUILDS}"
    return command


def _major(version: str) -> int:
    """The major version; 0 if ``version`` is not a number, as for some drivers."""
    found = re.match(r"[0-9]{1,9}", version)
    return int(found[0]) if found else 0
