"""Checks a cluster before a launch: facts in, findings out. Pure.

`dtrain.node.facts` gathers the facts on each host, and `dtrain.session.facts.preflight` decides
which facts to request. Each module here checks one subject.
"""

from dtrain.checks.evidence import Evidence, HostFacts
from dtrain.checks.finding import Finding, Severity

__all__ = ["Evidence", "Finding", "HostFacts", "Severity"]
