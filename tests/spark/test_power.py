"""A power loss at any step: what was synced is enough to go on without gap or duplicate.

One run takes a copy of all folders at every step of the driver and of bulk's disk. Each copy is then robbed of what was
not synced, and what is left must hold what the broker was told.
"""

import json
import logging
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from postdate.arrival import NEVER
from postdate.errors import CorruptData
from postdate.storage.chunk import Chunk
from postdate.storage.disk import RealDisk
from postdate.table import merging
from postdate.table.delta import Table
from postdate.table.files import SYNC_TRACE, Window, read_window
from tests.support.power import TracedDisk, lose_power
from tests.support.spark import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    OF_BULK,
    OF_DRIVER,
    SECOND_MS,
    Piped,
    Sent,
    Steps,
    piping,
    sync_trace,
)

EVERY_BATCH = merging.Limits(soon_files=1, later_files=1)
HEALED = ("missing or cut", "read again from the log", "restored from the log", "cannot be found")


class Moment(NamedTuple):
    """The folders at a step, and what the broker had been told by then."""

    step: str
    folder: Path
    trace: str
    now_ms: int
    sent: list[Sent]
    taken: int
    arrival_of_taken: int
    horizon: int
    waiting: int
    chunks: set[str]


class Camera(Steps):
    """Takes a moment at each step."""

    heard = (*OF_DRIVER, *OF_BULK)

    def __init__(self, piped: Piped, target: Path, trace: Path) -> None:
        self._piped, self._target, self._trace = piped, target, trace
        self.moments: list[Moment] = []

    def __call__(self, name: str) -> None:
        folder = self._target / f"{len(self.moments):03d}-{name}"
        text = self._trace.read_text(encoding="utf-8")
        shutil.copytree(self._piped.folder, folder)
        fold, far = self._piped.broker.fold, self._piped.far
        self.moments.append(
            Moment(
                name, folder, text, self._piped.now, list(self._piped.sent), far.taken, far.arrival_of(far.taken),
                far.horizon_at_ms, far.rows_in - far.rows_out, fold.chunks.names(),
            )
        )  # fmt: skip


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, spark: Any) -> tuple[Path, list[Moment]]:
    """A pipeline's life of some minutes."""
    folder = tmp_path_factory.mktemp("lived")
    with piping(folder / "live", spark) as piped, _tracing(spark) as trace:
        piped.kill_bulk()
        piped.start_bulk(TracedDisk(piped.data, trace))
        piped.merge_limits = EVERY_BATCH
        camera = Camera(piped, folder / "moments", trace)
        with camera.planted():
            piped.restart_driver()
            for _ in range(3):
                piped.send(*(piped.now + 65 * SECOND_MS + n * 5_003 for n in range(20)))
                piped.send(*(piped.now + HOUR_MS + n for n in range(5)), piped.now + 40 * DAY_MS)
                piped.pass_ms(MINUTE_MS)
    return folder / "live", camera.moments


@contextmanager
def _tracing(spark: Any) -> Iterator[Path]:
    trace = sync_trace(spark)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SYNC_TRACE, str(trace))
        yield trace


def robbed(moment: Moment, live: Path, target: Path, seed: int) -> list[str]:
    shutil.copytree(moment.folder, target)
    return lose_power(target, live, moment.trace, random.Random(seed))


def problems(moment: Moment, folder: Path) -> list[str]:
    """What the broker was told and is not so."""
    found = []
    try:
        found += _problems_of_table(moment, Table(str(folder / "table" / "messages")))
        for name in moment.chunks:
            Chunk(RealDisk(folder / "data"), name).verify()
    except CorruptData as error:
        found.append(str(error))
    return found


def _problems_of_table(moment: Moment, table: Table) -> list[str]:
    if table.far < moment.taken:
        return [f"{moment.taken} far rows were taken, the table has {table.far}"]
    if missing := table.missing_files():
        return [f"{file.path} is missing or cut" for file in missing]
    window = Window(moment.horizon, NEVER, 0, moment.arrival_of_taken)
    rows = read_window(table.folder, list(table.files), window, ["due", "arrival", "kind"]).column("arrival")
    count = sum(arrival < moment.arrival_of_taken for arrival in rows.to_pylist())
    return [f"{moment.waiting} rows wait, the table has {count}"] if count != moment.waiting else []


def test_what_was_told_is_there_after_a_power_loss_at_any_step(
    lived: tuple[Path, list[Moment]], tmp_path: Path
) -> None:
    live, moments = lived
    reached = {moment.step for moment in moments}
    assert reached >= {
        "batch.begun", "ingest.written", "table.commit", "table.committed", "table.synced", "stage.call",
        "stage.called", "merge.written", "merge.committed", "batch.done", "chunk.write", "chunk.synced",
        "chunk.written",
    }  # fmt: skip
    lost = 0
    for number, moment in enumerate(moments):
        for seed in range(3):
            target = tmp_path / f"{number}-{seed}"
            told = robbed(moment, live, target, seed)
            lost += len(told)
            assert not problems(moment, target), f"{moment.step}, seed {seed}: {told}"
            shutil.rmtree(target)
    assert lost > len(moments), "there is always something that was not synced: the checkpoint and the history"


@pytest.mark.parametrize("kind", [".parquet", "/_delta_log/", "/chunks/"])
def test_a_sync_that_is_missing_would_be_noticed(lived: tuple[Path, list[Moment]], tmp_path: Path, kind: str) -> None:
    """The other way round: with one kind of sync left out the same judge finds something."""
    live, moments = lived
    found = []
    for number, moment in enumerate(moments):
        lines = (line for line in moment.trace.splitlines() if kind not in json.loads(line)["path"])
        target = tmp_path / f"{number}"
        robbed(moment._replace(trace="\n".join(lines)), live, target, number)
        found += problems(moment, target)
    assert found


SEEDS_FEW, SEEDS_MANY = range(2), range(2, 30)


@pytest.mark.parametrize("seed", SEEDS_FEW)
def test_broker_and_pipeline_go_on_after_a_power_loss(
    lived: tuple[Path, list[Moment]], tmp_path: Path, spark: Any, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    _go_on(lived, tmp_path, spark, caplog, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS_MANY)
def test_broker_and_pipeline_go_on_after_many_power_losses(
    lived: tuple[Path, list[Moment]], tmp_path: Path, spark: Any, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    _go_on(lived, tmp_path, spark, caplog, seed)


def _go_on(
    lived: tuple[Path, list[Moment]], folder: Path, spark: Any, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    live, moments = lived
    moment = random.Random(seed).choice(moments)
    told = robbed(moment, live, folder / "left", seed)
    logging.getLogger("postdate.tests").info("%s: %s", moment.step, told)
    with piping(folder / "left", spark, now_ms=moment.now_ms) as piped:
        piped.sent = list(moment.sent)
        with caplog.at_level(logging.WARNING, "postdate.pipeline"):
            piped.restart_driver()
        assert not any(words in caplog.text for words in HEALED), caplog.text
        piped.travel(piped.now + 2 * HOUR_MS)
