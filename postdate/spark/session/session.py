"""Starts a Spark session that is quiet, has our sizes, and carries our modules to its executors; ends it when asked."""

import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Self

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.java_gateway import launch_gateway
from pyspark.serializers import UTF8Deserializer, read_int
from pyspark.sql import SparkSession

import postdate
from postdate.errors import PipelineFailed
from postdate.process import end_with_parent, run_on_thread

logger = logging.getLogger("postdate.pipeline")

STOP_S = 1.0
TASK_END_S = 30.0  # how long a cancelled task may take to end
_TRACEBACK, _OURS = "Traceback (most recent call last):\n", "postdate.errors."
_LOOK_S = 0.05
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
# Spark preempts no task: a pool says whose tasks come first when a core is free.
_POOLS = """\
<?xml version="1.0"?>
<allocations>
  <pool name="promotion"><schedulingMode>FIFO</schedulingMode><weight>1000</weight><minShare>1000</minShare></pool>
  <pool name="beside"><schedulingMode>FIFO</schedulingMode><weight>1</weight><minShare>0</minShare></pool>
</allocations>
"""
PROMOTION, BESIDE = "promotion", "beside"
# What fails in a task or a batch the driver reports itself.
_SILENT = (
    "org.apache.spark.deploy.SparkSubmit", "org.apache.spark.api.python.PythonGatewayServer",
    "org.apache.spark.repl.Main", "org.apache.spark.sql.execution.streaming", "org.apache.spark.executor",
    "org.apache.spark.scheduler", "org.apache.spark.api.python", "org.apache.spark.util", "org.apache.spark.network",
    "org.apache.spark.storage", "org.apache.spark.SparkContext", "org.apache.spark.deploy.client",
)  # fmt: skip


