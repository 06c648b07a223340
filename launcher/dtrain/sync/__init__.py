"""`job.sync`: the launching machine's working folder, on every node, without half an update.

`scan` once for a launch, then `send` to each host; what happens on the node is told in
`dtrain.node.sync`.
"""

from dtrain.sync.delivery import Patience, SyncResult, send
from dtrain.sync.source import Tree, scan

__all__ = ["Patience", "SyncResult", "Tree", "scan", "send"]
