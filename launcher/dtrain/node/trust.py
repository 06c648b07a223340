"""Folders and files that no other user of a machine can change or replace.

The rule: a folder, and each folder above it, belongs to the user or to root, and no other user may
write to it. A folder above may be sticky, like /tmp: users cannot rename files of
others there. With `cluster.trust_group`, the members of that group count as the user.

A path is walked from the root, and each component is opened relative to the one before. So the
checked folder is the one that is used, even if someone renames a folder at the same time.

Python 3.8, standard library only: the agent, the facts and the sync ship this module to nodes.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
import struct

from dtrain.node.descriptors import closing_fd

TYPE_CHECKING = False  # importing typing costs as much as importing json
if TYPE_CHECKING:
    from typing import NoReturn

COMPONENT = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
"""Needs no read permission: the folders above a home folder often allow only search. macOS, on
which the launcher may run, has no `O_PATH`."""
CONTROL_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""`O_NONBLOCK`: opening a FIFO must not wait for its other end."""
ACL_USER, ACL_GROUP_OBJ, ACL_GROUP, ACL_MASK, ACL_WRITE = 2, 4, 8, 16, 2
"""Linux's types of entries in an access control list, and the permission to write."""
MAX_DETOURS = 100
"""Symbolic links to follow and folders to create on one path. Another user may keep changing
both."""


class UnsafeError(OSError):
    """Another user could change a file or folder; ``reason`` names it, its owner and its mode."""

    def __init__(self, path: bytes, why: str, remedy: str, group: str = "") -> None:
        super().__init__(errno.EPERM, why, path)
        self.reason = "%s %s" % (printable(path), why)
        self._remedy = remedy
        self._group = group

    def __str__(self) -> str:
        return self.reason

    def hint(self, key: str) -> str:
        """What the user can do; ``key`` is the setting that names the folder."""
        remedies = [self._remedy, "choose another %s" % key]
        if self._group and "DTRAIN_HOME" not in key:  # that folder is never shared
            share = "`cluster.trust_group: %s`" % self._group
            remedies.append("set %s if you trust its members" % share)
        return ", or ".join(filter(None, remedies))


