"""torchrun with the last word left to the ranks: `python -m vescale.torchrun --nproc-per-node 2 -m vescale.train ...`.

The same options and the same behaviour. But a rank that has said in one line why it ends is not followed by the
agent's own traceback, and the exit code is the rank's: 75 tells a scheduler to run the command again. A rank that died
without a word (killed, out of memory) is named in one line.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Runs torchrun's command.

    Returns:
        The exit code of the rank that failed first, 128 + the signal after one, 2 for options that cannot be.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)  # the agent's ten lines for every rank that ends
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it is for the ranks: they save and leave
    try:
        torchrun(sys.argv[1:] if argv is None else list(argv))
    except ChildFailedError as failed:
        return _code(failed)
    except SignalException as ended:
        return 128 + ended.sigval
    except ValueError as problem:  # of its options: a machine without GPUs was asked for a rank on each, say
        line = " ".join(str(problem).split()).rstrip(".")
        hint = "; --nproc-per-node takes a number" if "available" in line or "nproc" in line else ""
        print(f"vescale.torchrun: {line}{hint}", file=sys.stderr)
        return 2
    return 0


def _code(failed: Any) -> int:
    """Returns the code to exit with: a rank that was ended because of another does not count."""
    codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    died = {rank: -code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
    if died:
        words = ", ".join(f"rank {rank} by {signal.Signals(number).name}" for rank, number in sorted(died.items()))
        print(f"vescale.torchrun: killed: {words}; the same command goes on", file=sys.stderr)
        return 128 + min(died.values())
    said = [code for _, code in sorted(codes.items()) if code > 0]
    return said[0] if said else 128 + signal.SIGTERM


if __name__ == "__main__":
    raise SystemExit(main())
