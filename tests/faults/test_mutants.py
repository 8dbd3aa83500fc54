"""Mutants still fit the source, and some of them are really noticed. `python tests/mutants/run.py` tries them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutants.catalogue import MUTANTS
from mutants.mutant import SOURCE, Edit, Rotten
from mutants.run import try_mutant
from support.cases import case

# Each is noticed within a few seeds.
QUICK = {"parent hash unchecked": 40, "absence is a conflict": 40, "weights before the journal": 40}


def test_every_mutant_fits_the_source() -> None:
    for name in MUTANTS:
        with case(name):
            for file, text in MUTANTS[name].patched().items():
                assert text != (SOURCE / "weightwire" / file).read_text(encoding="utf-8")
                compile(text, file, "exec")


def test_every_mutant_names_its_rule_and_its_tests() -> None:
    for name, mutant in MUTANTS.items():
        with case(name):
            assert mutant.rule
            assert all((SOURCE.parent / path).exists() for path in mutant.tests)


@pytest.mark.parametrize("old", ["not in the file", "import"])
def test_an_edit_that_no_longer_fits_is_refused(old: str) -> None:
    edit = Edit("chain/rules.py", old, "")
    with pytest.raises(Rotten, match=r"chain/rules\.py: the text occurs \d+ times"):
        edit.made((SOURCE / "weightwire" / edit.file).read_text(encoding="utf-8"))


def test_a_mutant_changes_only_its_copy_of_the_source(tmp_path: Path) -> None:
    file = tmp_path / "weightwire/chain/rules.py"
    file.parent.mkdir(parents=True)
    file.write_text((SOURCE / "weightwire/chain/rules.py").read_text())
    MUTANTS["parent hash unchecked"].apply(tmp_path)
    assert "(True, " in file.read_text()
    assert "(True, " not in (SOURCE / "weightwire/chain/rules.py").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_simulation_notices_a_mutant(name: str) -> None:
    verdict = try_mutant(MUTANTS[name], QUICK[name], simulation_only=True)
    assert verdict.seed is not None, verdict.row
