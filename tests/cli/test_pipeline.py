"""`postdate pipeline`: the secret of a standalone cluster, as far as it is looked at before Spark starts."""

import os
from pathlib import Path

import pytest

from postdate.cli.pipeline import CLUSTER_SECRET, _read_cluster_secret
from postdate.errors import UsageError

FAR, NEAR, SECRET = "spark://spark.example.org:7077", "spark://127.0.0.1:7077", "0123456789abcdef"


def test_a_cluster_on_the_network_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for master in (FAR, "spark://127.0.0.1:7077,spark.example.org:7077", "spark://127.example.org:7077"):
        with pytest.raises(UsageError, match="is reached over a network: name the file with the cluster's secret"):
            _read_cluster_secret(master, "")
    assert _read_cluster_secret(FAR, "none") == ""
    for master in (NEAR, "spark://localhost:7077", "spark://[::1]:7077", "local[2]", "yarn", "k8s://https://k:443"):
        assert _read_cluster_secret(master, "") == ""
    monkeypatch.setenv(CLUSTER_SECRET, SECRET)
    assert _read_cluster_secret(FAR, "") == SECRET
    assert CLUSTER_SECRET not in os.environ, "Spark's workers do not get it"


def test_a_secret_is_read_from_a_file_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    assert _read_cluster_secret(FAR, str(file)) == SECRET
    for wrong in ("short", "0123456789abcdef two", "x" * 300, SECRET + "\nspark.authenticate false"):
        file.write_text(wrong)
        with pytest.raises(UsageError, match="expected one line of 16 to 256") as caught:
            _read_cluster_secret(FAR, str(file))
        assert wrong not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        _read_cluster_secret(FAR, str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="is for a master spark://"):
        _read_cluster_secret("local[2]", str(file))
    monkeypatch.setenv(CLUSTER_SECRET, SECRET)
    with pytest.raises(UsageError, match="is none, and"):
        _read_cluster_secret(FAR, "none")
