"""Behavior of the runtime in one process, tested in few processes: importing TensorFlow takes
most of the time. The checks are assertions in the programs."""

import pytest

from runtime.tensorflow.conftest import CHECKS, RECIPES

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("legacy", ["0", "1"], ids=["keras-3", "tf-keras"])
def test_devices_precision_and_loss_scaling(start, legacy: str) -> None:
    task = start("none", [CHECKS / "devices.py"], {"TF_USE_LEGACY_KERAS": legacy})["-0"]
    assert "all devices" in task.succeeds()


@pytest.mark.parametrize("legacy", ["0", "1"], ids=["keras-3", "tf-keras"])
def test_fit_reports_each_step_and_its_loss(start, legacy: str) -> None:
    task = start("none", [CHECKS / "losses.py"], {"TF_USE_LEGACY_KERAS": legacy})["-0"]
    assert "all reported" in task.succeeds()


def test_measuring_the_steps_of_fit_changes_nothing(start) -> None:
    task = start("none", [CHECKS / "timing.py"], {"TF_USE_LEGACY_KERAS": "1"})["-0"]
    assert "all measured" in task.succeeds()


def test_damaged_checkpoints_are_passed_over(start) -> None:
    output = start("none", [CHECKS / "unreadable.py"])["-0"].succeeds()
    assert output.count("warning: checkpoints/ckpt-3 cannot be read: ") == 3
    assert "all found" in output


@pytest.mark.parametrize("legacy", ["0", "1"], ids=["keras-3", "tf-keras"])
def test_layers_compute_where_they_are_placed(start, legacy: str) -> None:
    environment = {"TF_USE_LEGACY_KERAS": legacy}
    task = start("model_parallel", [CHECKS / "placement.py"], environment)["-0"]
    assert "all placed" in task.succeeds()


def test_a_mesh_over_two_processes(start) -> None:
    for task in start("none", [CHECKS / "mesh.py"], worker=2).values():
        assert "all sharded" in task.succeeds()


def test_the_recipes_read_the_formats_they_name(start) -> None:
    assert "all read" in start("none", [CHECKS / "data.py"])["-0"].succeeds()


def test_texts_are_learned(start) -> None:
    """Always naming the largest of the 8 packages would get 0.2 of the held-out passages right."""
    options = ["--steps", "150", "--words", "5000", "--width", "32", "--lr", "0.005"]
    task = start("none", [RECIPES / "classify_text.py", *options])["-0"]
    assert float(task.succeeds().rpartition("held-out accuracy ")[2]) > 0.6
