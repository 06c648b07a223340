"""`job.sync`: copies the launching machine's working folder to every node, atomically.

Call `scan` once for a launch, then `send` for each host. `dtrain.node.sync` documents the node's
side.
"""

from dtrain.sync.delivery import Patience, SyncResult, send
from dtrain.sync.source import Tree, local_folder, scan

__all__ = ["Patience", "SyncResult", "Tree", "local_folder", "scan", "send"]
