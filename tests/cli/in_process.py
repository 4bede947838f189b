"""The command line in the test's own process: what it prints and its exit code, without the seconds that imports take."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from podium.cli import main


def podium(*arguments: str, cwd: Path | None = None) -> CompletedProcess[str]:
    """Run the command to its end; logging, signals and the working directory are put back."""
    output, errors = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    code = 0
    with (
        _put_back(),
        contextlib.chdir(cwd or Path.cwd()),
        mock.patch.object(sys, "argv", ["podium", *arguments]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main.main()
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else int(done.code is not None)
    return CompletedProcess(list(arguments), code, _text(output), _text(errors))


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("podium")
    kept = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in (root, ours)]
    handler, path, environment = signal.getsignal(signal.SIGTERM), sys.path[:], dict(os.environ)
    root.handlers.clear()  # so that warnings go to this command's stderr
    try:
        yield
    finally:
        for logger, handlers, level, propagate in kept:
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
        signal.signal(signal.SIGTERM, handler)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
