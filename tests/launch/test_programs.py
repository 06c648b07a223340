"""Any program: a command, a shell script, one process for each host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.launching import Scene

SHOW = 'echo "$0" "$@" "$SHARD" "$NODE_RANK/$NNODES" "$(command -v beside)"'


def test_a_command_with_placeholders(scene: Scene) -> None:
    """It finds the programs next to the file's interpreter."""
    python = scene.folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    beside = python.with_name("beside")
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    file = scene.cluster_file(
        "",
        python=str(python),
        framework="none",
        command=["bash", "-c", SHOW, "{rank}", '{"of": {world_size}}', "${rank}"],
        args=["{host}:{local_rank}"],
        env={"SHARD": "{rank}/{world_size}"},
    )
    done = scene.run(file)
    assert done.code == 0, str(done)
    for rank in range(4):
        node = rank // 2
        words = f'{rank} {{"of": 4}} ${{rank}} node{node}:{rank % 2} {rank}/4 {node}/2 {beside}'
        assert done.lines(f"node{node}", rank) == [words], str(done)


def test_one_process_for_each_host(scene: Scene) -> None:
    command = ["sh", "-c", 'echo "$RANK of $WORLD_SIZE: $0 on $1"', "{gpus} of {total_gpus}"]
    command += ["{addresses}"]
    file = scene.cluster_file("", framework="none", command=command, per="host")
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert done.lines("node0", 0) == ["0 of 2: 2 of 4 on 127.0.0.1,127.0.0.1"], str(done)
    assert done.lines("node1", 1) == ["1 of 2: 2 of 4 on 127.0.0.1,127.0.0.1"]


def test_a_shell_script(scene: Scene) -> None:
    """bash runs it. Attempts and runs have separate names."""
    script: Path = scene.script('declare -a words=("$@"); echo "${words[1]} $RANK"', "run.sh")
    file = scene.cluster_file(script, hosts=1, framework="none", args=["a", "{attempt} b"])
    done = scene.run(file)
    assert done.code == 0, str(done)
    assert done.lines("node0", 1) == ["1 b 1"], str(done)


MEET = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
# One write: torchrun's workers share its output.
os.write(1, f"sum {total.item()} of {dist.get_world_size()}\\n".encode())
dist.destroy_process_group()  # or gloo's threads may abort the exit
"""


@pytest.mark.torch
def test_torchrun_in_the_form_that_its_refusal_names(scene: Scene) -> None:
    command = ["torchrun", "--nnodes={nodes}", "--nproc-per-node={gpus}"]
    command += ["--node-rank={node_rank}", "--master-addr={master_addr}"]
    command += ["--master-port={master_port}", str(scene.script(MEET))]
    file = scene.cluster_file("", command=command, python=sys.executable)
    refused = scene.run(file)
    assert refused.code == 2, str(refused)
    assert all(option in refused.stderr for option in command[1:-1])
    file = scene.cluster_file("", slots=1, command=command, python=sys.executable, per="host")
    done = scene.run(file, "--no-check")
    assert done.code == 0, str(done)
    assert done.stdout.count("sum 1 of 2") == 2
