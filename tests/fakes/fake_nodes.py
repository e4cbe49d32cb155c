"""The fake engine over several hosts: all ranks meet at node 0, and each step waits for all of them.

As with NCCL, a step whose other side is gone does not fail: it waits.
"""
import json
import socket
import threading
import time

RETRY_SECONDS = 0.1


class Meeting:
    """Node 0's side: a connection to each other node's main process."""

    def __init__(self, address, port, count):
        self.others = []
        with socket.create_server((address, port)) as listening:
            while len(self.others) < count - 1:
                self.others.append(listening.accept()[0].makefile("rw"))

    def tell(self, message):
        """Gives all of them the message and waits until all have done it; for ever where one is gone."""
        try:
            for other in self.others:
                other.write(json.dumps(message) + "\n")
                other.flush()
            answers = [other.readline() for other in self.others]
        except OSError:
            answers = [""]
        if not all(answers):
            threading.Event().wait()


def follow(address, port, tell):
    """Another node's side: does what node 0 says, until the end of the process."""
    while True:
        try:
            joined = socket.create_connection((address, port)).makefile("rw")
            break
        except OSError:
            time.sleep(RETRY_SECONDS)
    for text in joined:
        tell(**json.loads(text))
        joined.write("done\n")
        joined.flush()
    threading.Event().wait()
