"""`dtrain schema`: the cluster file's format, for editors."""

from __future__ import annotations

import json
import sys


def schema_json() -> str:
    """The JSON Schema (draft 2020-12) of the cluster file, as text that ends with a newline."""
    from dtrain.spec.clusterfile import json_schema

    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def schema() -> None:
    """Print the cluster file's format as JSON Schema, for completion and checks in editors.

    Save it beside your cluster file and name it in the file's first line:
    # yaml-language-server: $schema=cluster.schema.json
    """
    sys.stdout.write(schema_json())
