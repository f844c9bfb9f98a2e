"""TOML tables and dataclasses: strict reading, and writing that is read as the same."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.errors import ConfigError
from serving.tables import attribute_texts, read_table, write_table


@dataclasses.dataclass(frozen=True)
class Inner:
    """A table inside.

    Attributes:
        ratio: a share,
            said on two lines.
    """

    ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ConfigError("ratio", self.ratio, "0 to 1")


@dataclasses.dataclass(frozen=True)
class Outer:
    """A table.

    Attributes:
        flag, count: two at once.
        name: ``code`` in text.
        inner: another table.
    """

    flag: bool = False
    count: int = 3
    name: str = "x"
    sizes: tuple[int, ...] = (1, 2)
    limit: int | None = None
    inner: Inner = dataclasses.field(default_factory=Inner)


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


@given(
    st.builds(
        Outer,
        st.booleans(),
        st.integers(-(1 << 60), 1 << 60),
        TEXT,
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.none() | st.integers(0, 9),
        st.builds(Inner, st.floats(0, 1)),
    )
)
def test_what_is_written_is_read_as_the_same(section) -> None:
    assert read_table(Outer(), tomllib.loads(write_table(section))) == section


def test_written_tables_say_what_each_key_is() -> None:
    assert write_table(Outer(limit=None)) == (
        "# A table.\n# two at once.\nflag = false\n# two at once.\ncount = 3\n# code in text.\n"
        'name = "x"\nsizes = [1, 2]\n# limit =\n'
        "\n# another table.\n[inner]\n# a share, said on two lines.\nratio = 0.5\n"
    )
    assert attribute_texts(Inner) == {"ratio": "a share, said on two lines."}


def test_keys_that_are_absent_keep_their_values() -> None:
    default = Outer(count=7, inner=Inner(0.25))
    assert read_table(default, {}) == default
    assert read_table(default, {"inner": {"ratio": 1}}) == Outer(count=7, inner=Inner(1.0))


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"cuont": 1}, "'outer.cuont' is 'unknown'; accepted: keys of [outer]: flag, count, name, sizes, limit, inner"),
        ({"cuont": 1}, "did you mean 'count'?"),
        ({"inner": {"raito": 1}}, "'outer.inner.raito' is 'unknown'; accepted: keys of [outer.inner]: ratio"),
        ({"count": "3"}, "'outer.count' is '3'; accepted: a whole number"),
        ({"count": True}, "'outer.count' is True; accepted: a whole number"),
        ({"count": 3.0}, "'outer.count' is 3.0; accepted: a whole number"),
        ({"flag": 1}, "'outer.flag' is 1; accepted: true or false"),
        ({"name": 1}, "'outer.name' is 1; accepted: a string"),
        ({"sizes": 1}, "'outer.sizes' is 1; accepted: a list, each a whole number"),
        ({"sizes": [1, "2"]}, "'outer.sizes[1]' is '2'; accepted: a whole number"),
        ({"inner": 1}, "'outer.inner' is 1; accepted: a table, [outer.inner]"),
        ({"inner": {"ratio": float("nan")}}, "'outer.inner.ratio' is nan; accepted: a number"),
        ({"inner": {"ratio": 2.0}}, "'outer.inner.ratio' is 2.0; accepted: 0 to 1"),
    ],
)
def test_other_keys_and_values_are_refused_by_name(table, sentence) -> None:
    with pytest.raises(ConfigError) as refused:
        read_table(Outer(), table, "outer")
    assert sentence in str(refused.value)
