"""The node agent, which dtrain runs on each host. Python 3.8, standard library only.

Theory of operation
===================

The launcher runs `python -c BOOT` on the host through SSH (or as a local process), sends these
modules over stdin as one text, and then commands as lines of JSON. This starts three kinds of
processes:

    launcher  <== stdin, stdout ==>  relay  <== unix socket ==>  supervisor  --->  workers
                                       |                             |                |
                                       +-------- reads --------- events file    .out .err files

*   The **relay** is the process on the SSH channel. It forwards commands, follows files, and
    sends new data as frames. It owns nothing: it may be killed at any moment, and a slow reader
    slows only the relay.
*   The **supervisor** is detached (own session, no terminal, no pipe of the channel). It starts,
    reaps and stops the workers, and appends each event to the events file. Everything that a
    launcher can learn is in that file and in the workers' output files. So a new relay can always
    continue where another one ended: this is what `attach` does.
*   A **guard** runs until everything is prepared. It creates the run's folder and starts the
    setup shell or the supervisor. If the launch fails or is aborted, or if the relay dies, the
    guard ends the processes that setup started and removes the folder.

The setup shell starts the supervisor with its last `exec`. So the supervisor inherits all that
setup changed: environment, limits, umask, cgroup, affinity. Without setup lines there is no shell,
and the supervisor is a copy of the guard: a new Python would need 30 ms of CPU to start and to
import the same modules. /proc shows the command line and environment that it would have as a new
program, see `dtrain.node.agent.presentation`.

No process of the job runs before `start`. A launch that is refused, aborted or abandoned before
`start` leaves no process and no folder.

The processes of a run
----------------------

All processes that the supervisor's children started belong to the run. Three marks identify them:

*   Descent: the supervisor is a subreaper, so that orphans become its children.
*   The tag: DTRAIN_RUN_ID, DTRAIN_HOST and DTRAIN_RUN_DIR in /proc/PID/environ match exactly, and
    the user is the same. Every launch on a host has a run folder of its own.
*   A *different* tag excludes a process. A run launched from inside a worker has its own
    supervisor and its own tag. Its whole subtree is left alone, although it descends from us.

To end a run, the supervisor sends TERM to all processes, waits for the grace period, then sends
KILL repeatedly until no child is left and two scans of /proc in a row find no other process. It
reports by name the processes that survive `PATIENCE` seconds of KILL (stuck in the kernel). It
signals through pidfds, or compares the start time first if the kernel has no pidfds, so that it
never signals another process with a recycled process id.

`dtrain/node/agent/wire.py` specifies the protocol between launcher and relay.
"""
