"""Exit with 0 if everything named answers: URLs with a status of 200, HOST:PORT with a connection.

healthcheck http://127.0.0.1:9094/health server.example.org:9092
"""

import socket
import ssl
import sys
import urllib.request

SECONDS = 3.0


def check(target: str) -> None:
    """Raise OSError if `target` does not answer."""
    if target.startswith(("http://", "https://")):
        # Asked from inside the container itself: there is nobody between whom a certificate would unmask.
        context = ssl._create_unverified_context()
        urllib.request.urlopen(target, timeout=SECONDS, context=context).close()
        return
    host, _, port = target.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS).close()


for target in sys.argv[1:]:
    try:
        check(target)
    except (OSError, ValueError) as error:
        sys.exit(f"{target}: {error}")
