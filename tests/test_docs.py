"""The README and the help pages are true: commands run, cluster files load, names exist."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from dtrain.diagnostics import ExitCode
from dtrain.spec.clusterfile import json_schema
from dtrain.spec.load import parse
from dtrain_cli.app import VERBS
from support.json_page import fields, undocumented
from support.launching import FAKES, completed
from support.limits import HANG
from support.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "cli" / "dtrain_cli" / "help").glob("*.md"))
GUIDES = sorted((ROOT / ".github").glob("*.md"))
DOCS = {path: path.read_text(encoding="utf-8") for path in (README, *PAGES)}
TEXT = "\n".join(DOCS.values())
DTRAIN = Path(sys.executable).with_name("dtrain")

TRAIN = "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n"
FAILS = """\
import os, time
loss = float("nan" if os.environ["RANK"] == "17" else "2.5")
if loss != loss:
    raise ValueError("loss is NaN")
time.sleep(7200)
"""


def fenced(language: str) -> list[str]:
    """The code blocks of one language, each once, the README's first."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    found = (text for its_language, text in blocks if its_language == language)
    return list(dict.fromkeys(found))


def commands() -> list[str]:
    lines = (line for block in fenced("sh") for line in block.splitlines() if line.strip())
    return list(dict.fromkeys(re.sub(r"\s+#.*", "", line) for line in lines))


CLUSTER = fenced("yaml")[0]


class Desk:
    """A folder with the README's first cluster file, as a reader would have it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = folder / "cluster.yaml"
        self.cluster.write_text(CLUSTER)
        self.env = {
            # The same Python for scripts that say python3, and nothing of this machine.
            "PATH": f"{DTRAIN.parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
        }

    def on_this_machine(self, script: str, *, hosts: str = "gpu[01-08]", slots: int = 1) -> None:
        """Have hosts of the same names here, to launch on for real."""
        document = yaml.safe_load(CLUSTER)
        document["cluster"] = {
            "hosts": hosts,
            "transport": "local",
            "gpus": 0,
            "slots": slots,
            "run_dir": str(self.folder / "nodes"),
            "overrides": {hosts: {"address": "127.0.0.1"}},
        }
        # The check need not import the real torch.
        document["job"]["env"] = {"PYTHONPATH": str(FAKES / "torch-2.13.0")}
        self.cluster.write_text(yaml.safe_dump(document))
        (self.folder / document["job"]["script"]).write_text(script)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """A documented command, in a shell."""
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )

    def interrupted(self, command: str) -> str:
        """What a command says on stderr after a Ctrl-C that follows its first line there."""
        with subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr
            process.stderr.readline()
            process.send_signal(signal.SIGINT)
            return process.communicate(timeout=HANG)[1]

    def succeeds(self, command: str) -> str:
        done = self.run(command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def detach(self) -> None:
        """Launch a job that goes on in the background."""
        self.on_this_machine(f"{TRAIN}import time\nsys.stdout.flush()\ntime.sleep(7200)\n")
        self.succeeds("dtrain launch cluster.yaml --detach")

    def stop(self) -> None:
        self.succeeds("dtrain stop cluster")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture(scope="module")
def background(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A run for all commands that only look at it."""
    desk = Desk(tmp_path_factory.mktemp("background"))
    desk.detach()
    yield desk
    desk.stop()


def run_by_ci(desk: Desk, command: str) -> None:
    """It is the whole of what a newcomer does, and takes as long."""
    assert f"\n{command}" in (ROOT / ".ci" / "run").read_text()


def dry_run(desk: Desk, command: str) -> None:
    shown = desk.succeeds(command)
    assert "64 processes on 8 hosts gpu[01-08]" in shown
    assert "RANK=63" in shown


