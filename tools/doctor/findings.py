"""Facts, problems, and the report that collects them and survives a failing probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fact:
    """`value` is for scripts (JSON), `text` for people; by default the value itself."""

    name: str
    value: Any
    text: str | None = None

    def __str__(self) -> str:
        return str(self.value) if self.text is None else self.text


@dataclass(frozen=True)
class Problem:
    """A problem and its cure; is_needed: training cannot run with the problem."""

    what: str
    cure: str
    is_needed: bool = False


Finding = Fact | Problem


@dataclass
class Report:
    """All findings, the facts by section."""

    sections: dict[str, list[Fact]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def run(
        self,
        section: str,
        name: str,
        probe: Callable[[], Iterable[Finding]],
        *,
        cure: str,
        is_needed: bool = True,
    ) -> None:
        """Add what the probe yields; if it fails, its error is the fact `name` and a problem.

        This is the one place that shows an error in place of raising it.
        """
        facts = self.sections.setdefault(section, [])
        try:
            for finding in probe():
                if isinstance(finding, Fact):
                    facts.append(finding)
                else:
                    self.problems.append(finding)
        except Exception as error:
            lines = f"{type(error).__name__}: {error}".splitlines()
            facts.append(Fact(name, {"failed": lines}, f"failed: {lines[0]}"))
            self.problems.append(Problem(f"{section}, {name}: {lines[0]}", cure, is_needed))

    @property
    def is_healthy(self) -> bool:
        return not any(problem.is_needed for problem in self.problems)

    def text(self) -> str:
        lines = []
        for section, facts in self.sections.items():
            width = max((len(fact.name) for fact in facts), default=0)
            lines += [section, *(f"  {fact.name:<{width}}  {fact}" for fact in facts), ""]
        if not self.problems:
            return "\n".join([*lines, "problems: none"])
        lines.append("problems:")
        for number, problem in enumerate(self.problems, start=1):
            lines.append(f"  {number}. {problem.what}{' (needed)' if problem.is_needed else ''}")
            lines.append(f"     cure: {problem.cure}")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """JSON: {section: {fact: value}}, and the problems."""
        return {
            **{
                section: {fact.name: fact.value for fact in facts}
                for section, facts in self.sections.items()
            },
            "problems": [
                {"what": each.what, "cure": each.cure, "needed": each.is_needed}
                for each in self.problems
            ],
            "healthy": self.is_healthy,
        }
