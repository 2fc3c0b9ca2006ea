"""A job whose workers restart several times a second, for about a minute."""

from bench import soak

SECONDS, WARM_UP_S = 300.0, 20.0  # at most
RESTARTS = 250  # after the warm-up; half a minute on an idle machine
WORKERS, LIFE_S = 8, 1.0
MOST_MIB_PER_1000_RESTARTS = 15.0  # caches still fill in a minute; `make soak` has the strict bound


def test_restarts_rotations_and_new_files_leave_nothing_behind() -> None:
    most = {"mib_per_1000_restarts": MOST_MIB_PER_1000_RESTARTS}
    found = soak.soak(SECONDS, WORKERS, LIFE_S, WARM_UP_S, most, RESTARTS)
    assert found["restarts"] >= RESTARTS
    assert [goal for goal, reached in found["goals"].items() if not reached] == [], str(found)
