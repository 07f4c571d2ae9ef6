"""Runs one program in a sandbox and ends everything it started; a script, for `sandbox.py`.

    supervisor ── bwrap, or namespaces, or nothing ── init ── program

argv[1] is the JSON of `Sandbox._spec`, standard input the program, standard output what the program
prints (both its streams), standard error one JSON object `{"returncode": n}` (negative: the signal)
or, in words, why the sandbox could not be set up. The supervisor leaves only when every descendant
is dead; SIGTERM, or the death of its parent, makes it end them first. Standard library only, and
as little of it as possible: an interpreter starts for every call.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

Spec = dict[str, Any]

NOBODY = 65534

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 0x4000, 0x40000, 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE = -100, 0x1000, 0x8000, 1
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
# The same on every machine, as all system calls since Linux 5.0; these came with 5.2 and 5.12.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    spec = json.loads(sys.argv[1])
    try:
        if spec["isolation"] == "inside":  # bwrap has made the sandbox around us
            init(spec)
        supervise(spec)
    except OSError as error:
        sys.exit(str(error))


def supervise(spec: Spec) -> None:
    """Start the program, wait for its init, leave nothing behind."""
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        start: Callable[[Spec], None] = init
        if spec["isolation"] == "bwrap":
            start = exec_bwrap
        elif spec["isolation"] == "namespaces":
            start = enter_namespaces(spec)
        else:
            os.mkdir(spec["directory"], 0o700)
            # without a user namespace the kernel counts all that the user runs
            most = spec["limits"]["RLIMIT_NPROC"][0] + count_tasks(os.geteuid())
            spec["limits"]["RLIMIT_NPROC"] = (most, most)
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # who loses its parent becomes our child
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == spec["parent"]:  # else it died before that line
            os.waitpid(fork(start, spec), 0)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()
        if spec["isolation"] == "none":
            # not shutil: a tree deeper than Python's stack is easily made
            shell = 'chmod -R u+rwx "$0"; rm -rf "$0"'
            os.spawnv(os.P_WAIT, "/bin/sh", ["sh", "-c", shell, spec["directory"]])


def fork(function: Callable[[Spec], None], spec: Spec) -> int:
    """The pid of a child that runs `function` and dies with us."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            function(spec)
        except BaseException as error:  # told in one line, and never into the code of the parent
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)
    return pid


def end_descendants() -> None:
    """Kill our children until none is left; theirs become ours as they die."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def children() -> list[int]:
    """Our children, including dead ones that nobody waited for."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def count_tasks(uid: int) -> int:
    """Processes and threads of a user."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                found += len(os.listdir(f"/proc/{name}/task"))
        except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
            continue
    return found


def exec_bwrap(spec: Spec) -> NoReturn:
    inside = json.dumps({**spec, "isolation": "inside", "directory": "/tmp"})
    os.execve(spec["bwrap"][0], [*spec["bwrap"], inside], {})


def enter_namespaces(spec: Spec) -> Callable[[Spec], None]:
    """Enter new namespaces; what is returned is for process 1 of them to run.

    Root does without a user namespace until all is mounted, and then becomes nobody: the kernel
    exempts the real root from the limit on processes.
    """
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    proc = os.open("/proc", os.O_PATH)  # outlives the change of root
    is_root = os.geteuid() == 0 and libc.unshare(flags) == 0
    if not is_root:
        uid, gid = os.geteuid(), os.getegid()
        check(libc.unshare(CLONE_NEWUSER | flags), "new namespaces")
        map_ids(proc, uid, gid)

    def run(spec: Spec) -> None:
        check(libc.unshare(CLONE_NEWNS), "new mount namespace")  # the supervisor keeps its /proc
        change_root(spec)
        if is_root:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
            prctl(PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
            # processes are counted per user namespace
            check(libc.unshare(CLONE_NEWUSER), "new user namespace")
            map_ids(proc, NOBODY, NOBODY)
        try:  # a namespace of its own would give the program capabilities in it
            write(proc, "sys/user/max_user_namespaces", "0")
        except OSError as error:
            if error.errno != errno.EROFS:  # so in many containers; it is one more lock, no more
                raise
        init({**spec, "directory": "/tmp"})

    return run


def map_ids(proc: int, uid: int, gid: int) -> None:
    """Be nobody inside the new user namespace: a user other than 0 has no capabilities."""
    write(proc, "self/setgroups", "deny")
    write(proc, "self/uid_map", f"{NOBODY} {uid} 1")
    write(proc, "self/gid_map", f"{NOBODY} {gid} 1")


def write(proc: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY, dir_fd=proc)
    os.write(file, text.encode())
    os.close(file)


def change_root(spec: Spec) -> None:
    """A root that holds `spec["view"]`, read-only, and an empty /tmp; the old one is gone."""
    # looked at now: what is in /tmp is soon out of sight
    trees = [(path, os.path.isdir(path), open_tree(path)) for path in spec["view"]]
    root = "/tmp"  # any directory would do: the mount is seen in here only
    mount("/", MS_REC | MS_PRIVATE)
    mount(root, MS_NOSUID | MS_NODEV, "tmpfs", "mode=755,size=1m")
    os.mkdir(f"{root}/tmp")
    mount(f"{root}/tmp", MS_NOSUID | MS_NODEV, "tmpfs", f"mode=1777,size={spec['disk']}")
    for path, is_directory, tree in trees:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if is_directory:
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT))
        place = (AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
        check(libc.syscall(SYS_MOVE_MOUNT, tree, b"", *place), f"mount {path}")
    os.symlink("/tmp", f"{root}/dev/shm")
    os.chdir(root)
    check(libc.syscall(SYS_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount2")
    set_attributes(AT_FDCWD, b"/", 0, MOUNT_ATTR_RDONLY)


def open_tree(path: str) -> int:
    """A read-only copy of the mounts at `path` and below, not yet mounted anywhere."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | AT_RECURSIVE
    tree = check(
        libc.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}"
    )
    attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    if not path.startswith("/dev/"):
        attributes |= MOUNT_ATTR_NODEV
    set_attributes(tree, b"", AT_EMPTY_PATH | AT_RECURSIVE, attributes)
    return tree


def set_attributes(directory: int, path: bytes, flags: int, attributes: int) -> None:
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    size = ctypes.sizeof(values)
    arguments = (directory, path, flags, ctypes.byref(values), size)
    check(libc.syscall(SYS_MOUNT_SETATTR, *arguments), "mount_setattr")


def mount(target: str, flags: int, kind: str = "none", options: str = "") -> None:
    names = (kind.encode(), target.encode(), kind.encode())
    check(libc.mount(*names, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def init(spec: Spec) -> NoReturn:
    """Run the program in `spec["directory"]` and report how it ended; as process 1, be init."""
    os.chdir(spec["directory"])
    with open("main.py", "xb") as file:
        file.write(sys.stdin.buffer.read())
    program = fork(exec_program, spec)
    while True:
        pid, status = os.wait()
        if pid == program:
            break
    os.write(2, json.dumps({"returncode": os.waitstatus_to_exitcode(status)}).encode())
    os._exit(0)


def exec_program(spec: Spec) -> NoReturn:
    os.setsid()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, limit in spec["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    directory = spec["directory"]
    environment = {**spec["environment"], "HOME": directory, "TMPDIR": directory}
    os.dup2(1, 2)
    os.execve(spec["command"][0], spec["command"], environment)


def prctl(option: int, value: int) -> None:
    check(libc.prctl(option, value, 0, 0, 0), "prctl")


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    main()
