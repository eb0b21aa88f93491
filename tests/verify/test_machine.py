"""The machine of the fault suite: commands of clients write to the broker's disk, and a power loss is theirs, too."""

import signal
import sys
from pathlib import Path
from random import Random

import pytest

from postdate.table.format import MESSAGES
from tests.support.bulk import wait_until
from verify.faults import power
from verify.faults.driver import Form, Wish
from verify.faults.history import History
from verify.faults.machine import Machine, signal_to

# Named like the command, so that the layer takes it for one. An import writes files beside the table and syncs them.
COMMAND = """
import os, sys, time
folder = sys.argv[2]
os.makedirs(folder)
with open(f"{folder}/synced", "wb", buffering=0) as file:
    file.write(b"whole")
    os.fsync(file.fileno())
for path in (folder, os.path.dirname(folder)):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
with open(f"{folder}/lost", "wb", buffering=0) as file:
    file.write(b"never synced")
print("written", flush=True)
time.sleep(600)
"""


def test_a_power_loss_ends_a_command_of_a_client_and_keeps_what_it_has_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "MODES", (power.ALL,))
    history = History()
    machine = Machine(tmp_path, history, with_pipeline=False)
    script, said, beside = tmp_path / "postdate", tmp_path / "said", machine.broker.data / "beside"
    script.write_text(COMMAND)
    machine.start()
    try:
        with said.open("wb") as out:
            command = machine.driver.start_command([sys.executable, str(script), "import", str(beside)], out)
        wait_until(lambda: said.read_bytes() == b"written\n")
        assert command.pid not in machine.broker.processes(), "whoever kills the pipeline does not mean an import"
        machine.cut_power(Random(1))
        assert command.wait(10) < 0
        assert {path.name: path.read_bytes() for path in beside.iterdir()} == {"synced": b"whole"}
        machine.stop()
    finally:
        machine.end()
        history.close()


@pytest.mark.full
def test_an_accepted_import_survives_a_power_loss_before_a_pipeline_has_taken_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "MODES", (power.ALL,))
    history = History()
    machine = Machine(tmp_path, history, with_pipeline=True)
    machine.start()
    try:
        machine.driver.prepare()
        machine.await_pipeline()
        for pid in (pid for part in ("pipeline", "java", "worker") for pid in machine.pids(part)):
            signal_to(pid, signal.SIGSTOP)
        due = history.broker_ms() + 3_600_000
        assert machine.driver.import_messages([Wish(f"import1x{number}", Form.INSTANT, due) for number in range(100)])
        before = files_of_imports(machine)
        assert any(before.values()), before
        machine.cut_power(Random(1))
        assert files_of_imports(machine).items() >= before.items()
    finally:
        machine.end()
        history.close()


def files_of_imports(machine: Machine) -> dict[str, bytes]:
    folder = machine.broker.data / "table" / MESSAGES
    return {path.name: path.read_bytes() for path in folder.glob("_*import-*")}
