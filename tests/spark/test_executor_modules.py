"""What travels to executors is enough there: a Python that has pyarrow, and the modules that Spark brings along."""

import os
import subprocess
from pathlib import Path

import pyspark
import pytest

from postdate.spark import executor
from postdate.spark.session.session import pack_modules
from tests.support.cluster import bare_python

SPARK_LIBRARY = Path(pyspark.__file__).parent / "python" / "lib"


EXECUTOR = sorted(Path(executor.__file__).parent.glob("*.py"))


@pytest.mark.parametrize(
    "module",
    [
        *(f"postdate.spark.executor.{path.stem}" for path in EXECUTOR),
        "postdate.spark.pipeline.source",
        "postdate.spark.formats.topic",
    ],
)
def test_what_executors_import_travels(module: str, tmp_path: Path) -> None:
    brought = [pack_modules(tmp_path), *SPARK_LIBRARY.glob("*.zip")]
    done = subprocess.run(
        [bare_python(tmp_path / "bare"), "-c", f"import {module}, postdate; print(postdate.__file__)"],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, brought))}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(pack_modules(tmp_path)))
