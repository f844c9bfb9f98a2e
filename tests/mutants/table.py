"""The table of mutants: what is changed where, and which tests must fail then."""

import dataclasses
import tomllib
from pathlib import Path

CHANGES = Path(__file__).parent / "changes"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: ``old``, which occurs exactly once in ``file`` (relative to the repository), becomes ``new``.

    ``breaks`` says what is wrong with the result; ``caught_by`` are the pytest ids that must notice.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The changed text of the file.

        Raises:
          ValueError: the old text does not occur exactly once.
        """
        found = source.count(self.old)
        if found != 1:
            raise ValueError(
                f"{self.name}: the old text occurs {found} times in {self.file}, expected once: {self.old!r}"
            )
        return source.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All mutants, in the order of their files and of the table."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(CHANGES.glob("*.toml"))]
    entries = [entry for table in tables for entry in table["mutant"]]
    return [Mutant(**(entry | {"caught_by": tuple(entry["caught_by"])})) for entry in entries]
