"""Why a request failed: in the words of the server, of TLS or of the system, made fit for a terminal.

Takes errors and bodies; gives sentences. Knows no request.
"""

import errno
import os
import re
import ssl

import msgspec

from flashstep.bench.load.events import told

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """Words of a server for a terminal or a report: its control characters are written out, so that they command nothing."""
    return CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def why(error: Exception) -> str:
    """In the words of TLS or of the system where they have some."""
    cause = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {getattr(cause, 'verify_message', '') or cause.reason or cause}"
    number = getattr(cause, "errno", None)
    known = number is not None and number in errno.errorcode
    return os.strerror(number) if known else str(error) or type(error).__name__


def words_of(body: bytes) -> str:
    """The server's own sentence, or the beginning of its words where it sent no JSON."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return body.decode(errors="replace")[:200]
    return told(value.get("error", value) if isinstance(value, dict) else value)[:500]
