"""Plain facts about a host, for `dtrain check`. Python 3.8, standard library only.

The launcher sends orders and gets one answer to each, see `dtrain.node.facts.wire`.

Nothing is judged here: what a fact means is decided in `dtrain/checks/`. Every probe runs in a
thread of its own with a time limit, so that a dead file server or a driver that hangs costs its
own fact alone; a probe that fails or does not answer is a fact too: ``{"error": reason}``.

Nothing stays behind. When the launcher hangs up, what was started here is killed.
"""
