"""The state in a snapshot against the state of a fold at the same position: where do they differ?

Left out is what two folds of one log need not share: what a run's settings decide (counts per second), what looking or
retention moves (recovery.LOCAL_FAR_STATE, where rows begin), and what retention makes a broker forget.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from postdate.check.folder import Folder
from postdate.check.saved import Saved
from postdate.state import saved as recovery
from postdate.state.fold import Fold
from postdate.state.wheel import SINGLE

_TEXT_MAX = 120  # characters of a value in a finding


def differences(folder: Folder, saved: Saved, fold: Fold) -> list[str]:
    """One sentence for each place where the small state differs."""
    kept, folded = _comparable(saved.state), _comparable(json.loads(recovery.state_json(fold)))
    numbers = {base >> folder.segments.shift for base in folder.segments.bases}
    names = folded["chunks"] | kept["chunks"]
    bases = {base for base, name in names.items() if folder.has_chunk(name)}
    _leave_out_gone(kept, folded, "seen", numbers)
    _leave_out_gone(kept, folded, "touched", numbers)
    _leave_out_gone(kept, folded, "chunks", bases)
    _leave_out_gone(kept, folded, "chunk_seen", bases)
    return list(_differences("", kept, folded))


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    state = {name: value for name, value in state.items() if name != "seconds"}
    state["far"] = {name: value for name, value in state["far"].items() if name not in recovery.LOCAL_FAR_STATE}
    state["index"] = state["index"]["length"]
    state["queues"] = [[length, times_length] for length, times_length, _ in state["queues"]]
    for name in ("held", "seen", "touched", "chunks", "chunk_seen"):
        state[name] = dict(state[name])
    state["tombstones"] = sorted(state["tombstones"])
    state["groups"] = state["groups"] | {"offsets": sorted(state["groups"]["offsets"])}
    return state


def _leave_out_gone(kept: dict[str, Any], folded: dict[str, Any], name: str, present: set[int]) -> None:
    """Keeps, of a table by segment or chunk, those that are there.

    The broker forgets what retention removes. After a crash a removed file may be there again, still forgotten.
    """
    kept[name] = {key: value for key, value in kept[name].items() if key in present}
    folded[name] = {key: value for key, value in folded[name].items() if key in kept[name]}


def _differences(name: str, kept: Any, folded: Any) -> Iterator[str]:
    """Where two states differ, as deep as their shapes are the same."""
    if kept == folded:
        return
    if isinstance(kept, dict) and isinstance(folded, dict):
        for key in sorted(kept.keys() | folded.keys()):
            yield from _differences(f"{name} {key}".strip(), kept.get(key), folded.get(key))
    elif isinstance(kept, list) and isinstance(folded, list) and len(kept) == len(folded):
        for index, (own, other) in enumerate(zip(kept, folded, strict=True)):
            yield from _differences(f"{name} [{index}]", own, other)
    else:
        yield f"{name} is {_shown(kept)}, the log gives {_shown(folded)}"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


_SLOT_HEAD = np.dtype([("due", "<i8"), ("count", "<i8")])


def slot_differences(saved: Saved, folded: dict[int, np.ndarray]) -> Iterator[str]:
    """One sentence for each slot of the wheel that differs."""
    kept = _slots(saved.slots())
    none = np.empty(0, SINGLE)
    for due_at_ms in sorted(kept.keys() | folded.keys()):
        own, other = kept.get(due_at_ms, none), folded.get(due_at_ms, none)
        if own.tobytes() != other.tobytes():
            yield (
                f"the slot due at {due_at_ms} has {len(own)} entries that are not the {len(other)} which the log gives"
            )


def slots_of(fold: Fold) -> dict[int, np.ndarray]:
    """The singles in a fold's wheel, by due."""
    try:
        return _slots(fold.wheel.freeze().pieces())
    finally:
        fold.wheel.thaw()


def _slots(pieces: Iterable[bytes]) -> dict[int, np.ndarray]:
    """The singles of a wheel's pieces (Wheel.freeze), by due, in arrival order."""
    slots: dict[int, bytes] = {}
    for piece in pieces:
        heads = np.frombuffer(piece, _SLOT_HEAD, int.from_bytes(piece[:8], "little"), 8)
        at = 8 + heads.nbytes
        for due_at_ms, count in heads.tolist():
            slots[due_at_ms] = slots.get(due_at_ms, b"") + piece[at : at + count * SINGLE.itemsize]
            at += count * SINGLE.itemsize
    return {due_at_ms: np.sort(np.frombuffer(slot, SINGLE), order="offset") for due_at_ms, slot in slots.items()}
