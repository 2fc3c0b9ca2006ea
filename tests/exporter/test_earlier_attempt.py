"""What earlier attempts have left of how far their workers had come."""

from pathlib import Path

from exporter import records
from exporter.readers.earlier_attempt import read_earlier_attempts


def test_of_each_attempt_there_is_its_report_or_what_its_sidecars_wrote(tmp_path: Path) -> None:
    (tmp_path / records.STATUS_DIR).mkdir()
    records.write_json(tmp_path / "report_a0.json", {"attempt": 0})
    records.write_json(tmp_path / "report_a2.json", {"attempt": 2})
    records.write_json(tmp_path / "status/n1.json", {"attempt": 1, "node": "n1"})
    records.write_json(tmp_path / "status/n2.json", {"attempt": 3, "node": "n2"})
    (tmp_path / "status/n3.json").write_text("{")
    found = read_earlier_attempts(tmp_path, 3)
    assert found == [[{"attempt": 2}], [{"attempt": 1, "node": "n1"}], [{"attempt": 0}]]


def test_a_first_attempt_has_none_before_it(tmp_path: Path) -> None:
    assert read_earlier_attempts(tmp_path, 0) == []


def test_without_anything_left_nothing_is_known(tmp_path: Path) -> None:
    assert read_earlier_attempts(tmp_path, 2) == [[], []]
