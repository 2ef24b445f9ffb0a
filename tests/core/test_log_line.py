"""Lines of the log on standard error."""

from __future__ import annotations

import logging

from billfish.core.log_line import logging_to_stderr


def test_lines_say_who_warns_and_when_a_request_was_answered(capsys):
    logger = logging.getLogger("billfish")
    level = logger.level
    with logging_to_stderr():
        logging.getLogger("billfish.x").info("one")
        logging.getLogger("billfish.x").warning("two %s", "words")
        logging.getLogger("billfish.access").info("POST / 200")
        logging.getLogger("billfish.x").debug("nothing")
    logging.getLogger("billfish.x").info("after")
    first, second, third = capsys.readouterr().err.splitlines()
    assert (first, second) == ("billfish: one", "billfish: warning: two words")
    assert third.endswith(" POST / 200")
    assert third[:2] == "20"  # the year
    assert logger.level == level
    assert not logger.handlers
