"""Program inside a sandbox without a network: a port of its loopback leads to a Unix socket of the runner.

    python3 relay_inside.py SOCKET PORT COMMAND ...

It listens, leaves a child that forwards connections, and becomes the command. It needs only the standard
library.
"""

import os
import socket
import sys
import threading


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the source ends."""
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()


def serve(listener: socket.socket, path: str) -> None:
    """Forward each connection to the socket."""
    while True:
        near, _ = listener.accept()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(path)
        except OSError:
            near.close()
            continue
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=pump, args=(source, target), daemon=True).start()


def main() -> None:
    path, port, *command = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    if os.fork() == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # who waits for the command's output does not wait for this process
            os.dup2(nothing, fd)
        serve(listener, path)
    listener.close()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
