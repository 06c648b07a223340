"""Plain facts about a host, for `dtrain check`. Python 3.8, standard library alone.

The launcher sends these modules over stdin as it sends the agent, and then orders as lines of JSON;
each is answered by one line of JSON, after `PREAMBLE`:

    {"op": "clock"}                        -> {"time": seconds since the epoch}
    {"op": "gather", ...}                  -> {"facts": {...}, "listening": {...}}
    {"op": "dial", "targets": [...]}       -> {"dialed": [...]}
    {"op": "run", ...}                     -> {"said": [...], "status": ...}

Nothing is judged here: what a fact means is decided in `dtrain/checks/`. Every probe runs in a
thread of its own with a time limit, so that a dead file server or a driver that hangs costs its
own fact alone; a probe that fails or does not answer is a fact too: ``{"error": reason}``.

Nothing stays behind. When the launcher hangs up, what was started here is killed.
"""
