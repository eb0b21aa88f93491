"""The report of a check: its findings, and how much it looked at."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

_SHOWN_MAX = 3  # findings of one kind and place that are shown one by one; the rest is counted


@dataclass
class Report:
    """The findings, and counts of what was checked, by name, in the order of the work."""

    findings: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.findings

    def find(self, finding: str) -> None:
        """Adds a finding, once: two parts of the check may meet the same damage."""
        if finding not in self.findings:
            self.findings.append(finding)

    def find_each(self, mask: np.ndarray, sentence: Callable[[int], str]) -> None:
        """Adds a finding for each place where the mask is set; of many, the first ones and how many more there are."""
        hits = np.flatnonzero(mask)
        for hit in hits[:_SHOWN_MAX].tolist():
            self.find(sentence(hit))
        if len(hits) > _SHOWN_MAX:
            self.find(f"{sentence(int(hits[_SHOWN_MAX]))}; and so are {len(hits) - _SHOWN_MAX - 1} more behind it")

    def count(self, what: str, count: int) -> None:
        self.numbers[what] = self.numbers.get(what, 0) + count
