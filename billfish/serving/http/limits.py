"""What a client may send at most, before anybody has looked at it. docs/serving.md lists these limits."""

from __future__ import annotations

import sys

HEAD_BYTES = 64 * 2**10  # of the request line, all headers and trailers together
HEAD_LINES = 128
HEAD_SECONDS = 10.0  # to send them in
BODY_BYTES = 8 * 2**20
BODY_BRACKETS = 250_000  # lists and objects of a body, whose memory is 20 times their text
BODY_CHUNKS = 16_384  # of a chunked body: each costs time, however short
BODY_SECONDS = 60.0  # to send a body in
BODIES_BYTES = 128 * 2**20  # of all bodies that arrive or wait to be read; beyond it the oldest one is refused
LINGER_SECONDS = 5.0  # to send the rest of a body whose request was answered
CONNECTIONS = 4096  # beyond it the oldest one without a request is closed
SPARE_DESCRIPTORS = 512  # files that the process may open beside its connections
ACCEPTED_AT_ONCE = 256  # connections that wait to be accepted


def most_connections() -> int:
    """CONNECTIONS, or fewer where the system gives the process fewer files. Raises its soft limit first."""
    if sys.platform == "win32":
        return CONNECTIONS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return CONNECTIONS if soft == resource.RLIM_INFINITY else min(CONNECTIONS, max(soft - SPARE_DESCRIPTORS, soft // 2))
