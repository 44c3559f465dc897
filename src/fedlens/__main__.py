"""`python -m fedlens` is the command `fedlens`."""

from __future__ import annotations

import sys

from fedlens.cli.signals import ignore_signals, stopped_by_signals


def main() -> None:
    """The entry point of the `fedlens` command: from here on a signal ends it without a traceback."""
    try:
        with stopped_by_signals():
            try:
                from fedlens.cli.main import main as command  # slow: only after the signals are handled

                command()
            finally:
                ignore_signals()
    except KeyboardInterrupt:  # while Python was importing
        ignore_signals()
        if sys.stderr is not None:
            sys.stderr.write("interrupted: nothing was started\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
