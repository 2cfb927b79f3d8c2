"""Fuzz a server with seeded mutations of valid requests.

    python tests/fuzz [--count 100000] [--seed 0] [--only NUMBER] [--engine KIND] [--url URL --key KEY]

Without a URL it starts one, with an engine of the kind: the gateway with a store and a small random model. A
server at a URL, such as one of `raylight serve` behind Ray Serve, gets the same requests; its records are not
compared. Prints the answers by route and status. A wrong answer is printed with its request and the command
that repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

sys.path[:0] = [str(Path(__file__).parent.parent / "helpers")]


def main() -> None:
    from engine_server import ENGINES, build_tiny
    from fuzz_run import FuzzFailure, FuzzRun, FuzzServer, StoreTarget, Target

    parser = argparse.ArgumentParser(prog="python tests/fuzz")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    parser.add_argument("--url")
    parser.add_argument("--key", default="")
    args = parser.parse_args()

    def fuzz(target: Target) -> bool:
        run = FuzzRun(target, args.seed, args.count, args.only)
        try:
            asyncio.run(run.run())
        except FuzzFailure as failure:
            print(failure)
        print(run.counts.table())
        return not run.failures

    if args.url:
        url = urlsplit(args.url)
        sound = fuzz(Target(url.hostname or "127.0.0.1", url.port or 80, args.key))
    else:
        with tempfile.TemporaryDirectory() as folder:
            server = FuzzServer(args.engine, build_tiny(Path(folder)))
            try:
                sound = fuzz(StoreTarget(server))
            finally:
                server.close()
    sys.exit(not sound)


if __name__ == "__main__":
    main()
