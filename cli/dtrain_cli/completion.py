"""Values that a shell offers for arguments and options.

Each function reads only what it needs, and none connects to a host. Typer drops the values that do
not begin with what is typed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dtrain.spec.model import ClusterFile

LIMIT = 200
"""Values of one kind; more are no help."""
_SAFE = re.compile(r"[A-Za-z0-9_.,:/+@%=-]+")
"""Values that mean the same with and without quotes. zsh evaluates what it is offered, and bash
inserts it without quotes. Other file names remain to the shell's own completion."""
_SECTION = re.compile(rb"^\s*[\"']?cluster[\"']?\s*:", re.MULTILINE)
_HEAD = 1 << 16

_Values = Callable[[str], list[str]]


def without_rich() -> None:
    """Keep Typer from formatting each description with rich, which is slow to import."""
    import typer._completion_classes as shells

    if hasattr(shells, "_sanitize_help_text"):
        shells._sanitize_help_text = lambda text: text


def one_of(*words: str) -> _Values:
    """A function that offers ``words``."""
    return lambda incomplete: [*words]


def cluster_files(incomplete: str) -> list[str]:
    """Cluster files in the folder that is typed, and in its folders. None if the name begins with
    ``~``: the shell then offers all files."""
    folder = incomplete.rpartition("/")[0] + "/" if "/" in incomplete else ""
    if incomplete.startswith("~"):
        return []
    here = Path(folder or ".")
    names = (path for pattern in ("*.y*ml", "*/*.y*ml") for path in sorted(here.glob(pattern)))
    found = (
        folder + str(path.relative_to(here))
        for path in islice(names, LIMIT)
        if _SAFE.fullmatch(str(path.relative_to(here)))
        and not any(part.startswith(".") for part in path.relative_to(here).parts)
        and _is_cluster_file(path)
    )
    return list(found)


def _is_cluster_file(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return _SECTION.search(file.read(_HEAD)) is not None
    except OSError:
        return False


def runs(incomplete: str) -> list[str]:
    """All runs, the latest first."""
    from dtrain.runs.folder import RunFolder

    return [folder.name for folder in reversed(RunFolder.all()[-LIMIT:])]


def open_runs(incomplete: str) -> list[str]:
    """The runs that are not over."""
    from dtrain.runs.status import open_folders

    return [folder.name for folder in open_folders()]


def files_and_runs(incomplete: str) -> list[str]:
    return cluster_files(incomplete) + runs(incomplete)


def hosts(ctx: typer.Context, incomplete: str) -> list[str]:
    """The hosts of the file or run on the command line."""
    cluster = _spec(ctx).cluster
    return _listed(incomplete, (host.name for host in (*cluster.hosts, *cluster.spares)))


def ranks(ctx: typer.Context, incomplete: str) -> list[str]:
    """The ranks of the job on the command line."""
    from dtrain.launchplan.build import build

    spec = _spec(ctx)
    return _listed(incomplete, map(str, range(build(spec).world_size if spec.job.ranked else 0)))


def gpus(incomplete: str) -> list[str]:
    from dtrain.parallelism.cluster.hardware_table import hardware

    return [gpu.name for gpu in hardware().gpus]


def models(incomplete: str) -> list[str]:
    from dtrain.parallelism.model.models import models

    return [model.name for model in models()]


def settings(incomplete: str) -> list[str]:
    """Keys of the cluster file that have a value, and their examples. A key with an example is not
    the only match, so bash adds no space after the ``=``."""
    from dtrain_cli.commands.help import keys

    # A key in capitals stands for a name, such as that of a host.
    pages = {key: page for key, page in keys().items() if key.islower() and "\n- Type: " in page}
    examples = ((key, re.search(r"\n- Example: `\S+: (.+)`", pages[key])) for key in pages)
    given = (f"{key}={found[1]}" for key, found in examples if found)
    return [*(f"{key}=" for key in pages), *filter(_SAFE.fullmatch, given)]


def topics(incomplete: str) -> list[tuple[str, str] | str]:
    """Help pages, and after a first letter also keys of the cluster file."""
    from dtrain_cli.commands.help import keys, topics

    return [*topics().items(), *(keys() if incomplete else ())]


def _spec(ctx: typer.Context) -> ClusterFile:
    """The cluster file of the command line. Raises DtrainError, which completion hides."""
    from dtrain.loading import load
    from dtrain.runs.record import Record
    from dtrain.runs.status import find_run

    given = (ctx.params.get(name) for name in ("file", "target", "run"))
    # An option that still lacks its value ends the parsing before the arguments.
    named = next((str(one) for one in (*given, *ctx.args) if one is not None), "")
    if Path(named).is_file():
        return load(Path(named), settings=ctx.params.get("settings") or ()).spec()
    return Record.load(find_run(named).path).request.spec()


def _listed(incomplete: str, names: Iterable[str]) -> list[str]:
    """Complete the last part of a list such as ``gpu01,gpu02``."""
    head, comma, _ = incomplete.rpartition(",")
    before = head.split(",")
    new = (name for name in names if name not in before and _SAFE.fullmatch(name))
    return [head + comma + name for name in islice(new, LIMIT)]
