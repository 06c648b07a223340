"""``job.sbatch``, held byte for byte against what was reviewed: ``cases/*.yaml`` and ``*.sbatch``.

``--update-golden`` writes them anew; read the `git diff`.
"""

from __future__ import annotations

import grp
import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import dtrain_cli
from dtrain.diagnostics import SpecError
from dtrain.engines.slurm import script
from dtrain.launchplan.build import build
from dtrain.launchplan.plan import LaunchPlan
from dtrain.launchplan.tasks import exported_lines, tasks_of, uniform
from dtrain.spec.load import parse
from dtrain_cli.dry_run import rendered
from generated_pages import features
from support.specs import read

FOLDER = Path(__file__).parent / "cases"
CONFIGS = Path(__file__).parents[3] / "configs"
CASES = sorted(FOLDER.glob("*.yaml"))

FILE = """
cluster: {slurm: {}, nodes: 2, gpus: 2}
job: {framework: torch, script: t.py}
"""


@pytest.fixture(params=CASES, ids=lambda path: path.stem)
def case(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def plan(text: str) -> LaunchPlan:
    return build(parse(text, "job.yaml"))


def test_golden(case: Path, golden: Callable[[str, Path], None]) -> None:
    text = rendered(build(read(case)))
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)
    golden(text, case.with_suffix(".sbatch"))


def test_the_script_writes_the_words_that_are_read_at_its_end() -> None:
    text = script.render(plan(FILE))
    for words in (script.TIME_LIMIT, script.PREEMPTED):
        assert f'echo "dtrain: {words}" >&2' in text


def test_every_process_of_a_uniform_job_has_the_same_lines() -> None:
    """The script renders one of them."""
    for case in CASES:
        job = build(read(case))
        tasks = tasks_of(job)
        if uniform(job, tasks):
            lines = {"\n".join(exported_lines(task)) for task in tasks}
            assert len(lines) == 1, case.stem
            assert len({repr(getattr(task.process.argv, "parts", 0)) for task in tasks}) == 1


REFUSED = {
    "gpt-100b.yaml": ["job.elastic"],
    "tensorflow-parameter-server.yaml": ["job.on_disconnect"],
}
"""Keys of a file of configs/ that Slurm has no feature for."""


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_shipped_file_moves_to_slurm_with_its_cluster_alone(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    cluster = document["cluster"]
    kept = ("gpus", "slots", "gpu", "network", "python", "run_dir")
    nodes = len(read(path).cluster.hosts)
    document["cluster"] = {key: cluster[key] for key in kept if key in cluster}
    document["cluster"] |= {"slurm": {}, "nodes": nodes}
    try:
        text = script.render(plan(yaml.safe_dump(document)))
    except SpecError as error:
        reasons = [f"{key} is not available on Slurm" for key in REFUSED[path.name]]
        assert [problem.message for problem in error.problems] == reasons
    else:
        assert path.name not in REFUSED
        subprocess.run(["bash", "-n"], input=text.encode(), check=True)
        assert f"#SBATCH --nodes={nodes}\n" in text


def test_the_help_page_has_the_table_of_features() -> None:
    page = Path(dtrain_cli.__file__).parent / "help" / "slurm.md"
    assert page.read_text("utf-8").endswith(f"\n\n{features()}"), "run scripts/reference"


def test_json_names_no_host_and_holds_the_script() -> None:
    found = json.loads(rendered(plan(FILE), json=True))
    assert [(host["host"], host["address"]) for host in found["hosts"]] == [(None, None)] * 2
    assert [len(host["processes"]) for host in found["hosts"]] == [2, 2]
    assert found["hosts"][1]["processes"][1]["environment"]["RANK"] == "3"
    assert found["files"] == {"job.sbatch": script.render(plan(FILE))}


def test_output_is_the_script_and_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert rendered(plan(FILE), output=out) == f"2 files for 2 hosts written to {out}\n"
    assert sorted(path.name for path in out.iterdir()) == ["job.sbatch", "plan.json"]
    assert (out / "job.sbatch").read_text() == script.render(plan(FILE))
    ssh = FILE.replace("slurm: {}, nodes: 2", "hosts: [a]")
    rendered(plan(ssh), output=out)
    assert sorted(path.name for path in out.iterdir()) == ["a", "plan.json"]


def test_a_launch_names_the_run_itself() -> None:
    spec = parse(FILE, "job.yaml")
    assert "dtrain_run=gpt-17\n" in script.render(build(spec, run="gpt-17"))
    assert "dtrain_run=job-$SLURM_JOB_ID\n" in script.render(build(spec))


def test_variables_of_the_users_shell_do_not_reach_the_commands() -> None:
    lines = script.render(plan(FILE)).splitlines()
    (line,) = (line for line in lines if line.startswith("unset "))
    removed = ("SQUEUE_USERS", "SCANCEL_INTERACTIVE", "SLURM_CPU_BIND_LIST", "SLURM_TIME_FORMAT")
    variables = dict.fromkeys([*removed, "SLURM_JOB_ID"], "1")
    for given in (variables, {"SLURM_JOB_ID": "1"}):
        done = subprocess.run(
            ["bash", "-euc", f"{line}; compgen -v"],
            env=given,
            capture_output=True,
            text=True,
            check=True,
        )
        assert {*done.stdout.split()} & {*variables} == {"SLURM_JOB_ID"}


def test_a_script_creates_the_folder_of_all_runs_for_the_team(tmp_path: Path) -> None:
    """The members of `cluster.trust_group` share `cluster.run_dir`."""
    group = grp.getgrgid(os.getgid()).gr_name
    text = FILE.replace("slurm: {}", f"slurm: {{}}, run_dir: {tmp_path}, trust_group: {group}")
    lines = script.render(plan(text)).partition("\nif mkdir")[2].partition("\nfi\n")[0]
    for _ in range(2):
        subprocess.run(["bash", "-euc", f"umask 077; if mkdir{lines}\nfi"], check=True)
    status = (tmp_path / "nodes").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o2770, os.getgid())
    assert "if mkdir" not in script.render(build(parse(text, "job.yaml"), run="job-1"))
