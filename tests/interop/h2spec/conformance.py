"""Runs h2spec's cases against a port, and tells of each section: conformance.py ADDRESS H2SPEC [--tls]

They break HTTP/2 and HPACK in every way that the RFCs name and look at the answer; --strict has one more of them.
"""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

CASES = 146  # of all sections: one that is not run does not go unnoticed
ANSWER_S = 5  # how long h2spec waits for an answer


def report_of(address: str, binary: str, flags: list[str]) -> ElementTree.Element:
    """Runs all cases; returns what h2spec wrote about them."""
    host, _, port = address.rpartition(":")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [binary, "--strict", "--host", host, "--port", port, "--timeout", str(ANSWER_S)]
        done = subprocess.run(
            [*command, "--junit-report", str(report), *flags],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if not report.exists():
            sys.exit(f"FAILED: h2spec ended with exit code {done.returncode}:\n{done.stdout}")
        return ElementTree.fromstring(report.read_text())


def main() -> None:
    address, binary, *flags = sys.argv[1:]
    count, broken = 0, []
    for section in report_of(address, binary, ["--tls", "--insecure"] if flags else []).iter("testsuite"):
        cases = section.findall("testcase")
        name = f"{section.get('package', '').partition('/')[0]} {section.get('name')}"
        wrong = [case for case in cases if len(case)]  # of one that is well nothing is told
        broken += [f"{name}: {case.get('classname')}: {' '.join(''.join(case.itertext()).split())}" for case in wrong]
        if cases and not wrong:
            print(f"ok: {name}, {len(cases)}")
        count += len(cases)
    if count != CASES:
        broken.append(f"{count} cases, expected {CASES}")
    for line in broken:
        print(f"FAILED: {line}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
