"""RocketMQ's official Java client, from Maven's registry."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

from program import HERE, PLAIN, SHORT, Access, Language, Program, compile_programs, fetch

FOLDER = HERE / "java"
LIBRARIES, CLASSES = FOLDER / "target" / "lib", FOLDER / "target" / "classes"

COPY = "org.apache.maven.plugins:maven-dependency-plugin:copy-dependencies"  # in full: a short name is looked up online

# A JVM that starts fast and stays small. Its client logs into our folder, and keeps the offsets of broadcasting there.
JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Drocketmq.log.level=warn")
BINARY = "-Drocketmq.serialize.type=ROCKETMQ"

# Producers are asked about open transactions within seconds.
ASKING = PLAIN | {"transaction_timeout_ms": "1s", "transaction_check_interval_ms": "2s"}
FAR = SHORT | {"fresh_queue_bytes": "0"}  # without fresh queues a group begins where it says

POPPER = (sys.executable, str(FOLDER / "popper.py"))

# Long ones first.
PROGRAMS = (
    Program("one group with our own client", "Mixed", PLAIN, POPPER),
    Program("retries and dead letters", "Retries", FAR),
    Program("killed and restarted", "Restart", PLAIN),
    Program("transactions", "Transactions", ASKING),
    Program("popping", "Pops", PLAIN | {"retry_times_max": "1"}),
    Program("the documentation's pair", "Classic", PLAIN),
    Program("groups: share, order, broadcast, tags", "Groups", PLAIN),
    Program("where a group begins", "Begin", FAR),
    Program("delays, near", "Delays", PLAIN, ("5000",)),
    Program("delays, far, binary headers", "Delays", FAR, ("2000",), (BINARY,)),
    Program("recall and delete marker, near", "Recall", PLAIN),
    Program("recall and delete marker, far", "Recall", FAR),
    Program("lite pull", "LitePull", PLAIN),
    Program("lite pull, binary headers", "LitePull", PLAIN, (), (BINARY,)),
    Program("sends", "Sends", PLAIN, ("json",), is_always_signed=True),
    Program("sends, binary headers", "Sends", PLAIN, ("binary",), (BINARY,)),
    Program("the README's quick start", "QuickStart", PLAIN, is_plain_only=True),
    Program("refusals", "Refusals", PLAIN | {"auto_create_topics": "false"}, (), (), ("known",)),
)


def build() -> None:
    fetch_libraries(FOLDER)
    compile_sources(FOLDER)


def fetch_libraries(folder: Path) -> None:
    """What a folder's pom.xml names, into its target/lib; not again while pom.xml stays the same."""
    libraries, stamped = folder / "target" / "lib", folder / "target" / "stamp"
    stamp = hashlib.sha256((folder / "pom.xml").read_bytes()).hexdigest()
    if stamped.is_file() and stamped.read_text() == stamp:
        return
    shutil.rmtree(libraries, ignore_errors=True)
    goal = [COPY, f"-DoutputDirectory={libraries}", "-DincludeScope=runtime"]
    fetch(["mvn", "-q", "-B", "-Dstyle.color=never", *goal], folder)
    stamped.write_text(stamp)


def compile_sources(folder: Path) -> None:
    """What stands in a folder's src, into its target/classes."""
    sources = [str(file) for file in sorted((folder / "src").glob("*.java"))]
    classes = folder / "target" / "classes"
    shutil.rmtree(classes, ignore_errors=True)
    command = ["javac", "--release", "11", "-encoding", "UTF-8", "-proc:none", "-nowarn", "-d", str(classes)]
    compile_programs([*command, "-cp", f"{folder / 'target' / 'lib'}/*", *sources], folder)


def command(program: Program, route: str, folder: Path, access: Access) -> list[str]:
    places = (f"-Drocketmq.log.root={folder}", f"-Drocketmq.client.localOffsetStoreDir={folder}/offsets")
    path = os.pathsep.join((str(CLASSES), f"{LIBRARIES}/*"))
    # Without the test mode it trusts nobody but whom the file names; it never compares the name of the host.
    tls = ("-Dtls.enable=true", "-Dtls.test.mode.enable=false", "-Dtls.client.authServer=true",
           f"-Dtls.client.trustCertPath={access.ca_file}") if access.ca_file else ()  # fmt: skip
    return ["java", *JVM, *tls, *program.flags, *places, "-cp", path, program.name, route, *program.arguments]


LANGUAGE = Language(
    "java",
    "org.apache.rocketmq:rocketmq-client 5.5.0",
    {"java": "default-jdk-headless", "javac": "default-jdk-headless", "mvn": "maven"},
    build,
    command,
    PROGRAMS,
)
