"""Exit with 0 if everything named answers, else with one line that says what does not.

    healthcheck http://127.0.0.1:9094/health tls://server.example.org:9092 127.0.0.1:9092

A URL answers with a status of 200, HOST:PORT with a connection, tls://HOST:PORT with a certificate for HOST that the
federation's CA has signed.
"""

import os
import socket
import ssl
import sys
import urllib.request

CA = os.environ.get("FEDTTA_CA", "/run/secrets/ca.crt")
SECONDS = 3.0


def check(target: str) -> None:
    """Raise OSError or ValueError if `target` does not answer."""
    scheme, _, address = target.rpartition("://")
    if scheme in ("http", "https"):
        # Asked from inside the container itself: there is nobody between whom a certificate would unmask.
        context = ssl._create_unverified_context()
        urllib.request.urlopen(target, timeout=SECONDS, context=context).close()
        return
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        if scheme == "tls":
            context = ssl.create_default_context(cafile=CA)
            context.set_alpn_protocols(["h2"])
            context.wrap_socket(connection, server_hostname=host).close()


for target in sys.argv[1:]:
    try:
        check(target)
    except (OSError, ValueError) as error:
        sys.exit(f"{target}: {error}")
