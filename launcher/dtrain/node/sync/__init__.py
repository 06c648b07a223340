"""The receiver of the working folder on a node. Python 3.8, standard library only.

The folder that the cluster file names, WORKDIR, becomes a symbolic link to a snapshot:

    WORKDIR -> WORKDIR.dtrain/7-3f2a90c1b7d4
    WORKDIR.dtrain/lock                        flock'ed by the one sync that is under way
    WORKDIR.dtrain/7-3f2a90c1b7d4/             files as sent, and what jobs wrote beside them
    WORKDIR.dtrain/7-3f2a90c1b7d4.json         the manifest: what was sent, never changed
    WORKDIR.dtrain/7-3f2a90c1b7d4.state.json   who was given it; which outputs went on from it
    WORKDIR.dtrain/.incoming-*                 being received; left over if the sync was killed

A snapshot gets no update, ever: a new state of the folder is a new snapshot, and the link changes
to it in one step. A job that runs in the old one sees nothing of that.

Whatever in a snapshot is not as it was sent is an **output**: somebody on the node wrote it. New
snapshots show the outputs of all older ones at the same place, as hard links: checkpoints are too
big to copy, and a log that a job still writes is the same file in both. Sent files never are hard
links: a job that edits one in place would edit it in all snapshots.

An output that a new snapshot cannot show (a sent file has its name, or a later version of it) stays
where it is, and so does its snapshot. Every output that a newer snapshot has once shown is
**settled** there: it needs its old name no more, and whoever deletes the new name means it.

Snapshots are deleted when no process uses them and all their outputs are settled. A home folder
may be shared, and the processes of other machines cannot be seen: so each machine that was given a
snapshot is noted, gives it up in a later sync of its own, and the last one deletes it.

The receiver opens WORKDIR.dtrain once and makes it its own working directory. From then on all
paths are relative to it, so a rename of a folder above changes nothing. Folders that another user
can change are refused (see `trust`). With a trusted group, members share a workdir that lies in a
folder of the group: what a sync makes there, all of them can read, replace and delete.

All paths are bytes here, relative to a snapshot unless they are called `root`.
"""