def batch_script(desk: Desk, command: str) -> None:
    page = (ROOT / "cli/dtrain_cli/help/slurm.md").read_text("utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (desk.folder / "slurm.yaml").write_text(text)
    desk.succeeds(command)
    desk.succeeds("bash -n job.sbatch")
    assert "#SBATCH --nodes=8\n" in (desk.folder / "job.sbatch").read_text()


def manifest(desk: Desk, command: str) -> None:
    page = (ROOT / "cli/dtrain_cli/help/kubernetes.md").read_text("utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (desk.folder / "kubernetes.yaml").write_text(text)
    desk.succeeds(command)
    *_, job = yaml.safe_load_all((desk.folder / "job.yaml").read_text())
    assert job["kind"] == "JobSet"


def dry_run_json(desk: Desk, command: str) -> None:
    document = json.loads(desk.succeeds(command))
    assert [host["host"] for host in document["hosts"]] == [f"gpu0{n}" for n in range(1, 9)]


def dry_run_output(desk: Desk, command: str) -> None:
    desk.succeeds(command)
    written = [path.name for path in (desk.folder / "rendered" / "gpu08").iterdir()]
    assert sorted(written) == sorted(
        f"worker-{n}.{end}" for n in range(56, 64) for end in ("env", "sh")
    )


def script_by_hand(desk: Desk, command: str) -> None:
    desk.succeeds("dtrain launch cluster.yaml --dry-run --output rendered")
    # Over SSH a script starts in the home folder, which the desk is.
    (desk.folder / "train.py").write_text(TRAIN)
    assert desk.succeeds(command) == "0 64 []\n"


def schema(desk: Desk, command: str) -> None:
    desk.succeeds(command)
    (name,) = re.findall(r"\$schema=([\w.]+)", TEXT)
    assert json.loads((desk.folder / name).read_text()) == json_schema()


def launch(desk: Desk, command: str) -> None:
    desk.on_this_machine(TRAIN)
    shown = desk.succeeds(command).splitlines()
    assert sorted(shown) == [f"[gpu0{n + 1} {n}] {n} 8 []" for n in range(8)]


def launch_with_arguments(desk: Desk, command: str) -> None:
    desk.on_this_machine(TRAIN)
    shown = desk.succeeds(command).splitlines()
    assert sorted(shown) == [f"[gpu0{n + 1} {n}] {n} 8 ['--lr', '3e-4']" for n in range(8)]


def with_settings(desk: Desk, command: str) -> None:
    desk.succeeds(f"{command} --dry-run")


def launch_with_metrics(desk: Desk, command: str) -> None:
    """At an address and in a folder of this machine."""
    here = {"10.0.0.5": "127.0.0.1", "9400": str(free_port()), "/var/lib": str(desk.folder)}
    for name, ours in here.items():
        command = command.replace(name, ours)
    (desk.folder / "node_exporter").mkdir()
    launch(desk, command)


def launch_shown_in_part(desk: Desk, command: str) -> None:
    desk.on_this_machine("print('the same')\n")
    shown = desk.succeeds(command)
    # Ranks that were slow to start may come on a line of their own.
    ranks = [
        each
        for found in re.findall(r"^\[\S+ +(\S+)\] the same$", shown, re.M)
        for each in unfolded(found)
    ]
    assert sorted(ranks) == [0, 4, 5, 6, 7]
    assert len(shown.splitlines()) <= 5


def unfolded(ranks: str) -> Iterator[int]:
    for part in ranks.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def plan(desk: Desk, command: str) -> None:
    """The view has what the README shows of it, where that shows the words."""
    text = " ".join(desk.succeeds(command).split())
    (shown,) = [block for block in fenced("") if block.startswith("Split each layer")]
    for part in re.split("…", " ".join(shown.split())):
        assert part.strip(" -") in text


def plan_training(desk: Desk, command: str) -> None:
    assert re.search(r"2\.0T tokens take [\d,]+ days", desk.succeeds(command))


def plan_output(desk: Desk, command: str) -> None:
    desk.succeeds(command)
    assert CLUSTER.splitlines()[1] in desk.cluster.read_text()
    assert "64 processes" in desk.succeeds("dtrain launch cluster.yaml --dry-run")


def plan_json(desk: Desk, command: str) -> None:
    layouts = json.loads(desk.succeeds(command))["layouts"]
    assert layouts
    assert {(layout["tensor"], layout["pipeline"]) for layout in layouts} == {(8, 8)}


def plan_page(desk: Desk, command: str) -> None:
    desk.succeeds(command)
    assert (desk.folder / "plan.html").read_text().startswith("<!doctype html>")


def detached(desk: Desk, command: str) -> None:
    """Both commands: the launch, and the stop."""
    desk.detach()
    assert re.search(r"^cluster-\S+ +running ", desk.succeeds("dtrain ps"), re.MULTILINE)
    desk.stop()
    assert re.search(r"^cluster-\S+ +stopped ", desk.succeeds("dtrain ps"), re.MULTILINE)


def observed(desk: Desk, command: str) -> None:
    """Each command that looks at a run in the background."""
    if command.startswith("dtrain attach"):
        # Ctrl-C ends watching, here as soon as it shows the run.
        assert "left the run; the job keeps running" in desk.interrupted(command)
    elif command.startswith("dtrain exec"):
        assert re.search(r"^\[gpu\S+\] +MemTotal:", desk.succeeds(command), re.MULTILINE)
    elif command == "dtrain ps":
        assert re.search(r"^cluster-\S+ +running ", desk.succeeds(command), re.MULTILINE)
    elif command == "dtrain ps cluster":
        assert re.search(r"^gpu\[01-08] +running ", desk.succeeds(command), re.MULTILINE)
    elif command.startswith("dtrain top"):
        assert "8 hosts running · 8 workers" in desk.succeeds(command)
    elif command.startswith("dtrain stacks"):
        shown = desk.succeeds(command)
        assert re.search(r"^rank.* on gpu.*: in ", shown, re.MULTILINE)
        assert ("\n    <module> (" in shown) == ("--full" in command)
    elif command.startswith("dtrain report"):
        shown = desk.succeeds(command)
        assert re.search(r"^State +running$", shown, re.MULTILINE)
        assert "start" in shown
    else:
        assert command.startswith("dtrain logs")
        while not (shown := desk.succeeds(command)):
            pass
        assert shown == "[gpu01 0] 0 8 []\n"


def init(desk: Desk, command: str) -> None:
    desk.succeeds(command)
    assert "64 processes on 8 hosts" in desk.succeeds("dtrain launch first.yaml --dry-run")


def show_help(desk: Desk, command: str) -> None:
    """In a pipe, the pages as they are."""
    shown = desk.succeeds(command)
    _, _, topic = command.partition("dtrain help ")
    if topic == "":
        assert [line.split()[0] for line in shown.splitlines()[1:-4]] == [p.stem for p in PAGES]
    elif topic == "failures":
        assert shown in DOCS.values()
    else:
        assert re.findall(r"^## (.*)", shown, re.M)[:2] == [topic, f"{topic}.max"]


def execute(desk: Desk, command: str) -> None:
    desk.on_this_machine(TRAIN)
    shown = desk.succeeds(command)
    assert len(re.findall(r"^\[gpu\S+\] +Filesystem ", shown, re.MULTILINE)) >= 1


def install_completion(desk: Desk, command: str) -> None:
    # With a second command, bash stays the parent, by which the shell is found.
    desk.succeeds(f"{command}; exit $?")
    assert "-F _dtrain_completion dtrain" in desk.succeeds("bash -ic 'complete -p dtrain'")


def check(desk: Desk, command: str) -> None:
    """Hosts that are all this machine have nothing wrong that a launch would fail of."""
    desk.on_this_machine(TRAIN, hosts="gpu[01-02]")
    assert "2 hosts checked" in desk.succeeds(command)


def json_fields(desk: Desk, command: str) -> None:
    """Of a job that fails, each command that prints JSON about it."""
    desk.on_this_machine(FAILS, hosts="gpu[01-02]", slots=9)
    printed = ""
    for one in (command, "dtrain launch cluster.yaml --dry-run --json", "dtrain ps --all --json",
                "dtrain report cluster --json", "dtrain logs cluster --json",
                "dtrain check cluster.yaml --json", "dtrain ps --prune --json"):  # fmt: skip
        printed += desk.run(one).stdout
    decoder, at, documents = json.JSONDecoder(), 0, []
    while at < len(printed):
        document, end = decoder.raw_decode(printed, at)
        documents.append(document)
        at = end + 1
    assert {"traceback", "goodput", "argv", "in_charge", "findings"} <= set(fields(documents))
    assert undocumented(documents) == set()


COVERED: dict[str, Callable[[Desk, str], None]] = {
    "scripts/demo": run_by_ci,
    "scripts/test": run_by_ci,
    "dtrain schema > cluster.schema.json": schema,
    "dtrain launch cluster.yaml --dry-run": dry_run,
    "dtrain launch cluster.yaml --dry-run --json": dry_run_json,
    "dtrain launch cluster.yaml --dry-run --output rendered": dry_run_output,
    "dtrain launch slurm.yaml --dry-run > job.sbatch": batch_script,
    "dtrain launch kubernetes.yaml --dry-run > job.yaml": manifest,
    "bash rendered/gpu01/worker-0.sh": script_by_hand,
    "dtrain plan --model-size 100B": plan,
    "dtrain plan --model llama-3-70b --gpus 128 --gpu h100 --tokens 2T": plan_training,
    "dtrain plan --model-size 7B cluster.yaml --gpu h100 --output cluster.yaml": plan_output,
    "dtrain plan --model-size 100B --tensor 8 --pipeline 8 --json": plan_json,
    "dtrain plan --model-size 100B --html plan.html": plan_page,
    next(command for command in commands() if command.startswith("dtrain init")): init,
    "dtrain check cluster.yaml": check,
    "dtrain launch cluster.yaml": launch,
    "dtrain launch cluster.yaml -- --lr 3e-4": launch_with_arguments,
    **{command: with_settings for command in commands() if "--set" in command},
    "dtrain launch cluster.yaml --rank 0,4-7 --fold": launch_shown_in_part,
    "dtrain launch cluster.yaml --metrics-port 9400": launch_with_metrics,
    "dtrain launch cluster.yaml --metrics-port 10.0.0.5:9400": launch_with_metrics,
    "dtrain launch cluster.yaml --metrics-file /var/lib/node_exporter/dtrain.prom": (
        launch_with_metrics
    ),
    "dtrain launch cluster.yaml --tensorboard-dir runs": launch_with_metrics,
    "dtrain launch cluster.yaml --json": json_fields,
    "dtrain launch cluster.yaml --detach": detached,
    "dtrain top cluster": observed,
    "dtrain ps": observed,
    "dtrain ps cluster": observed,
    "dtrain logs cluster --rank 0 --since 1h": observed,
    "dtrain logs cluster --rank 0 --tail 20": observed,
    "dtrain report cluster": observed,
    "dtrain attach cluster": observed,
    "dtrain stacks cluster": observed,
    "dtrain stacks cluster --full": observed,
    "dtrain stop cluster": detached,
    "dtrain exec cluster.yaml -- df -h /": execute,
    next(command for command in commands() if command.startswith("dtrain exec cluster ")): observed,
    "dtrain --install-completion": install_completion,
    "dtrain help": show_help,
    "dtrain help failures": show_help,
    "dtrain help job.restart": show_help,
}
"""How each documented command is tested."""


@pytest.mark.parametrize("command", commands())
def test_every_command_does_what_it_says(request: pytest.FixtureRequest, command: str) -> None:
    assert command in COVERED, "say in COVERED how this command is tested"
    test = COVERED[command]
    test(request.getfixturevalue("background" if test is observed else "desk"), command)


def test_no_test_is_left_of_a_command_that_is_gone() -> None:
    assert sorted(COVERED) == sorted(commands())


def test_commands_within_sentences_exist() -> None:
    assert set(re.findall(r"`dtrain ([a-z]+)", TEXT)) <= set(VERBS)
    help_text = "".join(
        completed(verb, "--help", environment={"PATH": "/usr/bin:/bin"}).stdout for verb in VERBS
    )
    for option in re.findall(r"`(--[a-z-]+)", TEXT):
        assert option in help_text, option


@pytest.mark.parametrize("text", fenced("yaml"))
def test_cluster_files_load(text: str) -> None:
    """As they are written: other readers of YAML take the key ``on`` for a boolean."""
    parts = re.split(r"(?m)^(?=[a-z])", f"{CLUSTER}\n{text}")
    sections = {part.partition(":")[0]: part for part in parts}  # the page's own come last
    parse("".join(sections.values()), "cluster.yaml")


@pytest.mark.torch
def test_the_training_loop_trains(desk: Desk) -> None:
    """The documented loop, with a model and a few texts around it."""
    (loop,) = (block for block in fenced("python") if "dtrain.runtime" in block)
    around = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from train_gpt import GPT, Config, Windows, cross_entropy
config = Config(width=32, layers=2, heads=4, kv_heads=4, mlp_width=96, vocabulary=256)
dataset = Windows(bytes(range(256)) * 2, 32)
"""
    script = desk.folder / "loop.py"
    script.write_text(
        f"{around}{loop}        if step == 3:\n            break\nprint('trained', step)\n"
    )
    done = desk.run(f"python3 loop.py {ROOT / 'scripts' / 'recipes'}")
    assert done.stdout == "trained 3\n", done.stderr


def test_keys_within_sentences_exist() -> None:
    schema = json_schema()["properties"]
    paths = re.findall(r"`(cluster|job)((?:\.[a-z_]+)+)[`:]", TEXT.replace("cluster.yaml", ""))
    assert ("job", ".lease") in paths
    for section, path in paths:
        node = schema[section]
        for key in path.strip(".").split("."):
            assert key in node["properties"], f"{section}{path}"
            node = node["properties"][key]


def test_exit_codes_are_all_there_are() -> None:
    documented = [int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)]
    assert documented == sorted(ExitCode)


@pytest.mark.parametrize("path", [*DOCS, *GUIDES], ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(DOCS[README].splitlines()) <= 220, "move what a newcomer does not need to a page"


def test_a_failure_is_reported_as_shown(desk: Desk) -> None:
    (shown,) = [block for block in fenced("") if block.startswith("error: rank")]
    desk.on_this_machine(FAILS, hosts="gpu[01-03]", slots=8)
    done = desk.run("dtrain launch cluster.yaml")
    assert done.returncode == ExitCode.JOB_FAILED
    report = done.stderr[done.stderr.index("error: ") :]
    assert normalized(report.replace(str(desk.folder), "/home/ml")) == normalized(shown)


def normalized(report: str) -> str:
    """Without what differs from run to run."""
    report = re.sub(r"failed after [\d. min s]+;", "failed after N s;", report)
    return re.sub(r"runs/cluster-\S+", "runs/cluster-N", report)


def test_a_checkout_has_what_ci_runs() -> None:
    for script in (".ci/run", "scripts/demo", "scripts/test"):
        assert shutil.which(ROOT / script), f"{script} cannot be executed"
