"""The container's health check: `python -I -S -B health.py PORT`. Exit 0: /readyz on this port says 200; 1: anything else.

Prints the answer's body, which names the reason: `docker inspect` shows it. Docker starts this program anew every few
seconds in the memory of the container, so it imports C modules only (`socket` alone would bring selectors and enum).
"""
import _socket
import sys

SECONDS, MOST_BYTES = 4.0, 65536


def ask(port):
    """The whole answer. Raises OSError (TimeoutError is one)."""
    connection = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    connection.settimeout(SECONDS)
    connection.connect(("127.0.0.1", port))
    connection.sendall(b"GET /readyz HTTP/1.0\r\nHost: 127.0.0.1:%d\r\n\r\n" % port)
    answer = b""
    while len(answer) < MOST_BYTES and (part := connection.recv(MOST_BYTES)):
        answer += part
    return answer


def main(port):
    try:
        head, _, body = ask(port).partition(b"\r\n\r\n")
    except OSError as error:
        print(f"127.0.0.1:{port}: {error}")
        return 1
    print(body.decode("utf-8", "replace"))
    return 0 if head.split(None, 2)[1:2] == [b"200"] else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
