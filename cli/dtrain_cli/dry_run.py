"""What `dtrain launch --dry-run` prints or writes: the launch plan of a cluster file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dtrain.diagnostics import UsageError
from dtrain.engines.render import batch_script
from dtrain.launchplan import shell
from dtrain.launchplan.plan import LaunchPlan
from dtrain.wording import counted
from dtrain_cli.files import refuse_planted
from dtrain_cli.views import plan as view

_RENDERED = re.compile(r"(?!\.\.?/)[A-Za-z0-9._:-]+/[a-z]+-[0-9]+\.(?:sh|env)|job\.(?:sbatch|yaml)")
"""Name patterns of the files that a dry run writes."""


def rendered(plan: LaunchPlan, *, json: bool = False, output: Path | None = None) -> str:
    """Return a dry run as text for stdout. With ``output``, write it into that folder instead.

    Uses no network and no clock, and returns the same bytes on every machine.
    """
    script = batch_script(plan)
    manifest = view.as_json(plan, script) if json or output is not None else ""
    if output is not None:
        count = _write(plan, script, manifest, output)
        if not json:
            files, hosts = counted(count, "file"), counted(len(plan.hosts), "host")
            return f"{files} for {hosts} written to {output}\n"
    if json:
        return manifest
    return "".join(script.values()) or view.as_text(plan)


def _write(plan: LaunchPlan, script: Mapping[str, str], manifest: str, output: Path) -> int:
    """Write one folder for each host or the batch script, and the plan itself. Remove files of an
    earlier plan that this plan does not have, so that a diff in CI shows the removal.

    ``output`` may come from a checkout, so follow no link out of it.
    """
    marker = output / "plan.json"
    files = dict(script or shell.files(plan)) | {"plan.json": manifest}
    refuse_planted(output)
    try:
        if output.is_dir() and any(output.iterdir()) and not marker.is_file():
            raise UsageError(
                f"{output}: not empty, and not written by an earlier dry run",
                hint="name a new folder",
            )
        for path in output.rglob("*"):
            if path.is_symlink():
                raise UsageError(
                    f"{path}: a link; a dry run writes only plain files",
                    hint="remove it, or name a new folder",
                )
        for path in [*output.glob("*/*"), *output.glob("job.*")]:
            if _RENDERED.fullmatch(str(path.relative_to(output))):
                path.unlink()
        for name, text in files.items():
            target = output / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode(errors="surrogateescape"))
            target.chmod(0o755 if name.endswith(".sh") else 0o644)
        for folder in output.iterdir():
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise UsageError(
            f"{error.filename or output}: cannot write the dry run: {error.strerror}",
            hint="name a folder that you can write to",
        ) from None
    return len(files)