class Gateway:
    """Spark's Java process, and the session in it. Java ends with the block, and with the thread that makes this."""

    def __init__(self, master: str, memory: str, home: str, folder: Path, secret: str = "") -> None:
        """Starts the Java at `home`. `folder` is for its log settings, our modules and its scratch files. `secret` is
        that of a standalone cluster: empty where its processes do not prove to each other who they are.
        """
        _set_environment(master, home)
        silence_py4j()
        log_settings = folder / "log4j2.properties"
        silent = (
            f"logger.s{number}.name = {name}\nlogger.s{number}.level = off\n" for number, name in enumerate(_SILENT)
        )
        log_settings.write_text("".join([_LOG4J, *silent]), encoding="utf-8")
        pools = folder / "pools.xml"
        pools.write_text(_POOLS, encoding="utf-8")
        self._conf = SparkConf()
        settings = _settings(master, memory, log_settings, pools, folder) | _protection(master, secret)
        for name, value in settings.items():
            self._conf.set(name, value)
        self._master = master
        self._place = folder / "gateway"  # where Java listens, and its secret; Java writes it
        self.session: Any = None
        flags = [text for name, value in self._conf.getAll() for text in ("--conf", f"{name}={value}")]
        words = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        if secret:
            flags += ["--load-spark-defaults", "--properties-file", str(_write_secret(folder, secret))]
        # Not by PySpark, from which nobody learns the process before Java listens. It has a group of its own: Ctrl-C in
        # a terminal reaches us alone, and we stop Java in order. The pipe tells Java that we are gone.
        self.process = subprocess.Popen(
            [str(Path(_find_spark_home()) / "bin" / "spark-submit"), *flags, *words],
            stdin=subprocess.PIPE, process_group=0, preexec_fn=end_with_parent(),
            env=os.environ | {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(self._place)},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stops Spark, and kills its process where that takes too long."""
        if self.session is not None:
            try_to_stop(self.session, "Spark")
        if self.process.poll() is None:  # until it is reaped its number is its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def connect(self, lines: Sequence[str] = ()) -> Any:
        """Waits for Java, and returns a session in it. Where Java does not even start, the last lines that it wrote say
        why. Raises PipelineFailed.
        """
        while not self._place.exists() and self.process.poll() is None:
            time.sleep(_LOOK_S)
        try:
            self.session = self._start_session()
        except Py4JJavaError as error:
            why = first_line(str(error.java_exception))
            if self._master.startswith("spark://") and "stopped SparkContext" in why:  # Spark itself says no more
                why = "the master does not answer, or wants another secret: see --cluster-secret"
            raise PipelineFailed(f"Spark does not start on {self._master}: {why}") from error
        except (PySparkException, Py4JError, OSError) as error:
            raise PipelineFailed(f"Spark does not start: {'; '.join(lines) or first_line(error)}") from error
        return self.session

    def _start_session(self) -> Any:
        with self._place.open("rb") as place:
            port, secret = read_int(place), UTF8Deserializer().loads(place)  # type: ignore[no-untyped-call]
        known = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
        os.environ.update(known)
        try:
            gateway = launch_gateway(self._conf)  # type: ignore[no-untyped-call]
        finally:
            for name in known:
                del os.environ[name]
        on_interrupt = signal.getsignal(signal.SIGINT)
        context = SparkContext(gateway=gateway, conf=self._conf)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, on_interrupt)  # PySpark's own asks Java, which may be what we wait for
        return SparkSession(context)


def try_to_stop(what: Any, name: str) -> None:
    """Stops a session or a query, in a thread of its own: that may take longer than we wait."""

    def stop() -> None:
        try:
            what.stop()
        except Exception as error:  # the process ends now, whatever Spark says
            logger.debug("%s did not stop: %s", name, first_line(error))

    wait([run_on_thread(stop)], STOP_S)


def silence_py4j() -> None:
    """py4j raises what goes wrong between us and Java, and logs it with its traceback as well, by the root logger: also
    where we have ended Java ourselves, because it took too long.
    """
    logging.getLogger().addFilter(_is_not_of_py4j)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


def has_java_ended(spark: Any) -> bool:
    """Whether Java is gone or about to go. It stops Spark first, whose work fails then, and answers until its process
    has ended. A Java that does not answer at all is still there.
    """
    asked = run_on_thread(lambda: bool(spark.sparkContext._jsc.sc().isStopped()))
    wait([asked], STOP_S)
    return asked.done() and (asked.exception() is not None or asked.result())


def first_line(error: object) -> str:
    """The sentence of an exception: Spark's without its page of Java, a task's without its traceback."""
    text = str(getattr(error, "desc", None) or error).strip()
    raised = text.rpartition(_TRACEBACK)[2] if _TRACEBACK in text else text
    sentence = next((line for line in raised.splitlines() if not line.startswith(" ")), text)
    return sentence.removeprefix(_OURS)[:300]


def _set_environment(master: str, home: str) -> None:
    os.environ["JAVA_HOME"] = home
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable if _is_local(master) else "python3")
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", _own_address(master))
    if _is_local(master):
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"  # nobody else has to reach it
        # Workers on this machine know the package by the interpreter's own path alone.
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        root = str(Path(postdate.__file__).parent.parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *(path for path in known if path and path != root)])


def choose_pool(spark: Any, name: str) -> None:
    """Has the tasks of this thread run in a pool: PROMOTION before BESIDE."""
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)


def _settings(master: str, memory: str, log_settings: Path, pools: Path, folder: Path) -> dict[str, str]:
    # Java only hands out work: its second compiler would cost more than it gains.
    java = f"-Xss64m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dlog4j2.configurationFile=file:{log_settings}"
    # On this machine executors have the whole package; elsewhere it travels with the job.
    own = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    carried = own if _is_local(master) else {"spark.submit.pyFiles": str(pack_modules(folder))}
    return carried | {
        "spark.master": master,
        "spark.app.name": "postdate",
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": java,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder),
        "spark.hadoop.fs.permissions.umask-mode": "077",  # Hadoop sets the rights of files itself, beside our umask
        "spark.sql.warehouse.dir": str(folder),  # else Spark makes one in the current folder
        "spark.sql.streaming.numRecentProgressUpdates": "2",
        "spark.sql.streaming.minBatchesToRetain": "10",
        "spark.sql.shuffle.partitions": "2",
        "spark.scheduler.mode": "FAIR",
        "spark.scheduler.allocation.file": f"file:{pools}",
        "spark.task.maxFailures": "2",
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
        "spark.python.worker.reuse": "true",
        "spark.scheduler.listenerbus.eventqueue.capacity": "1000",
        # Queries and predicates call no method of Java by its name, run no script and, unless somebody allows it for a
        # query of his own, read no file: no predicate may learn what this process can read.
        "spark.sql.restrictedMode.enabled": "true",
        "spark.sql.runSQLOnFiles": "false",
        "spark.driver.maxResultSize": "512m",
        # A task that does not end when it is told to costs its executor.
        "spark.task.reaper.enabled": "true",
        "spark.task.reaper.killTimeout": f"{TASK_END_S:.0f}s",
    }


def _protection(master: str, secret: str) -> dict[str, str]:
    """Settings by which the processes of Spark prove to each other that they belong together, and encrypt what they
    say and what they leave on disk. Whoever reaches a port of Spark without that runs code in it. On YARN, on
    Kubernetes and on one machine Spark makes a secret for each session.
    """
    redacted = {"spark.redaction.regex": "(?i)secret|password|passwd|token|credential|access[.]?key"}
    if master.startswith("spark://") and not secret:
        return redacted
    proved = {
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
        "spark.network.crypto.authEngineVersion": "2",
        "spark.network.crypto.saslFallback": "false",
    }
    # On this machine the folder of scratch files is open to nobody else.
    return redacted | proved | ({} if _is_local(master) else {"spark.io.encryption.enabled": "true"})


def _write_secret(folder: Path, secret: str) -> Path:
    """Writes a secret where Spark reads it: what stands in a command is read by every user of the machine."""
    path = folder / "secret.conf"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f"spark.authenticate.secret {secret}\n")
    return path


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
