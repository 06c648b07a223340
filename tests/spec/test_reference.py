"""The schema documents each key completely and correctly."""

from importlib.resources import files

import pytest

from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.parallelism.model.models import models
from dtrain.spec.clusterfile import CLUSTER_FILE
from dtrain.spec.schema import SectionType
from dtrain.spec.source import compose
from generated_pages import keys, known, reference

FIELDS = {
    path: field for path, field in keys(CLUSTER_FILE) if not isinstance(field.type, SectionType)
}


@pytest.mark.parametrize("path", FIELDS)
def test_each_key_has_an_example_that_dtrain_accepts(path: str) -> None:
    field = FIELDS[path]
    assert field.example, "give the Field an example"
    node, problems = compose(f"key: {field.example}", path)
    value = field.type.read(node.entries[0].value, problems, path)  # type: ignore[union-attr]
    assert value is not None, problems.found
    assert not problems.found


def test_the_page_of_keys_is_current() -> None:
    page = (files("dtrain_cli") / "help" / "keys.md").read_text("utf-8")
    assert page == reference(), "run scripts/reference"


def test_the_page_of_models_is_current_and_has_every_name() -> None:
    page = (files("dtrain_cli") / "help" / "models.md").read_text("utf-8")
    assert page == known(), "run scripts/reference"
    assert all(f"{one.name} (" in page for one in models())
    assert all(f"| {gpu.name} |" in page for gpu in hardware().gpus)
