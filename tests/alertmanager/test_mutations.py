"""A sample of the changed alert rules; all of them are for ``make test-mutations``."""

from tests.alertmanager.mutations import main
from tests.alertmanager.test_rules import needs_tools


@needs_tools
def test_tests_notice_a_sample_of_changes() -> None:
    assert main(["--sample", "40"]) == 0
