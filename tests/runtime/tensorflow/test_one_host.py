"""Every single-host strategy gives the results of a single process without strategy."""

from pathlib import Path

import pytest

from runtime.tensorflow.conftest import CHECKS, losses

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize(
    ("legacy", "loops"), [("1", ["fit", "custom"]), ("0", ["custom"])], ids=["tf-keras", "keras-3"]
)
def test_losses_equal_those_of_a_single_process(
    start, equal, tmp_path: Path, legacy: str, loops: list[str]
) -> None:
    command = [CHECKS / "one_host.py", *loops]
    task = start("none", command, {"TF_USE_LEGACY_KERAS": legacy})["-0"]
    assert task.succeeds().count("2 replica(s)") == 2 * len(loops)
    for name in ("one_device", "mirrored", "central_storage", "model_parallel"):
        for loop in loops:
            assert equal(losses(tmp_path / "-0" / f"{name}-{loop}.json")), (name, loop)
