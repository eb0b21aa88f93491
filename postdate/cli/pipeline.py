"""`postdate pipeline`: runs the Spark pipeline in the foreground until Ctrl-C or SIGTERM."""

import argparse
import os

from postdate import config
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

  postdate up --pipeline none --host 0.0.0.0         a broker that other machines reach
  postdate pipeline --addr broker.example.org:9876 --master spark://spark.example.org:7077 --table /shared/postdate
  postdate pipeline --addr broker.example.org:9876 --master yarn --table s3://bucket/postdate --checkpoint /shared/cp

On a cluster the table lies where all workers reach it, and the workers reach bulk. They need Python with pyarrow; our
modules travel with the job. While it reaches no broker, it waits and tries again. A broker has one pipeline: a new one
ends the one before it, and nothing is lost or doubled.

exit codes: 0 stopped by Ctrl-C or SIGTERM, 2 wrong usage, or no Java that Spark can use, 3 the broker refused, or Spark
failed
"""

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
    add_flag("--checkpoint", metavar="DIR", default="", help="folder of Spark's checkpoint (default: in the table's)")
    add_flag("--java-home", metavar="DIR", default="", help="Java 17 or newer (default: JAVA_HOME, PATH, usual places)")
    add_log_level(parser)
    add_parent(parser)
    set_run(parser, _pipeline, failed=REFUSED)


def _pipeline(arguments: argparse.Namespace) -> int:
    route_addresses(arguments.addr)
    if arguments.bulk:
        parse_address(arguments.bulk)
    master = config.check_value("--master", "spark_master", arguments.master)
    memory_bytes = config.check_value("--memory", "spark_memory_bytes", arguments.memory)
    require_extra("spark", "postdate pipeline")
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
            memory=f"{memory_bytes // MIB}m", checkpoint=arguments.checkpoint, parent_pid=arguments._parent_pid,
        )
    )  # fmt: skip
    return OK