class Trust:
    """The users that this user trusts on this machine: root, and the members of ``group`` if given.

    Raises UnsafeError if the group does not exist here, or the user is not a member.
    """

    def __init__(self, group: str | None = None) -> None:
        self.uid = os.geteuid()
        self.gid: int | None = None
        self._group = group
        if group is not None:
            self.gid = self._member_of(group)

    def _member_of(self, group: str) -> int:
        path, remedy = os.fsencode(group), "correct `cluster.trust_group`"
        try:
            gid = grp.getgrnam(group).gr_gid
        except (KeyError, ValueError):
            raise UnsafeError(path, "is not a group on this machine", remedy) from None
        if gid != os.getegid() and gid not in os.getgroups():
            why = "is a group that %s does not belong to on this machine" % user_of(self.uid)
            raise UnsafeError(path, why, remedy)
        return gid

    def open_folder(
        self,
        path: bytes,
        *,
        own: int = 0,
        created: list[bytes] | None = None,
        private: bool = True,
    ) -> tuple[int, bytes]:
        """An open folder that can be trusted, and its path without symbolic links.

        The last ``own`` components must not be links: dtrain creates them itself. With ``created``,
        missing folders are created and their paths are added to it. Only the user can access them,
        unless ``private`` is false and their parent is shared with the trusted group.

        Raises UnsafeError, and OSError with the whole path.
        """
        pending = components(path)
        detours = 0
        walk = Walk(self)
        try:
            while pending:
                part = pending.pop()
                if part == b"..":
                    walk.leave()
                    continue
                try:
                    target = walk.enter(part)
                except FileNotFoundError:
                    if created is None or detours > MAX_DETOURS:
                        raise
                    detours += 1
                    pending.append(part)
                    try:
                        if walk.make(part, private):
                            created.append(walk.path_of(part))
                    except FileNotFoundError:  # another launch has just removed this folder
                        pending.append(walk.leave())
                    continue
                if target is not None:
                    detours += 1
                    if len(pending) < own:
                        raise UnsafeError(walk.path_of(part), "is a symbolic link", "remove it")
                    if detours > MAX_DETOURS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    pending += components(target)
                    if target.startswith(b"/"):
                        walk.restart()
            self.check(walk.fd, walk.path)
            return os.dup(walk.fd), walk.path
        finally:
            walk.close()

    def check_folder(self, path: bytes, own: int = 0) -> None:
        """Raises UnsafeError if another user can change a folder, and OSError. For ``own`` see
        `open_folder`."""
        os.close(self.open_folder(path, own=own)[0])

    def open_file(
        self, name: bytes, flags: int, folder: int, where: bytes, mode: int = 0o600
    ) -> int:
        """Open a regular file of dtrain in an open folder, whose path is ``where``.

        Raises UnsafeError, and OSError with the whole path.
        """
        path = os.path.join(where, name)
        try:
            fd = os.open(name, flags | CONTROL_FILE, mode, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO or a socket
                raise UnsafeError(path, "is not a regular file", "remove it") from None
            raise type(error)(error.errno, error.strerror, path) from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise UnsafeError(path, "is not a regular file", "remove it")
            if flags & os.O_ACCMODE != os.O_RDONLY and status.st_nlink > 1:
                raise UnsafeError(path, "has a second name elsewhere (a hard link)", "remove it")
            self.check(fd, path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_path(self, path: bytes, flags: int) -> int:
        """`open_file` by its whole path. Raises UnsafeError and OSError."""
        folder, where = self.open_folder(os.path.dirname(path))
        with closing_fd(folder):
            return self.open_file(os.path.basename(path), flags, folder, where)

    def check_script(self, path: bytes) -> None:
        """Raises UnsafeError if another user can change a script or its folder."""
        for _ in range(MAX_DETOURS):
            folder, where = self.open_folder(os.path.dirname(path))
            name = os.path.basename(path)
            with closing_fd(folder), closing_fd(os.open(name, COMPONENT, dir_fd=folder)) as fd:
                status = os.fstat(fd)
                if not stat.S_ISLNK(status.st_mode):
                    self.check(fd, os.path.join(where, name))
                    return
                self.check_link(status, os.fstat(folder), path)
                path = os.path.join(where, os.readlink(b"", dir_fd=fd))
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def check(self, fd: int, path: bytes, *, above: bool = False) -> None:
        """Raises UnsafeError unless only trusted users can write to an open file or folder, whose
        name is ``path``. ``above`` is true for a folder on the way to the one that is used."""
        status = os.fstat(fd)
        mode = status.st_mode
        if not self.trusts(status.st_uid) and not (above and status.st_uid == foreign_uid()):
            self._refuse(status, path, "")
        if above and mode & stat.S_ISVTX:
            return
        if mode & stat.S_IWOTH:
            self._refuse(status, path, " and every user can write to it")
        stranger = self._stranger(fd, status) if mode & stat.S_IWGRP else ""
        if stranger:
            self._refuse(status, path, " and %s can write to it" % stranger)

    def check_link(self, status: os.stat_result, holder: os.stat_result, path: bytes) -> None:
        """Raises UnsafeError if an untrusted user can change a symbolic link."""
        if holder.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not self.trusts(status.st_uid):
            why = "is a symbolic link that belongs to %s" % user_of(status.st_uid)
            raise UnsafeError(path, why, "remove it")

    def trusts(self, uid: int) -> bool:
        """Whether a user is this one, root or a member of the trusted group."""
        return uid in (0, self.uid) or (self.gid is not None and belongs(uid, self.gid))

    def shares(self, status: os.stat_result) -> bool:
        """Whether the trusted group can write to a folder."""
        return status.st_gid == self.gid and bool(status.st_mode & stat.S_IWGRP)

    def _stranger(self, fd: int, status: os.stat_result) -> str:
        """An untrusted user or group that can write to a group-writable file; empty if there is
        none.

        With an access control list, the group bits apply to all entries of the list.
        """
        users, groups = writers_in_list(fd, status.st_gid)
        for uid in users:
            if not self.trusts(uid):
                return "%s, by an access control list," % user_of(uid)
        for gid in groups:
            private = any(is_private(gid, uid) for uid in (self.uid, status.st_uid))
            if gid != self.gid and not private:
                return "members of the group %s" % group_of(gid)
        return ""

    def _refuse(self, status: os.stat_result, path: bytes, writers: str) -> NoReturn:
        # A sticky folder, such as /tmp, is for all users: without it, programs of others fail.
        shared = status.st_mode & stat.S_ISVTX
        remedy = "run `chmod g-w,o-w %s`" % printable(path) if writers and not shared else ""
        trusted = "you or root" if self._group is None else "you, root or %s" % self._group
        owner = "belongs to %s" % user_of(status.st_uid)
        if not self.trusts(status.st_uid):
            owner += ", not to %s" % trusted
        mode = " (mode %04o)" % stat.S_IMODE(status.st_mode)
        gid, group = status.st_gid, ""
        known = gid != self.gid and gid in os.getgroups() and not is_private(gid, self.uid)
        if known and not status.st_mode & stat.S_IWOTH:
            group = group_of(gid)
        raise UnsafeError(path, owner + writers + mode, remedy, group)


class Walk:
    """A walk down from the root. Every folder stays open for `..`."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._names: list[bytes] = []
        self._fds = [os.open(b"/", COMPONENT | os.O_DIRECTORY)]
        trust.check(self.fd, b"/", above=True)

    @property
    def fd(self) -> int:
        return self._fds[-1]

    @property
    def path(self) -> bytes:
        return b"/" + b"/".join(self._names)

    def path_of(self, part: bytes) -> bytes:
        return os.path.join(self.path, part)

    def enter(self, part: bytes) -> bytes | None:
        """Go down into a folder. If it is a symbolic link, stay, and return its target."""
        path = self.path_of(part)
        try:
            # O_DIRECTORY triggers an automounter.
            fd = os.open(part, COMPONENT | os.O_DIRECTORY, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise type(error)(error.errno, error.strerror, path) from None
            return self._target(part, path)
        self._fds.append(fd)
        self._names.append(part)
        self._trust.check(fd, path, above=True)
        return None

    def _target(self, part: bytes, path: bytes) -> bytes:
        with closing_fd(os.open(part, COMPONENT, dir_fd=self.fd)) as fd:
            status = os.fstat(fd)
            if not stat.S_ISLNK(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            self._trust.check_link(status, os.fstat(self.fd), path)
            return os.readlink(b"", dir_fd=fd)

    def make(self, part: bytes, private: bool) -> bool:
        """Create a folder here. False if another process has just created it."""
        shared = not private and self._trust.shares(os.fstat(self.fd))
        try:
            os.mkdir(part, 0o700, dir_fd=self.fd)
        except FileExistsError:
            return False
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.path_of(part)) from None
        if shared and self._trust.gid is not None:
            os.chown(part, -1, self._trust.gid, dir_fd=self.fd, follow_symlinks=False)
        os.chmod(part, 0o2770 if shared else 0o700, dir_fd=self.fd)  # regardless of the umask
        return True

    def leave(self) -> bytes:
        """Go up. Returns the name of the folder that was left."""
        if not self._names:
            return b"."
        os.close(self._fds.pop())
        return self._names.pop()

    def restart(self) -> None:
        while self._names:
            self.leave()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def components(path: bytes) -> list[bytes]:
    """The parts of a path, the last one first."""
    return [part for part in reversed(path.split(b"/")) if part not in (b"", b".")]


@functools.lru_cache(maxsize=None)  # a directory service may take long to list its users
def is_private(gid: int, uid: int) -> bool:
    """Whether a user is the only member of a group. False if that is unknown."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except (KeyError, OSError):
        return False
    if group.gr_name != user.pw_name and user.pw_gid != gid:
        return False
    everyone = pwd.getpwall()
    if group.gr_name != user.pw_name and all(one.pw_uid != uid for one in everyone):
        return False  # a directory service that does not list its users
    others = {one.pw_name for one in everyone if one.pw_gid == gid and one.pw_uid != uid}
    return not others and set(group.gr_mem) <= {user.pw_name}


def belongs(uid: int, gid: int) -> bool:
    """Whether a user is a member of a group. False if that is unknown."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except (KeyError, OSError):
        return False
    return user.pw_gid == gid or user.pw_name in group.gr_mem


def writers_in_list(fd: int, gid: int) -> tuple[list[int], list[int]]:
    """The users and groups that can write to a group-writable file of group ``gid``, by its access
    control list if it has one. Raises OSError if the list cannot be read."""
    if not hasattr(os, "getxattr"):  # the launching machine may run macOS
        return [], [gid]
    try:
        # Through /proc, because the file may be open with O_PATH.
        data = os.getxattr("/proc/self/fd/%d" % fd, "system.posix_acl_access")
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        return [], [gid]
    entries = list(struct.iter_unpack("<HHI", data[4:]))
    mask = min([allowed for tag, allowed, _ in entries if tag == ACL_MASK], default=ACL_WRITE)
    writers = [(tag, one) for tag, allowed, one in entries if allowed & mask & ACL_WRITE]
    users = [uid for tag, uid in writers if tag == ACL_USER]
    groups = [gid for tag, _ in writers if tag == ACL_GROUP_OBJ]
    return users, groups + [one for tag, one in writers if tag == ACL_GROUP]


@functools.lru_cache(maxsize=None)
def foreign_uid() -> int | None:
    """The apparent owner of files of users outside an unprivileged container, such as the machine's
    root. None outside such a container."""
    try:
        with open("/proc/self/uid_map", "rb") as file:
            if file.read().split() == [b"0", b"0", b"4294967295"]:
                return None
        with open("/proc/sys/kernel/overflowuid", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def user_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return "user %d" % uid


def group_of(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OSError):
        return "%d" % gid


def printable(path: bytes) -> str:
    """A path as text for a message, on one line."""
    name = path.decode("utf-8", "backslashreplace")
    return name if name.isprintable() else ascii(name)
