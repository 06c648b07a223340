"""The format of the cluster file: its top-level keys, and the whole as JSON Schema."""

from __future__ import annotations

from typing import Any

from dtrain.spec import value_rules as rules
from dtrain.spec.cluster_keys import CLUSTER
from dtrain.spec.job_keys import JOB
from dtrain.spec.notify_keys import NOTIFY
from dtrain.spec.schema import Field, SectionType

CLUSTER_FILE = SectionType(
    {
        "name": Field(
            rules.NAME,
            "Name of the job, in logs and folder names.",
            otherwise="the file's name",
            example="gpt-100b",
        ),
        "cluster": Field(CLUSTER, "The machines, and how to reach them.", required=True),
        "job": Field(JOB, "What runs on the machines.", required=True),
        "notify": Field(NOTIFY, "Notifications about the end of a run."),
    },
    title="the cluster file",
)

HOMES = CLUSTER_FILE.homes()


def json_schema() -> dict[str, Any]:
    """The cluster file's format as JSON Schema, draft 2020-12, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "dtrain cluster file",
        "description": "A list of machines, and the training job to launch on them.",
        **CLUSTER_FILE.json_schema(),
    }
