"""`postdate pipeline`: runs the Spark pipeline in the foreground until Ctrl-C or SIGTERM."""

import argparse
import os
import re
from pathlib import Path

from postdate import config
from postdate.access.token import find_token
from postdate.cli.command import OK, REFUSED, add_address, add_bulk, add_parent, set_run
from postdate.cli.logs import add_log_level, start_logging
from postdate.client.address import parse_address, route_addresses
from postdate.config import MIB, Settings
from postdate.errors import UsageError
from postdate.extras import require_extra
from postdate.spark.session import java

HELP = """\
Runs the pipeline that carries far messages from a broker's log to its table, and back before they are due.
`postdate up` starts one beside the broker; start it by hand if Spark runs elsewhere.

examples:
  postdate up --pipeline none                        a broker that starts no pipeline ...
  postdate pipeline                                  ... and one for it, on all cores of the same machine

  postdate up --pipeline none --host 0.0.0.0 --tls enforcing --table /shared/postdate     a broker that others reach
  postdate pipeline --addr broker.example.org:9876 --master spark://spark.example.org:7077 --table /shared/postdate \\
    --token-file token --cluster-secret /etc/postdate/spark-secret
  postdate pipeline --addr broker.example.org:9876 --master yarn --table s3://bucket/postdate --checkpoint /shared/cp

On a cluster the table lies where all workers reach it, and the workers reach bulk. They need Python with pyarrow; our
modules travel with the job. While it reaches no broker, it waits and tries again. A broker has one pipeline: a new one
ends the one before it, and nothing is lost or doubled.

exit codes: 0 stopped by Ctrl-C or SIGTERM, 2 wrong usage, or no Java that Spark can use, 3 the broker refused, or Spark
failed
"""

CLUSTER_SECRET = "POSTDATE_CLUSTER_SECRET"
NO_SECRET = "none"
_SECRET = re.compile(r"[!-~]{16,256}")  # printable, without spaces: a line of Spark's settings has nothing else
_DEFAULTS = Settings()


def add(parser: argparse.ArgumentParser) -> None:
    add_flag = parser.add_argument
    add_address(parser)
    add_bulk(parser)
    add_flag(
        "--master", metavar="M", default=_DEFAULTS.spark_master,
        help=f"where Spark runs: local[N], spark://host:port, yarn (default: {_DEFAULTS.spark_master})",
    )  # fmt: skip
    add_flag("--memory", metavar="SIZE", default="1GiB", help="heap of Spark's driver (default: 1GiB)")
    add_flag(
        "--table", metavar="URI", default="", help="folder or URI of the table (default: that of the last pipeline)"
    )
    add_flag(
        "--token-file", metavar="FILE",
        help="the token of the broker's data folder (default: POSTDATE_TOKEN, else the file in POSTDATE_TOKEN_FILE)",
    )  # fmt: skip
    add_flag("--checkpoint", metavar="DIR", default="", help="folder of Spark's checkpoint (default: in the table's)")
    add_flag("--java-home", metavar="DIR", default="", help="Java 17 or newer (default: JAVA_HOME, PATH, usual places)")
    add_flag(
        "--cluster-secret", metavar="FILE", default="",
        help="file with the secret of a Spark standalone cluster, or none (default: POSTDATE_CLUSTER_SECRET is it)",
    )  # fmt: skip
    add_log_level(parser)
    add_parent(parser)
    set_run(parser, _pipeline, failed=REFUSED)


def _pipeline(arguments: argparse.Namespace) -> int:
    route_addresses(arguments.addr)
    if arguments.bulk:
        parse_address(arguments.bulk.removeprefix("tls:"))
    master = config.check_value("--master", "spark_master", arguments.master)
    memory_bytes = config.check_value("--memory", "spark_memory_bytes", arguments.memory)
    secret = _read_cluster_secret(master, arguments.cluster_secret)
    require_extra("spark", "postdate pipeline")
    token = find_token(os.environ, arguments.token_file)
    found = java.find(os.environ, arguments.java_home)
    if isinstance(found, java.Missing):
        raise UsageError(f"{found.sentence}: {java.INSTALL}, or name its folder with --java-home")
    os.environ["JAVA_HOME"] = found.home  # Spark looks there, and nowhere else
    # Spark's bridge to Java tells of every call, and of those that Java's end breaks; what fails comes as an exception.
    start_logging(arguments.log_level, only="postdate")
    # Only now: what has to do with Spark takes a second to load.
    from postdate.spark.pipeline import driver

    driver.run(
        driver.Options(
            address=arguments.addr, bulk=arguments.bulk, table=arguments.table, master=master,
            memory=f"{memory_bytes // MIB}m", token=token, checkpoint=arguments.checkpoint,
            parent_pid=arguments._parent_pid, cluster_secret=secret,
        )
    )  # fmt: skip
    return OK


def _read_cluster_secret(master: str, file: str) -> str:
    """The secret of a standalone cluster; empty where it has none. Raises UsageError where it needs one."""
    if not master.startswith("spark://"):
        if file:
            raise UsageError(f"--cluster-secret is for a master spark://..., and this is {master}: Spark makes its own")
        return ""
    secret = os.environ.pop(CLUSTER_SECRET, "")  # Python workers need not have it
    if file and file != NO_SECRET:
        try:
            secret = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--cluster-secret: {file} cannot be read: {error}") from error
        if not _SECRET.fullmatch(secret):
            raise UsageError(f"--cluster-secret: {file} holds {len(secret)} characters, expected one line of 16 to 256")
    if secret and file == NO_SECRET:
        raise UsageError(f"--cluster-secret is {NO_SECRET}, and {CLUSTER_SECRET} is set")
    if secret and not _SECRET.fullmatch(secret):
        raise UsageError(f"{CLUSTER_SECRET} has {len(secret)} characters, expected 16 to 256 without spaces")
    if secret or file == NO_SECRET or _is_on_loopback(master):
        return secret
    raise UsageError(
        f"{master} is reached over a network: name the file with the cluster's secret with --cluster-secret "
        "(docs/pipeline.md says how it gets one), or say --cluster-secret none: then everybody who reaches the driver "
        "may run code in it"
    )


def _is_on_loopback(master: str) -> bool:
    names = (address.rpartition(":")[0].strip("[]") for address in master.removeprefix("spark://").split(","))
    return all(name == "localhost" or name == "::1" or re.fullmatch(r"127(\.\d+){3}", name) for name in names)
