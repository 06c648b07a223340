"""`dtrain schema`: the cluster file's format, for editors."""

from __future__ import annotations

import json


def schema_json() -> str:
    """The JSON Schema (draft 2020-12) of the cluster file, as text that ends with a newline."""
    from dtrain.spec.clusterfile import json_schema

    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
