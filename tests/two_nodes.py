"""`torchrun --nnodes 2` on one machine: python two_nodes.py ARGUMENTS FOR torchrun

Where the machine permits it, each node has a network namespace of its own, with its own address and
loopback, and a cable between both; else both are at 127.0.0.1.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache

ISOLATE = ["unshare", "--map-root-user", "--net", "--"]
ADDRESSES = ["10.99.0.1", "10.99.0.2"]


@cache
def can_isolate() -> bool:
    """Whether a process may have its own network, and a cable to another."""
    cable = "ip link add node0 type veth peer name node1"
    try:
        return subprocess.run([*ISOLATE, *cable.split()], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def command(*arguments: str) -> list[str]:
    """Runs this file."""
    prefix = ISOLATE if can_isolate() else []
    return [*prefix, sys.executable, __file__, "joined" if prefix else "local", *arguments]


def main(kind: str, *arguments: str) -> int:
    """Start a torchrun per node; the first exit status that is not 0."""
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches both nodes, which end
    if kind == "local":
        return run_nodes(["", ""], "127.0.0.1", free_port(), arguments)
    # Its network lasts as long as this process.
    with subprocess.Popen(["unshare", "--net", "--", "cat"], stdin=subprocess.PIPE) as other:
        return run_nodes(lay_cable(other.pid), ADDRESSES[0], 29500, arguments)


def run_nodes(inside: list[str], host: str, port: int, arguments: tuple[str, ...]) -> int:
    """Start a torchrun `inside` each of two networks; the first exit status that is not 0."""
    meet = ["--nnodes=2", f"--master-addr={host}", f"--master-port={port}"]
    nodes = []
    for rank, prefix in enumerate(inside):
        torchrun = [sys.executable, "-m", "torch.distributed.run", *meet, f"--node-rank={rank}"]
        nodes.append(subprocess.Popen([*prefix.split(), *torchrun, *arguments]))
    return next(filter(None, [node.wait() for node in nodes]), 0)


def lay_cable(pid: int) -> list[str]:
    """Join this process's network and that of another; the commands that run a third inside."""
    theirs = f"/proc/{pid}/ns/net"
    while os.readlink(theirs) == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    inside = ["", f"nsenter --net={theirs} --"]
    cable = f"ip link add node0 type veth peer name node1 netns {pid}"
    subprocess.run(cable.split(), check=True)
    for rank, prefix in enumerate(inside):
        for change in (
            "link set lo up",
            f"addr add {ADDRESSES[rank]}/24 dev node{rank}",
            f"link set node{rank} up",
        ):
            subprocess.run([*prefix.split(), "ip", *change.split()], check=True)
    return inside


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
