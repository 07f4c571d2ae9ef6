"""Look at a run in the browser: its curves, its rollouts by time, and every token.

    python -m minirl.view RUN [--port 8000] [--host 127.0.0.1]

RUN is a run directory (runs/<experiment>), of a run that has ended or goes on. What it shows are
the trajectories that rollout.trace kept. From another machine: `ssh -L 8000:localhost:8000 HOST`.
Nothing is written, and nobody is asked for a password: with another --host, whoever can reach it
can read the run.
"""

import argparse
import sys
from pathlib import Path

from minirl.config import ConfigError
from minirl.view.files import RunFiles
from minirl.view.server import PageServer


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m minirl.view",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    try:
        server = PageServer(options.host, options.port, RunFiles(options.run))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except (OSError, OverflowError) as error:
        sys.exit(f"error: --host {options.host} --port {options.port}: {error}")
    with server:
        print(f"{options.run} is at {server.url}   (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
