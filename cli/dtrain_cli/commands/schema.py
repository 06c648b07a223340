"""`dtrain schema`: print the cluster file's JSON Schema, for editors."""

from __future__ import annotations

from json import dumps

from dtrain.spec.clusterfile import json_schema
from dtrain_cli import output


def schema() -> None:
    """Print the JSON Schema of the cluster file, for editors.

    Save it next to your cluster file and name it in the file's first line:

    # yaml-language-server: $schema=cluster.schema.json
    """
    output.write(schema_json())


def schema_json() -> str:
    """The JSON Schema (draft 2020-12) of the cluster file, as text that ends with a newline."""
    return dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
