"""Names that a package imports when they are first asked for."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rollflow.stream.data.lazy_names import lazy_names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package `lazy_pack`, with `PART` in its module `part`, and `BROKEN` in one that raises."""
    (tmp_path / "lazy_pack").mkdir()
    (tmp_path / "lazy_pack" / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from lazy_pack.part import PART as PART\n"
        "    from lazy_pack.broken import BROKEN as BROKEN\n"
    )
    (tmp_path / "lazy_pack" / "part.py").write_text("PART = 1\n")
    (tmp_path / "lazy_pack" / "broken.py").write_text("raise OSError('no such disk')\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_pack

    lazy_pack.__all__, lazy_pack.__getattr__, lazy_pack.__dir__ = lazy_names("lazy_pack")
    assert lazy_pack.__all__ == ["BROKEN", "PART"]
    yield lazy_pack
    for name in ("lazy_pack", "lazy_pack.part"):
        sys.modules.pop(name, None)


def test_a_name_is_imported_once_it_is_asked_for(package: ModuleType) -> None:
    assert "lazy_pack.part" not in sys.modules
    assert {"PART", "BROKEN"} <= set(dir(package))
    assert package.PART == 1
    assert vars(package)["PART"] == 1  # it is found without `__getattr__` from now on
    with pytest.raises(AttributeError, match="module 'lazy_pack' has no attribute 'other'"):
        _ = package.other


def test_an_error_of_an_import_is_raised_as_it_is(package: ModuleType) -> None:
    with pytest.raises(OSError, match="no such disk"):
        _ = package.BROKEN
