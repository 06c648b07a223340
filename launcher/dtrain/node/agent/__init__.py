"""The node agent: what dtrain runs on a host. Python 3.8, standard library alone.

Theory of operation
===================

The launcher runs `python -c BOOT` on the host through SSH (or as a local process), sends these
modules over stdin as one text, and then commands as lines of JSON. Three kinds of process come
out of it:

    launcher  <== stdin, stdout ==>  relay  <== unix socket ==>  supervisor  --->  workers
                                       |                             |                |
                                       +-------- reads --------- events file    .out .err files

*   The **relay** is the process on the SSH channel. It passes commands on, and follows files,
    sending what is new as frames. It owns nothing: it may be killed at any moment, and a slow
    reader slows only the relay.
*   The **supervisor** is detached (own session, no terminal, no pipe of the channel). It starts
    the workers, reaps them, stops them, and appends what happens to the events file. Anything a
    launcher can learn is in that file and the workers' output files, so a new relay can always
    pick up where another one ended: that is what `attach` does.
*   A **guard** stands between the two until everything is prepared. It makes the run's folder
    and starts the setup shell. Should the launch fail or be called off, or the relay die, it ends
    what setup has started and removes the folder.

The supervisor is started *through* the setup shell, as its last `exec`, so that whatever setup
changed (environment, limits, umask, cgroup, affinity) is inherited and not imitated.

Nothing of the job runs before `start`; a launch that is refused, aborted or forgotten before
that leaves neither process nor folder.

What belongs to a run
---------------------

Everything that the supervisor's children started. Three marks tell:

*   descent: the supervisor is a subreaper, so that orphans become its children;
*   the tag: DTRAIN_RUN_ID, DTRAIN_HOST and DTRAIN_RUN_DIR in /proc/PID/environ, all exact, and
    the same user. No two launches on a host ever had the same run folder;
*   and a *different* tag says the opposite. A run launched from inside a worker has its own
    supervisor and its own tag, and its whole subtree is left alone although it descends from us.

To end a run: TERM to all, grace, then KILL again and again until the kernel says that no child is
left, and two scans of /proc in a row find nothing else. What is still there after `PATIENCE`
seconds (stuck in the kernel) is reported by name. Signals go through pidfds, or where there are
none after the start time has been compared, so that a recycled process id is never hit.

What the launcher sends and what it is told is specified in `dtrain/node/agent/wire.py`.
"""
