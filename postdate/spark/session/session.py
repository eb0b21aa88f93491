"""Starts a Spark session that is quiet, has our sizes, and carries our modules to its executors."""

import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import postdate

_LOG4J = """\
status = off
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %m%n%throwable{0}
"""
# What fails in a task or a batch the driver reports itself.
_SILENT = (
    "org.apache.spark.deploy.SparkSubmit", "org.apache.spark.api.python.PythonGatewayServer",
    "org.apache.spark.repl.Main", "org.apache.spark.sql.execution.streaming", "org.apache.spark.executor",
    "org.apache.spark.scheduler", "org.apache.spark.api.python", "org.apache.spark.util", "org.apache.spark.network",
    "org.apache.spark.storage", "org.apache.spark.SparkContext", "org.apache.spark.deploy.client",
)  # fmt: skip


def start_session(master: str, memory: str, home: str, folder: Path) -> Any:
    """Starts Spark with the Java at `home`. `folder` is for its log settings, our modules and its scratch files."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    os.environ["JAVA_HOME"] = home
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable if _is_local(master) else "python3")
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", _own_address(master))
    if _is_local(master):
        # Workers on this machine know the package by the interpreter's own path alone.
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        root = str(Path(postdate.__file__).parent.parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *(path for path in known if path and path != root)])
    log_settings = folder / "log4j2.properties"
    silent = (f"logger.s{number}.name = {name}\nlogger.s{number}.level = off\n" for number, name in enumerate(_SILENT))
    log_settings.write_text("".join([_LOG4J, *silent]), encoding="utf-8")
    conf = SparkConf()
    for name, value in _settings(master, memory, log_settings, folder).items():
        conf.set(name, value)
    # A group of its own: Ctrl-C in a terminal reaches us alone, and we stop Java in order.
    gateway = launch_gateway(conf, popen_kwargs={"process_group": 0})  # type: ignore[no-untyped-call]
    context = SparkContext(gateway=gateway, conf=conf)
    return SparkSession(context)


def _settings(master: str, memory: str, log_settings: Path, folder: Path) -> dict[str, str]:
    # Java only hands out work: its second compiler would cost more than it gains.
    java = f"-Xss64m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dlog4j2.configurationFile=file:{log_settings}"
    # On this machine executors have the whole package; elsewhere it travels with the job.
    carried = {} if _is_local(master) else {"spark.submit.pyFiles": str(pack_modules(folder))}
    return carried | {
        "spark.master": master,
        "spark.app.name": "postdate",
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": java,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder),  # else Spark makes one in the current folder
        "spark.sql.streaming.numRecentProgressUpdates": "2",
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.sql.shuffle.partitions": "2",
        "spark.task.maxFailures": "2",
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
        "spark.python.worker.reuse": "true",
        "spark.scheduler.listenerbus.eventqueue.capacity": "1000",
    }


def _is_local(master: str) -> bool:
    return master.startswith("local")


def _own_address(master: str) -> str:
    """The address at which executors reach the driver: on a cluster, the one that leads to the master."""
    if _is_local(master):
        return "127.0.0.1"
    import socket

    host, _, port = master.rpartition("/")[2].partition(",")[0].rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host or "127.0.0.1", int(port or 7077)))
        return str(probe.getsockname()[0])


def pack_modules(folder: Path) -> Path:
    """Packs our package for the executors, as one archive: what they import of it needs pyarrow alone."""
    root = Path(postdate.__file__).parent
    path = folder / "postdate-modules.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for module in sorted(root.rglob("*.py")):
            archive.write(module, module.relative_to(root.parent))
    return path


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for one session; it goes with it."""
    return tempfile.TemporaryDirectory(prefix="postdate-spark-", ignore_cleanup_errors=True)
