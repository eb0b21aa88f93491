"""`python -m verify.simulation`: runs random histories, shows progress, prints the shortest failing one.

Exit codes: 0 all promises held, 1 one was broken, 2 usage, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from verify.simulation.history import Failure, digest_seed, run_seed
from verify.simulation.planted import PLANTED, digest_planted

_BAR_WIDTH = 40


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    run = _print_digests if options.digest else _run
    try:
        return run(range(options.start, options.start + options.seeds), options.workers)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verify.simulation",
        description="Runs random histories of the core on a virtual clock and disk.",
        epilog="examples:\n  python -m verify.simulation --seeds 2000\n"
        "  python -m verify.simulation --seeds 1 --from 4711     run one seed again\n"
        "  python -m verify.simulation --digest > before.txt     compare with `diff` after a change\n\n"
        "exit codes: 0 all promises held, 1 one was broken, 2 usage, 130 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=_positive, default=200, help="how many seeds to run (default 200)")
    parser.add_argument("--from", dest="start", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--workers", type=_positive, default=os.cpu_count() or 1, help="processes (default: one a core)"
    )
    parser.add_argument(
        "--digest",
        action="store_true",
        help="print a digest of what the broker answered and wrote, for each seed and each planted history, to compare "
        "two versions of the code; judges nothing, the exit code is 0",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _run(seeds: range, workers: int) -> int:
    failures = []
    with ProcessPoolExecutor(workers) as pool:
        for failure in _with_progress(pool.map(run_seed, seeds, chunksize=4), len(seeds)):
            if failure is not None:
                failures.append(failure)
                print(f"\n{failure}\n", file=sys.stderr)
    print(f"{len(seeds) - len(failures)} seeds held, {len(failures)} failed (seeds {seeds.start} to {seeds.stop - 1})")
    return 1 if failures else 0


def _print_digests(seeds: range, workers: int) -> int:
    with ProcessPoolExecutor(workers) as pool:
        digests = pool.map(digest_seed, seeds, chunksize=4)
        for seed, digest in zip(seeds, digests, strict=True):
            print(f"seed {seed} {digest}", flush=True)
        for planted, digest in zip(PLANTED, pool.map(digest_planted, PLANTED), strict=True):
            print(f"planted {planted.name} {digest}", flush=True)
    return 0


def _with_progress(results: Iterator[Failure | None], total: int) -> Iterator[Failure | None]:
    shown = sys.stderr.isatty()
    for done, result in enumerate(results, 1):
        if shown:
            filled = _BAR_WIDTH * done // total
            print(f"\r[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {done}/{total} seeds", end="", file=sys.stderr)
        yield result
    if shown:
        print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
