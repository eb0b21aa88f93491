"""What travels to executors is enough there: a Python that has pyarrow, and the modules that Spark brings along."""

import os
import subprocess
from pathlib import Path

import pyspark
import pytest

from postdate.spark.session.session import packed
from tests.support.cluster import bare_python

SPARK_LIBRARY = Path(pyspark.__file__).parent / "python" / "lib"


@pytest.mark.parametrize(
    "module", ["postdate.spark.executor.tasks", "postdate.spark.pipeline.source", "postdate.spark.formats.public"]
)
def test_what_executors_import_travels(module: str, tmp_path: Path) -> None:
    brought = [packed(tmp_path), *SPARK_LIBRARY.glob("*.zip")]
    done = subprocess.run(
        [bare_python(tmp_path / "bare"), "-c", f"import {module}, postdate; print(postdate.__file__)"],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, brought))}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(packed(tmp_path)))
