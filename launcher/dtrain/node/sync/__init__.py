"""The receiver of the working folder on a node. Python 3.8, standard library only.

The folder that the cluster file names, WORKDIR, becomes a symbolic link to a snapshot:

    WORKDIR -> WORKDIR.dtrain/7-3f2a90c1b7d4
    WORKDIR.dtrain/lock                        held (flock) by the current sync
    WORKDIR.dtrain/7-3f2a90c1b7d4/             the sent files, and the outputs of jobs
    WORKDIR.dtrain/7-3f2a90c1b7d4.json         the manifest of the sent files, never changed
    WORKDIR.dtrain/7-3f2a90c1b7d4.state.json   the machines that use it, and its settled outputs
    WORKDIR.dtrain/.incoming-*                 being received; left over if the sync was killed

A snapshot is never updated: a new state of the folder is a new snapshot, and the link changes to
it atomically. Jobs in the old snapshot are not affected.

A file in a snapshot that was not sent, or has changed since, is an **output**: a job wrote it. New
snapshots show the outputs of all older ones at the same path, as hard links: checkpoints are too
big to copy, and a log that a job still writes is the same file in both. Sent files are never hard
links: a job that edits one in place would edit it in all snapshots.

If a new snapshot cannot show an output (a sent file or a later version has its name), the output
stays where it is, and so does its snapshot. An output that a newer snapshot has shown is
**settled**: its old name is no longer needed, and deleting the new name deletes the output.

A snapshot is deleted when no process uses it and all its outputs are settled. A home folder may be
shared, and a machine cannot see the processes of other machines. So the state lists each machine
that uses a snapshot. A machine gives it up in a later sync, and the last one deletes it.

The receiver opens WORKDIR.dtrain once and makes it its working directory. From then on all paths
are relative to it, so renaming a folder above has no effect. The receiver refuses folders that
another user can change (see `trust`). With a trusted group, members share a workdir in a folder of
the group: all of them can read, replace and delete the files that a sync creates there.

All paths here are bytes, relative to a snapshot unless they are called `root`.
"""
