"""Plain facts about a host, for `dtrain check`. Python 3.8, standard library only.

The launcher sends orders, and the program answers each, see `dtrain.node.facts.wire`.

This program only collects facts; `dtrain/checks/` judges them. Every probe runs in its own thread
with a time limit, so that a dead file server or a driver that hangs affects only one fact. If a
probe fails or does not answer, the fact is ``{"error": reason}``.

The program leaves nothing behind. When the launcher disconnects, it kills the programs that it
started.
"""
